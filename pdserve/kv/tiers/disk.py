"""Keeps KV blocks on disk after they leave host memory: a tier below host memory in vLLM's tiering
(docs/decisions/0090-kv-on-disk.md, 0114-vllms-file-tier.md).

Each block that enters host memory is also written to the disk. If only the disk has the first blocks of a prompt, its
request waits in the queue until they are read back into host memory. Threads read and write.

**Never a wrong token.** The blocks lie in a file without a name that belongs to this process alone. The index is in
memory: vLLM's hash of a block (tokens, adapter, salt, images) and its place in the file. A block enters the index once
it is written. A block that has another checksum when it is read, or was evicted meanwhile, is a miss, and is computed.

The private parts of vLLM that this relies on are in `tools/vllm_surface.py`, which a test compares with vLLM."""

import os
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
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
from pdserve.kv.tiers.host_memory import HostManager, HostWorker

logger = init_logger(__name__)

READ_THREADS, WRITE_THREADS = 4, 2
"""Threads that read blocks, and that write blocks. A thread without work of its kind does the other work."""
MAX_PENDING_WRITES = 0.5
"""Share of host memory that blocks waiting to be written may hold. Further blocks are not written."""
MAX_WAIT = 10.0
"""Maximum of seconds that a request waits for blocks from the disk. A read that takes longer is late: until it ends,
requests do not use the disk."""


@dataclass(eq=False)
class FilePlace:
    """Where a block is in the file."""

    number: int
    checksum: int = 0


class BlockFile:
    """Blocks of one size in a file without a name, which the kernel frees with the process. The least recently used
    block is evicted first. Only `write` and `read` are thread-safe."""

    def __init__(self, folder: Path, blocks: int, size: int) -> None:
        """Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._size = size
        self._unused = iter(range(blocks))
        self._free: list[int] = []
        self.places: OrderedDict[bytes, FilePlace] = OrderedDict()
        """Blocks that can be read, by key, the least recently used first."""
        self.removed: list[bytes] = []
        """Keys of blocks that were evicted or lost; the caller empties it."""
        self.disabled = False

    def allocate(self) -> FilePlace | None:
        """Return a place for a block; evict another block if no place is free. None: no block can be evicted now."""
        if self.disabled:
            return None
        if not self._free:
            self._free += islice(self._unused, 1)
        if not self._free and self.places:
            self.remove(next(iter(self.places)))
        return FilePlace(self._free.pop()) if self._free else None

    def free(self, place: FilePlace) -> None:
        self._free.append(place.number)

    def remove(self, key: bytes) -> None:
        self.removed.append(key)
        self.free(self.places.pop(key))

    def clear(self) -> None:
        for key in list(self.places):
            self.remove(key)

    def disable(self) -> None:
        """Remove all blocks, accept no more, and give the space back."""
        self.disabled = True
        self.clear()
        with suppress(OSError):
            self._file.truncate(0)

    def write(self, place: FilePlace, block: memoryview) -> None:
        """Raises OSError."""
        place.checksum = crc32(block)
        done, begin = 0, place.number * self._size
        while done < self._size:
            done += os.pwrite(self.fileno(), block[done:], begin + done)

    def read(self, place: FilePlace, block: memoryview) -> bool:
        """Return whether the block is as it was written. Raises OSError."""
        done, begin = 0, place.number * self._size
        while done < self._size:
            if not (count := os.preadv(self.fileno(), [block[done:]], begin + done)):
                return False
            done += count
        return crc32(block) == place.checksum

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


@dataclass(eq=False)
class Transfer:
    """One block that is read or written."""

    key: bytes
    place: FilePlace
    row: int
    """The block's place in host memory."""
    done: bool = False


