"""KV blocks that leave host memory stay on disk: a tier of ours in vLLM's tiering (docs/decisions/0090-kv-on-disk.md).

Each block that comes into host memory is written to the disk, too, and kept there while the write lasts. A prompt that
begins with blocks which host memory no longer has waits in the queue until they are read back; then they are loaded as
any of host memory. Threads do the reading and writing.

**Never a wrong token.** The file belongs to this process alone, and is of no use to another: what is in it is known
here only, by vLLM's hash of each block (tokens, adapter, salt, pictures). A block counts once it is written whole. One
that comes back short, or otherwise than it was written, is a miss, and is computed."""

import os
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from zlib import crc32

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingWorker,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.kv_offload.tiering.metrics import TieringMetricsTracker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from pdserve.kv import DISK, FOLDER
from pdserve.kv.tiers.host_memory import HostWorker

logger = init_logger(__name__)

READERS, WRITERS = 4, 2
"""threads; each does the other work when it has none"""
PENDING = 0.5
"""of host memory, at most, for blocks that wait to be written, which cannot make room; more blocks are not written"""
PATIENCE = 10.0
"""seconds that a request waits for blocks from the disk in all; and after which a read is late, and the disk is not
asked until it ends"""


@dataclass(eq=False)
class BlockPlace:
    """Of a block in the file, for as long as it is there."""

    number: int
    checksum: int = 0
    reads: int = 0
    """under way; meanwhile no other block may have the place"""


