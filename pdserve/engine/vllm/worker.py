"""What pdserve adds to vLLM's workers. vLLM imports this in each worker's process, however that was started, before it
makes the worker: before any model is loaded or pass run. (Its engine arguments name it: `worker-extension-cls`.)"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from pdserve.engine.vllm.instruction_sets import describe, request_amx

AMX_PERMITTED = request_amx()


@contextmanager
def _discarding(runner: Any) -> Iterator[None]:
    """Requests whose prompts go on in the next step have no generators."""
    batch = runner.input_batch
    discarded = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
    kept = {row: batch.generators.pop(row) for row in map(int, discarded) if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(kept)


def _keep_generators(runner: type) -> None:
    """In each step of its prompt but the last, vLLM draws a token for a request and discards it. That of a request with
    a seed is drawn by its own generator, which vLLM then turns back: on a CPU none can be, and the error ends the
    engine (vLLM 0.32). There such a token is drawn by the common generator."""

    def without(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **named: Any) -> Any:
            with _discarding(self):
                return method(self, *args, **named)

        return wrapped

    for name in ("_sample", "_bookkeeping_sync"):
        setattr(runner, name, without(getattr(runner, name)))


if current_platform.is_cpu():
    _keep_generators(CPUModelRunner)


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
