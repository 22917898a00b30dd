"""Names of prompts' prefixes, by which workers tell frontends what they have cached, without the prompts themselves.

A name is a hash of a full KV block and all blocks before it. Workers name what their engines cache as frontends name
the blocks of a prompt: about 1 us for a block, where vLLM's own hash costs 16 to 39. A name that is wrong or stale
costs time only, because each engine decides by its own hashes what it reuses.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

NAME_BYTES = 8
"""length of a name in bytes"""
MAX_REPORTED = 4096
"""most names that a worker tells: of a larger cache, only every 2nd block's, every 4th's, and so on; and as many of the
blocks that only host memory has"""


def root_name(salt: str | None, adapter: int = 0) -> bytes:
    """The parent of a prompt's first name: prompts of another cache salt or LoRA adapter have other names."""
    if not (salt or adapter):
        return b""
    key = adapter.to_bytes(NAME_BYTES) if adapter else b""
    return blake2b((salt or "").encode(errors="replace"), digest_size=NAME_BYTES, key=key).digest()


class PromptImage(NamedTuple):
    """A picture in a prompt, whose tokens do not say what is on it."""

    name: str
    """a hash of it"""
    start: int
    """its first token"""
    tokens: int


def prompt_images(features: Iterable[Any] | None) -> list[PromptImage]:
    """The pictures among vLLM's features of a request."""
    places = ((each.identifier, each.mm_position) for each in features or ())
    return [PromptImage(name, place.offset, place.length) for name, place in places]


def block_names(
    tokens: Sequence[int],
    block_size: int,
    parent: bytes = b"",
    end: int | None = None,
    shown: Mapping[int, bytes] = MappingProxyType({}),
) -> Iterator[bytes]:
    """Yield the names of the full blocks of `tokens` up to `end`. `parent` is the name of what precedes them; `shown`
    are the `keys` of its pictures."""
    pack, name = struct.Struct(f"<{block_size}I").pack, parent
    for start in range(0, (len(tokens) if end is None else end) - block_size + 1, block_size):
        block = name + pack(*tokens[start : start + block_size]) + shown.get(start, b"")
        name = blake2b(block, digest_size=NAME_BYTES).digest()
        yield name


def image_keys(pictures: Iterable[PromptImage], block_size: int) -> dict[int, bytes]:
    """By the first token of each block with a part of a picture: what tells it from blocks of others."""
    found: dict[int, bytes] = {}
    for name, start, tokens in pictures:
        for block in range(start - start % block_size, start + tokens, block_size):
            found[block] = found.get(block, b"") + image_key(name, start - block)
    return found


def image_key(name: str, offset: int) -> bytes:
    """Of a picture that begins `offset` tokens after its block; below 0: before it."""
    return f"{name}@{offset};".encode()


class CachedPrefixes:
    """The names of the blocks in an engine's prefix cache, and what has changed in them since `changes` was called. The
    engine calls `resize`, `add`, `remove` and `clear`."""

    def __init__(self) -> None:
        self.block_size = 1
        """tokens"""
        self.stride = 1
        """only every `stride`th block of a prompt is reported"""
        self._copies: dict[bytes, int] = {}
        """blocks with the same name"""
        self._host: set[bytes] = set()
        """those in host memory, which holds blocks that may have left the cache"""
        self._left: dict[bytes, None] = {}
        """known names that only host memory has, those first that left the cache first: ends before beginnings"""
        self._known: set[bytes] = set()
        self._changed: set[bytes] = set()
        self.followed = False
        """something calls `changes` regularly"""

    def resize(self, blocks: int, block_size: int) -> None:
        """Set the size of the cache, while it is empty."""
        self.block_size, self.stride = block_size, 1
        while blocks > self.stride * MAX_REPORTED:
            self.stride *= 2

    def add(self, name: bytes, depth: int, *, host: bool = False) -> None:
        """A block entered the cache, or host memory, the `depth`th of its prompt, counted from 1."""
        if host and name in self._host:
            return
        if host:
            self._host.add(name)
        self._copies[name] = self._copies.get(name, 0) + 1
        if depth % self.stride == 0 and name not in self._known:
            self._known.add(name)
            self._note([name])
        self._bound_host(name)

    def remove(self, name: bytes, *, host: bool = False) -> bool:
        """A block left the cache, or host memory; return whether it was the last of this name."""
        if host and name not in self._host:
            return False
        if host:
            self._host.remove(name)
        copies = self._copies.pop(name, 0) - 1
        if copies > 0:
            self._copies[name] = copies
            self._bound_host(name)
            return False
        self._forget(name)
        self._host.discard(name)
        return True

    def _bound_host(self, name: bytes) -> None:
        """Forget the first of `_left` where the last is one too many; `name` may have become one, or none."""
        self._left.pop(name, None)
        if name in self._known and not self._in_cache(name):
            self._left[name] = None
            if len(self._left) > MAX_REPORTED:
                self._forget(next(iter(self._left)))

    def _forget(self, name: bytes) -> None:
        self._left.pop(name, None)
        if name in self._known:
            self._known.discard(name)
            self._note([name])

    def clear(self) -> None:
        self._note(self._known)
        self._known.clear()
        self._left.clear()
        self._host.clear()
        self._copies.clear()

    def _note(self, changed: Iterable[bytes]) -> None:
        if self.followed:
            self._changed.update(changed)

    def hit(
        self,
        prompt: Sequence[int],
        salt: str | None,
        adapter: int = 0,
        pictures: Iterable[PromptImage] = (),
        *,
        host: bool = True,
    ) -> int:
        """Return how many leading tokens of the prompt are cached, with `host` also in host memory; as in vLLM never
        all, for the last token has to be computed."""
        if not self._copies:
            return 0
        known = self._copies.__contains__ if host or not self._host else self._in_cache
        shown = image_keys(pictures, self.block_size)
        prefixes = block_names(prompt, self.block_size, root_name(salt, adapter), len(prompt) - 1, shown)
        return self.block_size * sum(1 for _ in takewhile(known, prefixes))

    def _in_cache(self, name: bytes) -> bool:
        return self._copies.get(name, 0) > (name in self._host)

    def known(self) -> list[bytes]:
        return list(self._known)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the names added and the names removed since the last call; some may have been so before."""
        changed, self._changed = self._changed, set()
        return [name for name in changed if name in self._known], list(changed - self._known)
