"""Names of KV blocks, by which workers report their prefix caches to frontends and decode workers.

A full block's name is a hash of its tokens and all tokens before them. It takes about 1 us, vLLM's own hash 16 to
39 us. A wrong or stale name costs only time, because engines find prefix hits by their own hashes.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

NAME_BYTES = 8
MAX_REPORTED = 4096
"""Maximum of names that a worker reports for its cache: if the cache has more blocks, only every 2nd block, every 4th,
and so on. For blocks that are only in host memory, it reports up to as many again."""


def root_name(salt: str | None, adapter: int = 0) -> bytes:
    """Return the `parent` for a prompt's first block; it differs for each cache salt and LoRA adapter."""
    if not (salt or adapter):
        return b""
    key = adapter.to_bytes(NAME_BYTES) if adapter else b""
    return blake2b((salt or "").encode(errors="replace"), digest_size=NAME_BYTES, key=key).digest()


class PromptImage(NamedTuple):
    """An image in a prompt. Its placeholder tokens are the same for every image."""

    name: str
    """hash of the image"""
    start: int
    """position of its first token"""
    tokens: int


class PrefixKey(NamedTuple):
    """What a prompt's names depend on besides its tokens."""

    salt: str | None
    adapter: int
    images: list[PromptImage]


def prompt_images(features: Iterable[Any] | None) -> list[PromptImage]:
    """Return the images in vLLM's multimodal features of a request."""
    places = ((each.identifier, each.mm_position) for each in features or ())
    return [PromptImage(name, place.offset, place.length) for name, place in places]


def block_names(
    tokens: Sequence[int],
    block_size: int,
    parent: bytes = b"",
    end: int | None = None,
    shown: Mapping[int, bytes] = MappingProxyType({}),
) -> Iterator[bytes]:
    """Yield the names of the full blocks of `tokens` up to `end`. `parent` is the name of the block before them;
    `shown` are the `image_keys` of the prompt."""
    pack, name = struct.Struct(f"<{block_size}I").pack, parent
    for start in range(0, (len(tokens) if end is None else end) - block_size + 1, block_size):
        block = name + pack(*tokens[start : start + block_size]) + shown.get(start, b"")
        name = blake2b(block, digest_size=NAME_BYTES).digest()
        yield name


def image_keys(images: Iterable[PromptImage], block_size: int) -> dict[int, bytes]:
    """Return a key for each block that contains part of an image, by the position of the block's first token."""
    found: dict[int, bytes] = {}
    for name, start, tokens in images:
        for block in range(start - start % block_size, start + tokens, block_size):
            found[block] = found.get(block, b"") + image_key(name, start - block)
    return found


def image_key(name: str, offset: int) -> bytes:
    """Return the key of an image that begins `offset` tokens after a block's first token (below 0: before it)."""
    return f"{name}@{offset};".encode()