class DiskTier(SecondaryTierManager):  # type: ignore[misc]
    """If the disk is full or broken, this tier logs it once and removes all its blocks."""

    medium = Medium.STORAGE

    def __init__(self, spec: Any, host: memoryview, file: BlockFile) -> None:
        super().__init__(spec, host, "disk")
        self.file = file
        self._max_pending = max(1, int(MAX_PENDING_WRITES * spec.num_chunks))
        self._pool = DualQueueThreadPool(READ_THREADS, WRITE_THREADS, "kv-disk")
        self._jobs: dict[int, tuple[TransferJob, list[Transfer]]] = {}
        self._reading: dict[int, float] = {}
        """Read job -> when it began; the oldest first."""
        self._writing: set[bytes] = set()
        self._finished: list[JobResult] = []
        """Results of ended jobs, to report next."""
        self._error: OSError | None = None

    @property
    def is_late(self) -> bool:
        """Whether a read takes so long that the disk may never answer."""
        return bool(self._reading) and time.monotonic() > next(iter(self._reading.values())) + MAX_WAIT

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        return LookupResult.HIT if key in self.file.places else LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Touch the first blocks of a prompt last, so that they stay longest."""
        for key in reversed(list(keys)):
            if key in self.file.places:
                self.file.places.move_to_end(key)

    def submit_store(self, job_metadata: TransferJob) -> None:
        transfers: list[Transfer] = []
        for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            if self.is_late or len(self._writing) >= self._max_pending:
                break
            is_kept = key in self.file.places or key in self._writing
            if not is_kept and (place := self.file.allocate()):
                transfers.append(Transfer(key, place, int(row)))
                self._writing.add(key)
        self._start(job_metadata, transfers, self._pool.enqueue_store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        pairs = zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
        places = self.file.places
        transfers = [Transfer(key, places[key], int(row)) for key, row in pairs if key in places]
        if transfers:
            self._reading[job_metadata.job_id] = time.monotonic()
        self._start(job_metadata, transfers, self._pool.enqueue_load)

    def _start(self, job: TransferJob, transfers: list[Transfer], enqueue: Any) -> None:
        if transfers:
            self._jobs[job.job_id] = job, transfers
            tasks = [partial(self._transfer, job.is_promotion, each) for each in transfers]
            enqueue(job.job_id, len(tasks), tasks)
        else:
            self._finished.append(JobResult(job.job_id, success=False))

    def _transfer(self, is_read: bool, transfer: Transfer) -> None:
        """Runs in a thread."""
        begin = transfer.row * self.block_size_bytes
        end = begin + self.block_size_bytes
        try:
            with self._primary_kv_view.cast("B") as host, host[begin:end] as row:
                if is_read:
                    transfer.done = self.file.read(transfer.place, row)
                elif not self.file.disabled:
                    self.file.write(transfer.place, row)
                    transfer.done = True
        except OSError as error:
            self._error = error

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for number, _, seconds in self._pool.get_finished():
            job, transfers = self._jobs.pop(number)
            self._reading.pop(number, None)
            finish = self._finish_read if job.is_promotion else self._finish_write
            for transfer in reversed(transfers):
                finish(transfer)
            done = tuple(transfer.key for transfer in transfers if transfer.done)
            is_whole = len(done) == len(job.keys if job.is_promotion else transfers)
            self._finished.append(JobResult(number, is_whole, done, seconds))
        if self._error and not self.file.disabled:
            logger.warning("KV is no longer kept on disk: %s", self._error)
            self.file.disable()
        finished, self._finished = self._finished, []
        return finished

    def _finish_read(self, transfer: Transfer) -> None:
        if self.file.places.get(transfer.key) is not transfer.place:
            transfer.done = False  # evicted: its place may hold another block
        elif not transfer.done:
            self.file.remove(transfer.key)
            if not self._error:
                logger.warning_once("a block of KV on disk is damaged; such blocks are computed again")

    def _finish_write(self, transfer: Transfer) -> None:
        self._writing.discard(transfer.key)
        if transfer.done and not self.file.disabled:
            self.file.places[transfer.key] = transfer.place
        else:
            self.file.free(transfer.place)

    def drain_jobs(self) -> None:
        self._pool.wait_idle()

    def shutdown(self) -> None:
        """Do not wait for threads that the disk does not answer; they and the file end with the process."""
        is_late = self.is_late
        self._pool.shutdown(wait=not is_late)
        if not is_late:
            self.file.close()


class WaitingSince(float):
    """Monotonic time since which a request waits for blocks that are being read into host memory."""


class TieredManager(TieringOffloadingManager):  # type: ignore[misc]
    def __init__(self, host: "HostTier", disk: DiskTier) -> None:
        super().__init__(host, [disk])
        self._disk = disk
        self._metrics = Counters([disk.tier_type], host._num_chunks, disk.block_size_bytes)

    def lookup(self, key: bytes, req_context: Any, *, exclude_tier_idx: int | None = None) -> LookupResult:
        """Do not ask the disk for a prompt whose whole KV is read from another engine, nor for a request that has
        waited `MAX_WAIT`."""
        since, now = req_context.get_state(WaitingSince), time.monotonic()
        gives_up = self._disk.is_late or (since is not None and now > since + MAX_WAIT)
        if gives_up or (req_context.kv_transfer_params or {}).get("do_remote_prefill"):
            exclude_tier_idx = 0
        found = super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)
        if found is LookupResult.HIT_PENDING and gives_up:
            return LookupResult.MISS
        if found is LookupResult.HIT_PENDING and since is None:
            req_context.set_state(WaitingSince(now))
        return found

    def reset_cache(self) -> None:
        """Also clear the disk, which vLLM does not: the model's weights may have changed."""
        super().reset_cache()
        self._disk.file.clear()

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Report both tiers as one: a block is stored when host memory has it, and removed when neither has it."""
        removed, self._disk.file.removed = self._disk.file.removed, []
        for event in super().take_events():
            keys = [key for key in event.keys if not event.removed or key not in self._disk.file.places]
            if keys:
                yield replace(event, keys=keys)
        lost = [
            key for key in removed if key not in self._disk.file.places and not self.primary_tier.has(key)
        ]
        if lost:
            yield OffloadingEvent(lost, Medium.CPU, removed=True)


class HostTier(HostManager, CPUPrimaryTierOffloadingManager):  # type: ignore[misc]
    def has(self, key: bytes) -> bool:
        return self._policy.get(key) is not None


class Counters(TieringMetricsTracker):  # type: ignore[misc]
    """vLLM's metrics without gauges, because gauges would make every step report."""

    def _observe_active_transfer_stats(self, stats: Any) -> None: ...


class DiskSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering with `DiskTier`, on CPUs too. Ranks and scheduler share the host memory as a file in /dev/shm that
    has a name until all have opened it."""

    _manager: OffloadingManager | None
    _worker: OffloadingWorker | None

    @property
    def disk_blocks(self) -> int:
        return int(self.extra_config[DISK]) // self.kv_bytes_per_chunk if self.kv_bytes_per_chunk else 0

    def get_manager(self) -> OffloadingManager:
        """vLLM calls this when the ranks have their KV caches."""
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
                logger.warning("KV is not kept on disk: %s", error)
                self._manager = host
            else:
                self._manager = TieredManager(host, DiskTier(self, host.get_kv_memoryview(), file))
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            worker: Any = super().get_worker(kv_caches)
            worker._mmap_region._creator = False  # the scheduler removes the file's name
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
