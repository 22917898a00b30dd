"""KV blocks that leave an engine's cache stay in host memory: vLLM's offloading beside our NIXL connector
(docs/decisions/0084-kv-in-host-memory.md).

vLLM's scheduler asks both connectors for each request, ours first: a prompt whose KV another engine has is read whole
from there. A block is stored in the step after it was computed or read, and found by vLLM's own hash of it (tokens,
adapter, salt); one that is still being stored is waited for, never read."""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class PdserveConnectors(MultiConnector):  # type: ignore[misc]
    """Ours, unless no KV moves between workers, and vLLM's OffloadingConnector.

    **The fence.** A block may be freed and given to another request while it is still copied to host memory. vLLM then
    ends the copy before the step that writes into the block. But it looks at blocks of scheduled requests only, not at
    those into which our connector reads, ahead or not: their KV would be kept as that of another prompt. So here all
    blocks count that the pool gives away."""

    _given: set[int]
    """blocks that the pool gave away since the last step"""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._given = set()
        pool = kv_cache_manager.block_pool
        give = pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> list[Any]:
            blocks: list[Any] = give(num_blocks)
            self._given.update(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = get_new_blocks

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.sub_connectors[-1].scheduler._current_batch_allocated_block_ids |= self._given
        self._given = set()
        return super().build_connector_meta(scheduler_output)

    @property
    def host_blocks(self) -> int:
        """In a worker: blocks that the host memory holds."""
        return int(self.sub_connectors[-1].connector_worker.spec.num_chunks)

    @property
    def disk_blocks(self) -> int:
        """In a worker: blocks that the disk below it holds."""
        return int(self.sub_connectors[-1].connector_worker.spec.disk_blocks)


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's, also for engines on the CPU, which it refuses; and without gauges, of which each step would report."""

    _manager: OffloadingManager | None
    _worker: OffloadingWorker | None
    disk_blocks = 0

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            events = self.kv_events_config.enable_kv_cache_events
            self._manager = HostManager(self.num_chunks, enable_events=events)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            sizes = [each.tensor.shape[1] for each in kv_caches.tensors]
            host = [torch.empty((self.num_chunks, size), dtype=torch.int8) for size in sizes]
            self._worker = HostWorker(kv_caches, host)
        return self._worker


class HostManager(CPUOffloadingManager):  # type: ignore[misc]
    def get_stats(self) -> None:
        super().get_stats()  # it forgets what it counted


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """For an engine on the CPU: copies at once, between two passes of the model."""

    def __init__(self, caches: CanonicalKVCaches, host: list[torch.Tensor]) -> None:
        self._caches = [each.tensor for each in caches.tensors]
        """of shape (blocks, bytes of a layer's block)"""
        self._host = host
        """as `_caches`, of other numbers of blocks"""
        self._groups = [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, self._caches, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, self._host, src_spec, self._caches, dst_spec)

    def _copy(
        self, job: int, groups: Any, sources: list[Any], source: Any, targets: list[Any], target: Any
    ) -> bool:
        """The blocks of each cache group follow each other; a host block has as many tokens as the engine's."""
        begin, size = 0, 0
        for count, tensors in zip(groups.group_sizes, self._groups, strict=True):
            end = begin + count
            reads = torch.from_numpy(source.block_ids[begin:end]).long()
            writes = torch.from_numpy(target.block_ids[begin:end]).long()
            for index in tensors:
                targets[index][writes] = sources[index][reads]
                size += count * sources[index].shape[1]
            begin = end
        self._done.append(TransferResult(job, success=True, transfer_size=size, transfer_time=0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All is copied."""
