"""KV on disk: a block is read as it was written, or is a miss. With real engines: `tests/e2e/test_offload.py`."""

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from pdserve.kv.tiers import disk
from pdserve.kv.tiers.disk import BlockFile, DiskTier, FilePlace, HostTier, TieredManager
from tests.conditions import until

SIZE = 4096
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS


def block(seed: int) -> memoryview:
    return memoryview(bytearray(np.random.default_rng(seed).bytes(SIZE)))


def keep(file: BlockFile, key: bytes, seed: int) -> None:
    place = file.allocate()
    assert place is not None
    file.write(place, block(seed))
    file.places[key] = place


def back(file: BlockFile, key: bytes) -> bytes | None:
    """Read a block; None if it is missing or damaged."""
    if (place := file.places.get(key)) is None:
        return None
    found = memoryview(bytearray(SIZE))
    return bytes(found) if file.read(place, found) else None


def test_the_least_recently_used_block_is_evicted(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, 2, SIZE)
    keep(file, b"a", 1)
    keep(file, b"b", 2)
    file.places.move_to_end(b"a")
    keep(file, b"c", 3)
    assert (back(file, b"a"), back(file, b"b"), back(file, b"c")) == (bytes(block(1)), None, bytes(block(3)))
    assert file.removed == [b"b"]
    assert os.fstat(file.fileno()).st_size == 2 * SIZE
    file.close()


def test_the_file_has_no_name_and_no_other_user_can_open_its_folder(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "new" / "kv", 2, SIZE)
    keep(file, b"a", 1)
    assert os.listdir(tmp_path / "new" / "kv") == []
    assert stat.S_IMODE((tmp_path / "new" / "kv").stat().st_mode) == 0o700
    assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    file.close()


def test_a_place_that_is_being_written_is_not_allocated_again(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, 1, SIZE)
    place = file.allocate()
    assert place is not None
    assert file.allocate() is None
    file.free(place)
    assert file.allocate() is not None
    file.close()


@pytest.mark.parametrize("damage", ["changed", "cut", "another block"])
def test_a_block_that_is_not_as_it_was_written_is_a_miss(tmp_path: Path, damage: str) -> None:
    file = BlockFile(tmp_path, 2, SIZE)
    keep(file, b"a", 1)
    keep(file, b"b", 2)
    match damage:
        case "changed":
            os.pwrite(file.fileno(), bytes([block(2)[100] ^ 1]), SIZE + 100)
        case "cut":
            os.ftruncate(file.fileno(), 2 * SIZE - 1)
        case _:
            os.pwrite(file.fileno(), block(1), SIZE)
    assert back(file, b"b") is None
    assert back(file, b"a") == bytes(block(1))
    file.close()


class Tiers:
    """A scheduler's host memory for 4 blocks, with a disk below."""

    def __init__(self, folder: Path, blocks: int = 16) -> None:
        name = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self._region = SharedOffloadRegion(name, 4, None, SIZE, SIZE)
        self.host = HostTier(4, self._region, enable_events=True)
        self.file = BlockFile(folder, blocks, SIZE)
        self.disk = DiskTier(SimpleNamespace(num_chunks=16), self.host.get_kv_memoryview(), self.file)
        self.manager = TieredManager(self.host, self.disk)
        self.requests = 0

    def request(self, **params: object) -> ReqContext:
        self.requests += 1
        context = ReqContext(str(self.requests), params)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    async def settle(self) -> None:
        def settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        await until(settled, 10)

    def store(self, *keys: bytes) -> None:
        """Store blocks, each filled with its key's letter."""
        context = self.request()
        found = self.manager.prepare_store(keys, context)
        assert found is not None
        rows = np.asarray(self.host.get_kv_memoryview())
        for key, row in zip(found.keys_to_store, found.store_spec.block_ids, strict=True):
            rows[row] = key[0]
        self.manager.complete_store(found.keys_to_store, context)
        self.manager.on_request_finished(context)

    def load(self, key: bytes, context: ReqContext) -> bytes:
        (row,) = self.manager.prepare_load([key], context).block_ids
        found = bytes(np.asarray(self.host.get_kv_memoryview())[row])
        self.manager.complete_load([key], context)
        return found

    def events(self) -> list[tuple[bool, list[bytes]]]:
        found = list(self.manager.take_events())
        assert {event.medium for event in found} <= {Medium.CPU}
        return [(event.removed, list(event.keys)) for event in found]


def key(letter: str) -> bytes:
    return letter.encode() * 32 + bytes(4)


KEYS = [key(letter) for letter in "abcdefgh"]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path)
    yield made
    made.manager.shutdown()


async def filled(tiers: Tiers) -> None:
    """Store `KEYS`: the last four are in host memory, all on disk."""
    for each in KEYS:
        tiers.store(each)
        await tiers.settle()


