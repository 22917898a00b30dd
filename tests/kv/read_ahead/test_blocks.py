"""Blocks that were read ahead are used only if they hold the prompt's KV, and are freed only when no read can still
write into them."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from pdserve.kv.read_ahead.blocks import KEEP_SECONDS, MIN_FREE_SHARE, ReadAhead

SOURCE = ("prefill-0-boot", "prefill-7")


@dataclass(frozen=True)
class Block:
    block_id: int


class MemoryPool:
    """A pool of 40 blocks."""

    num_gpu_blocks = 40

    def __init__(self) -> None:
        self.free = [Block(number) for number in range(40)]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            assert block not in self.free, "free twice"
            self.free.append(block)


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool()


@pytest.fixture
def ahead() -> ReadAhead:
    return ReadAhead(ranks=1)


def read(ahead: ReadAhead, pool: MemoryPool, complete: list[int], skip: int = 0, now: float = 0.0) -> str:
    piece = ahead.next_piece(SOURCE, skip, complete, pool, now)
    assert piece is not None
    return piece.name


def test_each_piece_reads_only_new_blocks(ahead: ReadAhead, pool: MemoryPool) -> None:
    first = ahead.next_piece(SOURCE, 1, [11, 12, 13], pool, 0.0)
    second = ahead.next_piece(SOURCE, 1, [11, 12, 13, 14], pool, 0.0)
    assert first is not None
    assert second is not None
    assert (first.remote, second.remote) == ([12, 13], [14])
    assert ahead.next_piece(SOURCE, 1, [11, 12, 13, 14], pool, 0.0) is None
    assert ahead.is_reading(SOURCE)
    for piece in (second, first):
        ahead.end_reads(piece.name, 1, pool)
    assert not ahead.is_reading(SOURCE)
    found = ahead.take(SOURCE, [11, 12, 13, 14, 15], pool)
    assert found is not None
    assert found[0] == 1
    assert [block.block_id for block in found[1]] == first.local + second.local
    assert SOURCE not in ahead
    assert len(pool.free) == 37, "the caller has to free them"


@pytest.mark.parametrize("handle", [[11, 12], [11, 13, 12], [12, 11, 13], []])
def test_blocks_are_unused_unless_the_handle_names_all_in_order(
    ahead: ReadAhead, pool: MemoryPool, handle: list[int]
) -> None:
    ahead.end_reads(read(ahead, pool, [11, 12, 13]), 1, pool)
    assert ahead.take(SOURCE, handle, pool) is None
    assert len(pool.free) == 40


@pytest.mark.parametrize("complete", [[11], [11, 19, 13], [19]])
def test_a_prefill_that_began_again_invalidates_its_pieces(
    ahead: ReadAhead, pool: MemoryPool, complete: list[int]
) -> None:
    ahead.end_reads(read(ahead, pool, [11, 12, 13]), 1, pool)
    assert ahead.next_piece(SOURCE, 0, complete, pool, 0.0) is None
    assert ahead.next_piece(SOURCE, 0, [11, 12, 13, 14], pool, 0.0) is None
    assert ahead.take(SOURCE, [11, 12, 13, 14], pool) is None
    assert len(pool.free) == 40


def test_blocks_are_free_only_when_every_rank_has_ended_its_read(pool: MemoryPool) -> None:
    ahead = ReadAhead(ranks=2)
    piece = read(ahead, pool, [11, 12])
    ahead.invalidate(piece)
    assert not ahead.is_reading(SOURCE), "no request waits for an invalid piece"
    assert ahead.take(SOURCE, [11, 12, 13], pool) is None
    ahead.end_reads(piece, 1, pool)
    assert len(pool.free) == 38
    ahead.end_reads(piece, 1, pool)
    assert len(pool.free) == 40


def test_dropped_and_expired_blocks_are_freed(ahead: ReadAhead, pool: MemoryPool) -> None:
    ahead.end_reads(read(ahead, pool, [11, 12]), 1, pool)
    ahead.drop(SOURCE, pool)
    ahead.drop(SOURCE, pool)
    assert len(pool.free) == 40
    late = read(ahead, pool, [11, 12], now=5.0)
    ahead.drop_expired(pool, 5.0 + KEEP_SECONDS)
    assert SOURCE in ahead
    ahead.drop_expired(pool, 5.1 + KEEP_SECONDS)
    assert SOURCE not in ahead
    assert len(pool.free) == 38, "its read is under way"
    ahead.end_reads(late, 1, pool)
    assert len(pool.free) == 40


def test_a_request_takes_the_room_of_blocks_read_ahead(ahead: ReadAhead, pool: MemoryPool) -> None:
    ahead.end_reads(read(ahead, pool, [11, 12]), 1, pool)
    ahead.make_room(38, pool)
    assert SOURCE in ahead
    ahead.make_room(38.5, pool)
    assert SOURCE not in ahead
    assert len(pool.free) == 40


def test_reading_ahead_leaves_a_share_of_the_pool_free(ahead: ReadAhead, pool: MemoryPool) -> None:
    assert ahead.next_piece(SOURCE, 0, list(range(100, 131)), pool, 0.0) is None
    assert ahead.next_piece(SOURCE, 0, list(range(100, 130)), pool, 0.0) is not None
    assert len(pool.free) == MIN_FREE_SHARE * 40
