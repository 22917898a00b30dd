"""KV that a decode engine reads while its prompt is still being computed elsewhere: which of its blocks hold it.

A prefill engine names the blocks that are complete after each of its steps. They are read into free blocks of the
decode engine's pool, which belong to no request and are in no prefix cache. They are used only when the prefill is
done: its handle must name the same prefill, never preempted, and the same blocks, and all reads must have ended before
its lease does. Then the blocks enter the prefix cache, where the request finds them. In all other cases they go back to
the pool unused, but not before all reads into them have ended: a read cannot be stopped
(docs/decisions/0004-stalled-reads.md, 0028-read-ahead.md).

Pure: the pool and times come from outside."""

from dataclasses import dataclass, field
from typing import Any, Protocol

Source = tuple[str, str]
"""id of the prefill engine, and id of the prefill in it"""
MIN_PIECE_BYTES = 8 << 20
"""bytes from which on a read of its own is worth its cost, some milliseconds of the decode engine"""
MIN_FREE_SHARE = 0.25
"""share of the pool that must stay free for requests"""
KEEP_SECONDS = 30.0
"""seconds after the last piece at which its blocks are freed: no handle is expected any more"""


class Pool(Protocol):
    """The used part of vLLM's BlockPool."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int: ...
    def get_new_blocks(self, num_blocks: int) -> list[Any]: ...
    def free_blocks(self, ordered_blocks: Any) -> None: ...


@dataclass
class Piece:
    name: str
    """PREFIX and a number; the connector's worker takes it for the id of a request"""
    local: list[int]
    remote: list[int]


@dataclass
class _Ahead:
    first: int
    """index in the prompt of the first block to read"""
    good: bool = True
    remote: list[int] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)
    reads: dict[str, int] = field(default_factory=dict)
    """piece under way -> number of ranks that have not ended their reads of it"""
    until: float = 0.0


class ReadAhead:
    PREFIX = "pdserve-ahead-"

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._known: dict[Source, _Ahead] = {}
        self._dropped: list[_Ahead] = []
        self._number = 0

    def more(self, source: Source, skip: int, complete: list[int], pool: Pool, now: float) -> Piece | None:
        """What to read now that the prefill has these blocks complete, of which the prefix cache has the first
        `skip`."""
        ahead = self._known.setdefault(source, _Ahead(skip))
        begun = ahead.first + len(ahead.remote)
        if complete[ahead.first : begun] != ahead.remote:  # it was preempted, and has other blocks
            ahead.good = False
        fresh = complete[begun:]
        room = pool.get_num_free_blocks() - MIN_FREE_SHARE * pool.num_gpu_blocks
        if not ahead.good or not fresh or len(fresh) > room:
            return None
        blocks = pool.get_new_blocks(len(fresh))
        self._number += 1
        piece = Piece(f"{self.PREFIX}{self._number}", [block.block_id for block in blocks], fresh)
        ahead.remote += fresh
        ahead.blocks += blocks
        ahead.reads[piece.name] = self._ranks
        ahead.until = now + KEEP_SECONDS
        return piece

    def ended(self, piece: str, ranks: int, pool: Pool) -> None:
        """So many more ranks have ended their reads of the piece, well or badly."""
        for ahead in [*self._known.values(), *self._dropped]:
            if piece in ahead.reads:
                ahead.reads[piece] -= ranks
                if not ahead.reads[piece]:
                    del ahead.reads[piece]
        self._free(pool)

    def spoil(self, piece: str) -> None:
        """A read of the piece failed, or is overdue."""
        for ahead in self._known.values():
            if piece in ahead.reads:
                ahead.good = False

    def pending(self, source: Source) -> bool:
        """Whether it is worth waiting for reads that are under way."""
        ahead = self._known.get(source)
        return ahead is not None and ahead.good and bool(ahead.reads)

    def take(self, source: Source, blocks: list[int], pool: Pool) -> tuple[int, list[Any]] | None:
        """Hand over what was read of the prompt whose KV lies in `blocks` of the prefill engine: index of the first
        block, and this engine's blocks, which the caller has to free. None if nothing can be used."""
        ahead = self._known.get(source)
        if ahead is None or not ahead.good or ahead.reads:
            self.drop(source, pool)
            return None
        del self._known[source]
        if blocks[ahead.first : ahead.first + len(ahead.remote)] == ahead.remote:
            return ahead.first, ahead.blocks
        self._dropped.append(ahead)
        self._free(pool)
        return None

    def drop(self, source: Source, pool: Pool) -> None:
        if ahead := self._known.pop(source, None):
            self._dropped.append(ahead)
        self._free(pool)

    def forget(self, pool: Pool, now: float) -> None:
        for source in [source for source, ahead in self._known.items() if now > ahead.until]:
            self.drop(source, pool)

    def make_room(self, blocks: float, pool: Pool) -> None:
        """Drop all if a request needs more blocks than are free."""
        if self._known and blocks > pool.get_num_free_blocks():
            for source in list(self._known):
                self.drop(source, pool)

    @property
    def clearing(self) -> bool:
        """Whether dropped blocks wait for the end of their reads."""
        return bool(self._dropped)

    def __contains__(self, source: Source) -> bool:
        return source in self._known

    def _free(self, pool: Pool) -> None:
        for ahead in [ahead for ahead in self._dropped if not ahead.reads]:
            self._dropped.remove(ahead)
            pool.free_blocks(ahead.blocks)