class PromptNames:
    """The names of a prompt's blocks. It hashes a block when its name is first asked for."""

    def __init__(
        self, prompt: Sequence[int], salt: str | None, adapter: int = 0, images: Iterable[PromptImage] = ()
    ) -> None:
        self._prompt, self._root, self._images = prompt, root_name(salt, adapter), images
        self._of: dict[int, tuple[list[bytes], Iterator[bytes]]] = {}
        """By block size: the names so far, and an iterator over the others."""

    def _names(self, block_size: int) -> tuple[list[bytes], Iterator[bytes]]:
        if block_size not in self._of:
            shown = image_keys(self._images, block_size)
            self._of[block_size] = [], block_names(self._prompt, block_size, self._root, shown=shown)
        return self._of[block_size]

    def of(self, block_size: int) -> Iterator[bytes]:
        """Yield the names of the prompt's full blocks."""
        known, others = self._names(block_size)
        yield from known
        for name in others:
            known.append(name)
            yield name

    def at(self, block_size: int, index: int) -> bytes | None:
        """Return the name of the full block at this index; None beyond the last one."""
        known, others = self._names(block_size)
        known.extend(islice(others, max(0, index + 1 - len(known))))
        return known[index] if index < len(known) else None

    def shared(self, others: Iterable["PromptNames"], block_size: int) -> int:
        """Return how many of the `reusable` blocks at least one of `others` has. A name stands for all blocks before
        it, so each further prompt that shares no more costs one comparison."""
        own, blocks = self.reusable(block_size), 0
        name = next(own, None)
        for other in others:
            while name is not None and other.at(block_size, blocks) == name:
                name, blocks = next(own, None), blocks + 1
        return blocks

    def reusable(self, block_size: int) -> Iterator[bytes]:
        """Yield the names of the blocks that may come from a cache. As in vLLM, the prompt's last token never does,
        because it must be computed."""
        return islice(self.of(block_size), (len(self._prompt) - 1) // block_size if self._prompt else 0)


def report_stride(blocks: int) -> int:
    """Return the smallest power of 2 at which a cache of this many blocks has at most `MAX_REPORTED` names."""
    stride = 1
    while blocks > stride * MAX_REPORTED:
        stride *= 2
    return stride


class CachedPrefixes:
    """The names of the blocks in an engine's prefix cache, and their changes for each follower. The engine calls
    `resize`, `add`, `remove` and `clear`."""

    def __init__(self) -> None:
        self.block_size = 1
        """tokens"""
        self.stride = 1
        """every `stride`th block of a prompt is reported"""
        self._copies: dict[bytes, int] = {}
        """number of blocks with this name, in the cache and in host memory"""
        self._host: set[bytes] = set()
        """names of blocks in host memory"""
        self._host_only: dict[bytes, None] = {}
        """reported names in host memory but not in the cache, in the order in which they left the cache"""
        self._reported: set[bytes] = set()
        self._changed: dict[str, set[bytes]] = {}
        """by follower: names that changed since its last call of `changes`"""

    def resize(self, blocks: int, block_size: int) -> None:
        """Set the size of the empty cache."""
        self.block_size = block_size
        self.stride = report_stride(blocks)

    def add(self, name: bytes, depth: int, *, host: bool = False) -> None:
        """Record that the `depth`th block of a prompt (from 1) entered the cache, or host memory."""
        if host and name in self._host:
            return
        if host:
            self._host.add(name)
        self._copies[name] = self._copies.get(name, 0) + 1
        if depth % self.stride == 0 and name not in self._reported:
            self._reported.add(name)
            self._record_changes([name])
        self._bound_host(name)

    def remove(self, name: bytes, *, host: bool = False) -> bool:
        """Record that a block left the cache, or host memory. Return whether it was the last with this name."""
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
        """Update `_host_only` after a change of `name`, and drop its oldest name beyond MAX_REPORTED."""
        self._host_only.pop(name, None)
        if name in self._reported and not self._in_cache(name):
            self._host_only[name] = None
            if len(self._host_only) > MAX_REPORTED:
                self._forget(next(iter(self._host_only)))

    def _forget(self, name: bytes) -> None:
        self._host_only.pop(name, None)
        if name in self._reported:
            self._reported.discard(name)
            self._record_changes([name])

    def clear(self) -> None:
        self._record_changes(self._reported)
        self._reported.clear()
        self._host_only.clear()
        self._host.clear()
        self._copies.clear()

    def _record_changes(self, changed: Iterable[bytes]) -> None:
        names = list(changed)
        for follower in self._changed.values():
            follower.update(names)

    def hit(self, prompt: PromptNames, *, host: bool = True) -> int:
        """Return the number of leading prompt tokens in the cache or, with `host`, in host memory."""
        if not self._copies:
            return 0
        is_cached = self._copies.__contains__ if host or not self._host else self._in_cache
        return self.block_size * sum(1 for _ in takewhile(is_cached, prompt.reusable(self.block_size)))

    def _in_cache(self, name: bytes) -> bool:
        return self._copies.get(name, 0) > (name in self._host)

    def known(self) -> list[bytes]:
        return list(self._reported)

    def follow(self, follower: str, wanted: bool = True) -> bool:
        """Collect changes for this follower's calls of `changes`, or stop that. Return whether the follower is new."""
        if not wanted:
            self._changed.pop(follower, None)
        elif follower not in self._changed:
            self._changed[follower] = set()
            return True
        return False

    def changes(self, follower: str) -> tuple[list[bytes], list[bytes]]:
        """Return the names added and removed since the follower's last call. A name may be listed without a change."""
        if not (changed := self._changed.get(follower)):
            return [], []
        self._changed[follower] = set()
        return [name for name in changed if name in self._reported], list(changed - self._reported)
