"""What pdserve adds to vLLM's workers. vLLM imports this in each worker's process, however that was started, before it
makes the worker: before any model is loaded or pass run. (Its engine arguments name it: `worker-extension-cls`.)"""

from pdserve.engine.vllm.instruction_sets import describe, request_amx

AMX_PERMITTED = request_amx()


class WorkerExtension:
    """Becomes a base class of vLLM's worker. The methods are called from outside, in all workers of an engine at once
    (`collective_rpc`), between two steps."""

    def pdserve_instruction_sets(self) -> str:
        return describe(AMX_PERMITTED)

    def pdserve_memory(self) -> tuple[int, int, int]:
        """Bytes: of the weights; of all that was taken when the model was loaded; reserved for activations and CUDA
        graphs. 0 is what was not measured: all of them on the CPU, where weights are packed anew."""
        weights = getattr(getattr(self, "model_runner", None), "model_memory_usage", 0)
        found = weights, getattr(self, "total_consumed", 0), getattr(self, "peak_activation_memory", 0)
        return int(found[0]), int(found[1]), int(found[2])

    def pdserve_release(self, request_id: str) -> None:
        """Free the KV blocks that this engine keeps of a prefill, as if another engine had read them."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().release(request_id)
