"""What pdserve adds to vLLM's workers. vLLM imports this in each worker process, however that was started, before it
makes the worker: before any model is loaded or pass run. (Its engine arguments name it: `worker-extension-cls`.)"""

from pdserve.engine.instruction_sets import describe, request_amx

AMX_PERMITTED = request_amx()


class WorkerExtension:
    """Becomes a base class of vLLM's worker. The methods are called from outside, in all workers of an engine at once
    (`collective_rpc`), between two steps."""

    def pdserve_instruction_sets(self) -> str:
        return describe(AMX_PERMITTED)

    def pdserve_release(self, request_id: str) -> None:
        """Free the KV blocks that this engine keeps of a prefill, as if another one had read them."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().release(request_id)
