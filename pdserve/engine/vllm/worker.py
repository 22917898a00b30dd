"""What pdserve adds to vLLM's workers. Each worker process, however it was started, imports this module before it
makes its worker, and so before it loads the model: the engine argument `worker-extension-cls` names it."""

from vllm.platforms import current_platform

from pdserve.engine.vllm import cpu_faults

if current_platform.is_cpu():
    cpu_faults.work_around()


class WorkerExtension:
    """A base class that vLLM adds to its worker. `collective_rpc` calls the methods in all workers of an engine,
    between two steps."""

    def pdserve_answer(self) -> None:
        """Do nothing: an answer of all ranks shows that none hangs."""

    def pdserve_host_blocks(self) -> tuple[int, int]:
        """How many KV blocks the engine's share of host memory holds, and the disk below it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = get_kv_transfer_group()
        return int(group.host_blocks), int(group.disk_blocks)