class BlockFile:
    """Blocks of one size in a file that has no name: the kernel frees it with the process, however that ends, and no
    other user can open it. Only `write` and `read` may be called in other threads."""

    def __init__(self, folder: Path, blocks: int, size: int) -> None:
        """Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._size = size
        self._unused = iter(range(blocks))
        self._free: list[int] = []
        self._kept: OrderedDict[bytes, BlockPlace] = OrderedDict()
        """those used last at the end"""
        self.gone: list[bytes] = []
        """blocks that are no longer kept"""
        self.given_up = False

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def take(self) -> BlockPlace | None:
        """A place for a block that is to be written: a free one, or that of the block which was not used for the
        longest time. None: all are in use."""
        if self.given_up:
            return None
        number = self._free.pop() if self._free else next(self._unused, None)
        if number is not None:
            return BlockPlace(number)
        oldest = next((key for key, place in self._kept.items() if not place.reads), None)
        return None if oldest is None else BlockPlace(self._forget(oldest).number)

    def keep(self, key: bytes, place: BlockPlace) -> None:
        """The block was written."""
        if not self.given_up:
            self._kept[key] = place

    def free(self, place: BlockPlace) -> None:
        """It has no block."""
        self._free.append(place.number)

    def use(self, key: bytes) -> BlockPlace | None:
        """Where to read a block; `used` must be called afterwards."""
        if place := self._kept.get(key):
            place.reads += 1
        return place

    def used(self, key: bytes, place: BlockPlace, good: bool) -> None:
        """`good`: it came back as it was written."""
        place.reads -= 1
        if not good and self._kept.get(key) is place:
            self._forget(key)
        if not place.reads and self._kept.get(key) is not place:
            self.free(place)

    def touch(self, key: bytes) -> None:
        if key in self._kept:
            self._kept.move_to_end(key)

    def clear(self) -> None:
        """Forget all blocks, of which none is read."""
        for key in list(self._kept):
            self.free(self._forget(key))

    def give_up(self) -> None:
        """Forget all blocks, take no more, and give the space back."""
        self.given_up = True
        self.gone += self._kept
        self._kept.clear()
        with suppress(OSError):
            self._file.truncate(0)

    def write(self, place: BlockPlace, block: memoryview) -> None:
        """Raises OSError."""
        place.checksum = crc32(block)
        done, begin = 0, place.number * self._size
        while done < self._size:
            done += os.pwrite(self.fileno(), block[done:], begin + done)

    def read(self, place: BlockPlace, block: memoryview) -> bool:
        """Return whether it came back as it was written. Raises OSError."""
        done, begin = 0, place.number * self._size
        while done < self._size:
            if not (got := os.preadv(self.fileno(), [block[done:]], begin + done)):
                return False
            done += got
        return crc32(block) == place.checksum

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def _forget(self, key: bytes) -> BlockPlace:
        self.gone.append(key)
        return self._kept.pop(key)


@dataclass(eq=False)
class Block:
    """One that is written or read."""

    key: bytes
    place: BlockPlace
    row: int
    """its place in host memory"""
    moved: bool = False


class DiskTier(SecondaryTierManager):  # type: ignore[misc]
    """Where the disk is full or broken, it says so once and forgets all; the engine goes on with host memory."""

    medium = Medium.STORAGE

    def __init__(self, spec: Any, host: memoryview, file: BlockFile) -> None:
        super().__init__(spec, host, "disk")
        self.file = file
        self._most_pending = max(1, int(PENDING * spec.num_chunks))
        self._pool = DualQueueThreadPool(READERS, WRITERS, "kv-disk")
        self._jobs: dict[int, tuple[TransferJob, list[Block]]] = {}
        self._reading: dict[int, float] = {}
        """read job -> when it began; the oldest first"""
        self._writing: set[bytes] = set()
        self._finished: list[JobResult] = []
        self._error: OSError | None = None

    @property
    def late(self) -> bool:
        """Whether a read takes so long that the disk may never answer."""
        return bool(self._reading) and time.monotonic() > next(iter(self._reading.values())) + PATIENCE

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        return LookupResult.HIT if key in self.file else LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Beginnings of prompts last: they stay longest."""
        for key in reversed(list(keys)):
            self.file.touch(key)

    def submit_store(self, job_metadata: TransferJob) -> None:
        blocks: list[Block] = []
        for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            if self.late or len(self._writing) >= self._most_pending:
                break
            if key not in self.file and key not in self._writing and (place := self.file.take()):
                blocks.append(Block(key, place, int(row)))
                self._writing.add(key)
        self._start(job_metadata, blocks, self._pool.enqueue_store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        pairs = zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
        blocks = [Block(key, place, int(row)) for key, row in pairs if (place := self.file.use(key))]
        if blocks:
            self._reading[job_metadata.job_id] = time.monotonic()
        self._start(job_metadata, blocks, self._pool.enqueue_load)

    def _start(self, job: TransferJob, blocks: list[Block], enqueue: Any) -> None:
        if blocks:
            self._jobs[job.job_id] = job, blocks
            enqueue(job.job_id, len(blocks), [partial(self._move, job.is_promotion, each) for each in blocks])
        else:
            self._finished.append(JobResult(job.job_id, success=False))

    def _move(self, read: bool, block: Block) -> None:
        """In a thread."""
        begin = block.row * self.block_size_bytes
        end = begin + self.block_size_bytes
        try:
            with self._primary_kv_view.cast("B") as host, host[begin:end] as row:
                if read:
                    block.moved = self.file.read(block.place, row)
                elif not self.file.given_up:
                    self.file.write(block.place, row)
                    block.moved = True
        except OSError as error:
            self._error = error

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for number, _, seconds in self._pool.get_finished():
            job, blocks = self._jobs.pop(number)
            self._reading.pop(number, None)
            for block in reversed(blocks):
                self._settle(block, job.is_promotion)
            moved = tuple(block.key for block in blocks if block.moved)
            whole = len(moved) == len(job.keys if job.is_promotion else blocks)
            self._finished.append(JobResult(number, whole, moved, seconds))
        if self._error and not self.file.given_up:
            logger.warning("KV is no longer kept on disk, the engine goes on without: %s", self._error)
            self.file.give_up()
        finished, self._finished = self._finished, []
        return finished

    def _settle(self, block: Block, read: bool) -> None:
        if read:
            self.file.used(block.key, block.place, block.moved)
            if not (block.moved or self._error or self.file.given_up):
                logger.warning_once("a block of KV on disk is damaged; such blocks are computed again")
            return
        self._writing.discard(block.key)
        if block.moved:
            self.file.keep(block.key, block.place)
        else:
            self.file.free(block.place)

    def drain_jobs(self) -> None:
        self._pool.wait_idle()

    def shutdown(self) -> None:
        """Threads that the disk does not answer end with the process, and the file with them."""
        late = self.late
        self._pool.shutdown(wait=not late)
        if not late:
            self.file.close()


@dataclass
class AwaitedRead:
    """A request, for blocks that are on their way into host memory."""

    since: float


class TieredManager(TieringOffloadingManager):  # type: ignore[misc]
    def __init__(self, host: "HostTier", disk: DiskTier) -> None:
        super().__init__(host, [disk])
        self._disk = disk
        self._metrics = Counts([disk.tier_type], host._num_chunks, disk.block_size_bytes)

    def lookup(self, key: bytes, req_context: Any, *, exclude_tier_idx: int | None = None) -> LookupResult:
        """A prompt that is read from another engine is read whole from there: the disk is not asked. Nor is it for a
        request that has waited long enough, if only for room in host memory beside others."""
        waiting, now = req_context.get_state(AwaitedRead), time.monotonic()
        gives_up = self._disk.late or (waiting is not None and now > waiting.since + PATIENCE)
        if gives_up or (req_context.kv_transfer_params or {}).get("do_remote_prefill"):
            exclude_tier_idx = 0
        found = super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)
        if found is LookupResult.HIT_PENDING and gives_up:
            return LookupResult.MISS
        if found is LookupResult.HIT_PENDING and waiting is None:
            req_context.set_state(AwaitedRead(now))
        return found

    def reset_cache(self) -> None:
        """vLLM would keep what is on the disk, where the model's weights may have changed."""
        super().reset_cache()
        self._disk.file.clear()

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Of both as of one: a block is stored when host memory has it, and removed when neither has it."""
        gone, self._disk.file.gone = self._disk.file.gone, []
        for event in super().take_events():
            keys = [key for key in event.keys if not event.removed or key not in self._disk.file]
            if keys:
                yield replace(event, keys=keys)
        lost = [key for key in gone if key not in self._disk.file and not self.primary_tier.holds(key)]
        if lost:
            yield OffloadingEvent(lost, Medium.CPU, removed=True)


class HostTier(CPUPrimaryTierOffloadingManager):  # type: ignore[misc]
    def get_stats(self) -> None:
        super().get_stats()  # it forgets what it counted

    def holds(self, key: bytes) -> bool:
        return self._policy.get(key) is not None


class Counts(TieringMetricsTracker):  # type: ignore[misc]
    """Without gauges, of which each step would report."""

    def _observe_active_transfer_stats(self, stats: Any) -> None: ...


class DiskSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's, with our tier, and also for engines on the CPU. Ranks and scheduler share the host memory: a file in
    /dev/shm, which has a name until all have it open."""

    _manager: OffloadingManager | None
    _worker: OffloadingWorker | None

    @property
    def disk_blocks(self) -> int:
        return int(self.extra_config[DISK]) // self.kv_bytes_per_chunk if self.kv_bytes_per_chunk else 0

    def get_manager(self) -> OffloadingManager:
        """Called once the ranks have their KV caches."""
        if self._manager is None:
            region = self._region(None)
            if region._creator:
                raise RuntimeError("the ranks have no host memory")
            os.unlink(region.mmap_path)
            events = self.kv_events_config.enable_kv_cache_events
            host = HostTier(self.num_chunks, region, enable_events=events)
            try:
                file = BlockFile(Path(self.extra_config[FOLDER]), self.disk_blocks, self.kv_bytes_per_chunk)
            except OSError as error:
                logger.warning("KV is not kept on disk, the engine goes on without: %s", error)
                self._manager = host
            else:
                self._manager = TieredManager(host, DiskTier(self, host.get_kv_memoryview(), file))
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            worker: Any = super().get_worker(kv_caches)
            worker._mmap_region._creator = False  # the scheduler removes the name
            return worker
        if self._worker is None:
            region = self._region(0 if self.replicated_layout else self.config.parallel.rank)
            sizes = [each.tensor.shape[1] for each in kv_caches.tensors]
            self._worker = HostWorker(kv_caches, [region.create_next_worker_view(size) for size in sizes])
        return self._worker

    def _region(self, rank: int | None) -> SharedOffloadRegion:
        return SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