async def test_a_block_that_left_host_memory_comes_back(tiers: Tiers) -> None:
    await filled(tiers)
    context = tiers.request()
    assert tiers.manager.lookup(KEYS[0], context) is PENDING
    await tiers.settle()
    assert tiers.manager.lookup(KEYS[0], context) is HIT
    assert tiers.load(KEYS[0], context) == b"a" * SIZE
    assert tiers.manager.get_load_source(KEYS[0], context).value == "disk"


async def test_events_report_both_tiers_as_one(tiers: Tiers) -> None:
    await filled(tiers)
    assert tiers.events() == [(False, [each]) for each in KEYS]
    tiers.file.disable()
    assert tiers.events() == [(True, KEYS[:4])]
    tiers.store(key("i"))
    assert tiers.events() == [(True, [KEYS[4]]), (False, [key("i")])]


async def test_a_damaged_block_is_computed(tiers: Tiers) -> None:
    await filled(tiers)
    os.pwrite(tiers.file.fileno(), b"?", SIZE + 7)
    context = tiers.request()
    assert [tiers.manager.lookup(each, context) for each in KEYS[:3]] == [PENDING] * 3
    await tiers.settle()
    assert [tiers.manager.lookup(each, context) for each in KEYS[:3]] == [HIT, MISS, HIT]
    assert (True, [KEYS[1]]) in tiers.events()
    assert not tiers.file.disabled


async def test_a_block_that_is_evicted_while_it_is_read_is_computed(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another block may have been written to its place before the read."""
    await filled(tiers)
    read = tiers.file.read

    def evict_after(place: FilePlace, row: memoryview) -> bool:
        found = read(place, row)
        tiers.file.remove(KEYS[0])
        return found

    monkeypatch.setattr(tiers.file, "read", evict_after)
    context = tiers.request()
    assert tiers.manager.lookup(KEYS[0], context) is PENDING
    await tiers.settle()
    assert tiers.manager.lookup(KEYS[0], context) is MISS


async def test_a_full_disk_ends_only_the_disk_tier(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers.store(KEYS[0])
    await tiers.settle()
    full = os.open("/dev/full", os.O_RDWR)
    monkeypatch.setattr(tiers.file, "fileno", lambda: full)
    tiers.store(KEYS[1])
    await tiers.settle()
    assert tiers.file.disabled
    os.close(full)
    for each in KEYS[2:]:
        tiers.store(each)
        await tiers.settle()
    context = tiers.request()
    assert [tiers.manager.lookup(each, context) for each in KEYS] == [MISS] * 4 + [HIT] * 4


async def test_a_reset_clears_the_disk_too(tiers: Tiers) -> None:
    await filled(tiers)
    tiers.events()
    tiers.manager.reset_cache()
    context = tiers.request()
    assert [tiers.manager.lookup(each, context) for each in KEYS] == [MISS] * 8
    assert tiers.events() == [(True, KEYS)]
    await filled(tiers)
    assert all(each in tiers.file.places for each in KEYS)


async def test_a_prompt_that_is_read_from_another_engine_does_not_wait_for_the_disk(tiers: Tiers) -> None:
    await filled(tiers)
    assert tiers.manager.lookup(KEYS[0], tiers.request(do_remote_prefill=True)) is MISS
    assert tiers.manager.lookup(KEYS[7], tiers.request(do_remote_prefill=True)) is HIT


async def test_no_request_waits_long_for_a_disk_that_does_not_answer(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(tiers)
    released = False

    def hang(place: object, row: object) -> bool:
        while not released:
            time.sleep(0.01)
        return False

    monkeypatch.setattr(tiers.file, "read", hang)
    context, other = tiers.request(), tiers.request()
    assert tiers.manager.lookup(KEYS[0], context) is PENDING
    tiers.step()
    monkeypatch.setattr(disk, "MAX_WAIT", 0.0)
    assert tiers.manager.lookup(KEYS[0], context) is MISS
    assert tiers.manager.lookup(KEYS[1], other) is MISS
    released = True
    await tiers.settle()
    assert not tiers.disk.is_late


async def test_no_block_is_written_beyond_the_limit_of_pending_writes(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers.disk, "_max_pending", 1)
    tiers.store(*KEYS[:4])
    await tiers.settle()
    assert [each in tiers.file.places for each in KEYS[:4]] == [True, False, False, False]


async def test_a_full_disk_is_written_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that still wait to be written would fill the disk again."""
    go, written = threading.Event(), list[object]()

    def write(place: object, row: object) -> None:
        written.append(place)
        if len(written) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        go.wait()

    monkeypatch.setattr(disk, "READ_THREADS", 0)
    monkeypatch.setattr(disk, "WRITE_THREADS", 1)
    tiers = Tiers(tmp_path)

    def given_up() -> bool:
        tiers.step()
        return tiers.file.disabled

    monkeypatch.setattr(tiers.file, "write", write)
    tiers.store(*KEYS[:4])
    await until(lambda: len(written) == 2)
    await until(given_up)
    go.set()
    await tiers.settle()
    tiers.manager.shutdown()
    assert len(written) <= 2, "the failed write, and the write under way at that time"
