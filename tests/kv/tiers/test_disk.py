"""KV on disk: what is read was written, or is a miss. With real engines: `tests/e2e/test_offload.py`."""

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
from pdserve.kv.tiers.disk import BlockFile, DiskTier, HostTier, TieredManager
from tests.conditions import until

SIZE = 4096
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS


def block(seed: int) -> memoryview:
    return memoryview(bytearray(np.random.default_rng(seed).bytes(SIZE)))


def keep(file: BlockFile, key: bytes, seed: int) -> bool:
    if (place := file.take()) is None:
        return False
    file.write(place, block(seed))
    file.keep(key, place)
    return True


def back(file: BlockFile, key: bytes) -> bytes | None:
    """None: it is not there, or not as it was written."""
    if (place := file.use(key)) is None:
        return None
    found = memoryview(bytearray(SIZE))
    good = file.read(place, found)
    file.used(key, place, good)
    return bytes(found) if good else None


def test_blocks_come_back_and_those_not_used_longest_make_room(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, 2, SIZE)
    assert [keep(file, b"a", 1), keep(file, b"b", 2)] == [True, True]
    file.touch(b"a")
    assert keep(file, b"c", 3)
    assert (back(file, b"a"), back(file, b"b"), back(file, b"c")) == (bytes(block(1)), None, bytes(block(3)))
    assert file.gone == [b"b"]
    file.close()


def test_the_file_has_no_name_and_its_folder_is_ours_alone(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "new" / "kv", 2, SIZE)
    assert keep(file, b"a", 1)
    assert os.listdir(tmp_path / "new" / "kv") == []
    assert stat.S_IMODE((tmp_path / "new" / "kv").stat().st_mode) == 0o700
    assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    file.close()


def test_a_place_is_not_given_away_while_it_is_read(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, 1, SIZE)
    keep(file, b"a", 1)
    place = file.use(b"a")
    assert place is not None
    assert file.take() is None
    file.used(b"a", place, good=True)
    assert file.take() is not None
    file.close()


def test_a_damaged_block_that_others_read_gives_its_place_back_after_them(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, 1, SIZE)
    keep(file, b"a", 1)
    first, second = file.use(b"a"), file.use(b"a")
    assert first is not None
    assert second is first
    file.used(b"a", first, good=False)
    assert b"a" not in file
    assert file.take() is None
    file.used(b"a", second, good=False)
    assert keep(file, b"b", 2)
    assert back(file, b"b") == bytes(block(2))
    file.close()


@pytest.mark.parametrize("damage", ["changed", "cut", "of another"])
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
    assert keep(file, b"c", 3)  # in its place
    assert back(file, b"c") == bytes(block(3))
    file.close()


class Tiers:
    """Host memory for 4 blocks with a disk below, as the scheduler of an engine has them."""

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
        """As blocks that are full of their keys."""
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
    """Host memory has the last four blocks, the disk all."""
    for each in KEYS:
        tiers.store(each)
        await tiers.settle()


async def test_what_left_host_memory_comes_back(tiers: Tiers) -> None:
    await filled(tiers)
    context = tiers.request()
    assert tiers.manager.lookup(KEYS[0], context) is PENDING
    await tiers.settle()
    assert tiers.manager.lookup(KEYS[0], context) is HIT
    assert tiers.load(KEYS[0], context) == b"a" * SIZE
    assert tiers.manager.get_load_source(KEYS[0], context).value == "disk"


async def test_events_tell_of_both_as_of_one(tiers: Tiers) -> None:
    await filled(tiers)
    assert tiers.events() == [(False, [each]) for each in KEYS]
    tiers.file.give_up()
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
    assert not tiers.file.given_up


async def test_a_full_disk_ends_the_disk_alone(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers.store(KEYS[0])
    await tiers.settle()
    full = os.open("/dev/full", os.O_RDWR)
    monkeypatch.setattr(tiers.file, "fileno", lambda: full)
    tiers.store(KEYS[1])
    await tiers.settle()
    assert tiers.file.given_up
    os.close(full)
    for each in KEYS[2:]:
        tiers.store(each)
        await tiers.settle()
    context = tiers.request()
    assert [tiers.manager.lookup(each, context) for each in KEYS] == [MISS] * 4 + [HIT] * 4


async def test_a_reset_forgets_the_disk_too(tiers: Tiers) -> None:
    await filled(tiers)
    tiers.events()
    tiers.manager.reset_cache()
    context = tiers.request()
    assert [tiers.manager.lookup(each, context) for each in KEYS] == [MISS] * 8
    assert tiers.events() == [(True, KEYS)]
    await filled(tiers)
    assert all(each in tiers.file for each in KEYS)


async def test_a_prompt_that_is_read_from_another_engine_waits_for_no_disk(tiers: Tiers) -> None:
    await filled(tiers)
    assert tiers.manager.lookup(KEYS[0], tiers.request(do_remote_prefill=True)) is MISS
    assert tiers.manager.lookup(KEYS[7], tiers.request(do_remote_prefill=True)) is HIT


async def test_a_disk_that_does_not_answer_is_waited_for_once(
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
    monkeypatch.setattr(disk, "PATIENCE", 0.0)
    assert tiers.manager.lookup(KEYS[0], context) is MISS
    assert tiers.manager.lookup(KEYS[1], other) is MISS
    released = True
    await tiers.settle()
    assert not tiers.disk.late


async def test_more_than_waits_to_be_written_is_not_written(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers.disk, "_most_pending", 1)
    tiers.store(*KEYS[:4])
    await tiers.settle()
    assert [each in tiers.file for each in KEYS[:4]] == [True, False, False, False]


async def test_a_full_disk_is_written_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited to be written would fill it again."""
    go, written = threading.Event(), list[object]()

    def write(place: object, row: object) -> None:
        written.append(place)
        if len(written) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        go.wait()

    monkeypatch.setattr(disk, "READERS", 0)
    monkeypatch.setattr(disk, "WRITERS", 1)
    tiers = Tiers(tmp_path)

    def given_up() -> bool:
        tiers.step()
        return tiers.file.given_up

    monkeypatch.setattr(tiers.file, "write", write)
    tiers.store(*KEYS[:4])
    await until(lambda: len(written) == 2)
    await until(given_up)
    go.set()
    await tiers.settle()
    tiers.manager.shutdown()
    assert len(written) <= 2, "the one that failed, and the one under way meanwhile"
