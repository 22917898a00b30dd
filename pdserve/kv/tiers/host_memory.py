"""Keeps KV blocks in host memory after they leave an engine's cache: vLLM's OffloadingConnector beside our NIXL
connector (docs/decisions/0084-kv-in-host-memory.md).

vLLM's scheduler asks both connectors for each request, NIXL first: a prompt whose KV another engine has is read whole
from there. A block is stored in the step after it was computed or read, and found by vLLM's hash of it (tokens,
adapter, salt). A request waits for a block that is still being stored.

The private parts of vLLM that this relies on are in `tools/vllm_surface.py`, which a test compares with vLLM."""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class PdserveConnectors(MultiConnector):  # type: ignore[misc]
    """vLLM's OffloadingConnector and, if KV moves between workers, the NIXL connector.

    A block may be freed and allocated to another request while it is still being copied to host memory. vLLM ends such
    a copy before the step that writes into the block, but only for blocks of scheduled requests. Blocks into which the
    NIXL connector reads are not among them: their new KV would be stored as the old prompt's. So here vLLM ends the
    copies of all allocated blocks."""

    _allocated: set[int]
    """Blocks that the pool allocated since the last step."""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._allocated = set()
        pool = kv_cache_manager.block_pool
        allocate = pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> list[Any]:
            blocks: list[Any] = allocate(num_blocks)
            self._allocated.update(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = get_new_blocks

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.sub_connectors[-1].scheduler._current_batch_allocated_block_ids |= self._allocated
        self._allocated = set()
        return super().build_connector_meta(scheduler_output)

    @property
    def tier_blocks(self) -> tuple[int, int]:
        """How many blocks fit in host memory, and on disk. Call it only in ranks."""
        spec = self.sub_connectors[-1].connector_worker.spec
        return int(spec.num_chunks), int(spec.disk_blocks)


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's host memory tier, also on CPUs, where vLLM refuses it."""

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
        """Reset the statistics and report none, because their gauges would make every step report."""
        super().get_stats()


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """For engines on the CPU: copies at once, between two steps of the model."""

    def __init__(self, caches: CanonicalKVCaches, host: list[torch.Tensor]) -> None:
        self._caches = [each.tensor for each in caches.tensors]
        """Of shape (blocks, bytes of a layer's block)."""
        self._host = host
        """Of the shape of `_caches`, with other numbers of blocks."""
        self._groups = [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, self._caches, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, self._host, src_spec, self._caches, dst_spec)

    def _copy(
        self, job: int, groups: Any, sources: list[Any], source: Any, targets: list[Any], target: Any
    ) -> bool:
        """Copy blocks, which are listed group by group; a host block has as many tokens as the engine's."""
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
        """Do nothing: every copy has ended."""
