"""Reads KV ahead: overlaps KV transfer with prefill, so that a decode engine has most of the KV when the prefill ends.

During a prefill, the prefill engine names the complete blocks. The decode engine reads them into free blocks of its
pool, which belong to no request and are not in the prefix cache. It uses them only if the finished prefill's handle
names the same blocks, the prefill was never preempted, and the prefill engine confirmed after each read that it still
held the KV. Then the blocks enter the prefix cache, where the request finds them. Otherwise they go back to the pool
once all reads into them have ended, because a read cannot be aborted (docs/decisions/0004-stalled-reads.md,
0028-read-ahead.md).

Pure: callers pass the pool and the time."""

from dataclasses import dataclass, field
from typing import Any, Protocol

Source = tuple[str, str]
"""Ids of the prefill engine and of the prefill in it."""
MIN_PIECE_BYTES = 8 << 20
"""Minimum size of a piece, because each read costs the decode engine some milliseconds."""
MIN_FREE_SHARE = 0.25
"""Share of the pool that must stay free for requests."""
KEEP_SECONDS = 30.0
"""Seconds after a prompt's last piece until its blocks are dropped, unless the handle came."""


class Pool(Protocol):
    """The part of vLLM's BlockPool that is used here."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int: ...
    def get_new_blocks(self, num_blocks: int) -> list[Any]: ...
    def free_blocks(self, ordered_blocks: Any) -> None: ...


@dataclass
class Piece:
    name: str
    """PREFIX and a number; the connector's worker takes it for a request id."""
    local: list[int]
    remote: list[int]


@dataclass
class _Prompt:
    """The blocks of a prompt that were or are being read ahead."""

    first: int
    """Index in the prompt of the first block to read."""
    is_valid: bool = True
    remote: list[int] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)
    reads: dict[str, int] = field(default_factory=dict)
    """Running piece -> number of ranks that still read it."""
    expires: float = 0.0


class ReadAhead:
    PREFIX = "pdserve-ahead-"

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._prompts: dict[Source, _Prompt] = {}
        self._dropped: list[_Prompt] = []
        self._number = 0

    def next_piece(
        self, source: Source, skip: int, complete: list[int], pool: Pool, now: float
    ) -> Piece | None:
        """Allocate blocks for the next piece. None if the prefill has no new block, this engine has too few free ones,
        or the prompt's reads cannot be used. `complete`: the prefill's complete blocks; this engine's prefix cache has
        the first `skip` of them."""
        prompt = self._prompts.setdefault(source, _Prompt(skip))
        begun = prompt.first + len(prompt.remote)
        if complete[prompt.first : begun] != prompt.remote:  # the prefill was preempted, and has other blocks
            prompt.is_valid = False
        fresh = complete[begun:]
        room = pool.get_num_free_blocks() - MIN_FREE_SHARE * pool.num_gpu_blocks
        if not prompt.is_valid or not fresh or len(fresh) > room:
            return None
        blocks = pool.get_new_blocks(len(fresh))
        self._number += 1
        piece = Piece(f"{self.PREFIX}{self._number}", [block.block_id for block in blocks], fresh)
        prompt.remote += fresh
        prompt.blocks += blocks
        prompt.reads[piece.name] = self._ranks
        prompt.expires = now + KEEP_SECONDS
        return piece

    def end_reads(self, piece: str, ranks: int, pool: Pool) -> None:
        """Record that `ranks` more ranks have ended their reads of the piece, successfully or not."""
        for prompt in [*self._prompts.values(), *self._dropped]:
            if piece in prompt.reads:
                prompt.reads[piece] -= ranks
                if not prompt.reads[piece]:
                    del prompt.reads[piece]
        self._free(pool)

    def invalidate(self, piece: str) -> None:
        """Record that a read of the piece failed or is overdue."""
        for prompt in self._prompts.values():
            if piece in prompt.reads:
                prompt.is_valid = False

    def is_reading(self, source: Source) -> bool:
        """Whether reads are running whose blocks may still be used."""
        prompt = self._prompts.get(source)
        return prompt is not None and prompt.is_valid and bool(prompt.reads)

    def take(self, source: Source, blocks: list[int], pool: Pool) -> tuple[int, list[Any]] | None:
        """Return what was read of a prompt: index of the first block in the prompt, and this engine's blocks, which the
        caller has to free. None if nothing can be used. `blocks`: those of the handle, in the prefill engine."""
        prompt = self._prompts.get(source)
        if (
            prompt is not None
            and prompt.is_valid
            and not prompt.reads
            and blocks[prompt.first : prompt.first + len(prompt.remote)] == prompt.remote
        ):
            del self._prompts[source]
            return prompt.first, prompt.blocks
        self.drop(source, pool)
        return None

    def drop(self, source: Source, pool: Pool) -> None:
        if prompt := self._prompts.pop(source, None):
            self._dropped.append(prompt)
        self._free(pool)

    def drop_expired(self, pool: Pool, now: float) -> None:
        for source in [source for source, prompt in self._prompts.items() if now > prompt.expires]:
            self.drop(source, pool)

    def make_room(self, blocks: float, pool: Pool) -> None:
        """Drop everything if fewer than `blocks` blocks are free."""
        if self._prompts and blocks > pool.get_num_free_blocks():
            for source in list(self._prompts):
                self.drop(source, pool)

    @property
    def has_dropped(self) -> bool:
        """Whether dropped blocks wait for the end of their reads."""
        return bool(self._dropped)

    def __contains__(self, source: Source) -> bool:
        return source in self._prompts

    def _free(self, pool: Pool) -> None:
        for prompt in [prompt for prompt in self._dropped if not prompt.reads]:
            self._dropped.remove(prompt)
            pool.free_blocks(prompt.blocks)
