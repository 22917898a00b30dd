"""What pdserve adds to vLLM's workers. Each worker process, however it was started, imports this module before it
makes its worker, and so before it loads the model: the engine argument `worker-extension-cls` names it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.sample import sampler
from vllm.v1.sample.ops import logprobs
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from pdserve.engine.vllm.instruction_sets import describe, request_amx

AMX_PERMITTED = request_amx()


@contextmanager
def _discarding(runner: Any) -> Iterator[None]:
    """Hide the generators of requests whose prompts continue in the next step."""
    batch = runner.input_batch
    discarded = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
    kept = {row: batch.generators.pop(row) for row in map(int, discarded) if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(kept)


def _keep_generators(runner: type) -> None:
    """In each step of a prompt but the last, vLLM draws a token and discards it. If the request has a seed, its own
    generator draws the token, and vLLM then turns it back. CPU generators cannot be turned back, and the error ends the
    engine (vLLM 0.32): so let the common generator draw such tokens."""

    def without(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **named: Any) -> Any:
            with _discarding(self):
                return method(self, *args, **named)

        return wrapped

    for name in ("_sample", "_bookkeeping_sync"):
        setattr(runner, name, without(getattr(runner, name)))


if current_platform.is_cpu():
    _keep_generators(CPUModelRunner)
    # vLLM compiles this at the first request for logprobs, for 10 s and more in which the whole engine stands still;
    # with TORCHDYNAMO_DISABLE=1 it is not to be compiled anyway, and has no wrapper
    ranks = logprobs.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(ranks, "__wrapped__", ranks)


class WorkerExtension:
    """A base class that vLLM adds to its worker. `collective_rpc` calls the methods in all workers of an engine,
    between two steps."""

    def pdserve_instruction_sets(self) -> str:
        return describe(AMX_PERMITTED)

    def pdserve_memory(self) -> tuple[int, int, int]:
        """Bytes of the weights; of all that loading the model took; and reserved for activations and CUDA graphs. 0
        where vLLM does not measure it, as on the CPU, where weights are packed anew."""
        runner: Any = getattr(self, "model_runner", None)
        weights = int(getattr(runner, "model_memory_usage", 0))
        return (
            weights,
            int(getattr(self, "total_consumed", 0)),
            int(getattr(self, "peak_activation_memory", 0)),
        )

    def pdserve_release(self, request_id: str) -> None:
        """Free the KV blocks of a finished prefill, as if another engine had read them."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().release(request_id)
