"""What pdserve adds to vLLM's worker processes. Each imports this module before it loads the model, because the engine
argument `worker-extension-cls` names it."""

from vllm.platforms import current_platform

from pdserve.engine.vllm import cpu_faults, idle_cores

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    cpu_faults.work_around()
    idle_cores.use_idle_cores(CPUModelRunner)


class WorkerExtension:
    """Methods that `collective_rpc` calls in all workers of an engine between two steps; vLLM makes it a base class of
    its worker."""

    def pdserve_answer(self) -> None:
        """Do nothing: answers of all ranks show that none hangs."""

    def pdserve_tier_blocks(self) -> tuple[int, int]:
        """How many KV blocks fit in the engine's host memory, and on its disk."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        blocks: tuple[int, int] = get_kv_transfer_group().tier_blocks
        return blocks
