"""The baseline of a comparison: one plain vLLM engine with all of the graph's hardware. It has the model, block size,
lengths and dtypes of the decode workers, and the KV space of all workers."""

from pathlib import Path
from typing import Any

from pdserve.config.engine_args.arguments import to_argv
from pdserve.plan.machine import GIB
from pdserve.plan.memory import CPU_KV_VARIABLE, cpu_kv_bytes, gpu_share
from pdserve.plan.plan import Plan
from pdserve_bench.compare.systems import PlainVllm

MOST_OF_A_GPU = 0.92
"""vLLM's default gpu-memory-utilization."""
_OF_ALL_WORKERS = ("max-num-seqs", "num-gpu-blocks-override")
"""Arguments summed over decode and prefill workers."""
_NOT_TAKEN = (
    *_OF_ALL_WORKERS,
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "max-num-batched-tokens",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "kv-transfer-config",
    "additional-config",
)


def one_engine(plan: Plan, *, tensor: int = 1, threads: int = 0, batch: int = 0) -> PlainVllm:
    """`threads` 0: one per core of a CPU host. `batch` is max-num-batched-tokens, 0: vLLM's default."""
    config = plan.config
    words = [*to_argv(_arguments(plan, tensor, batch)), "--disable-uvicorn-access-log"]
    return PlainVllm(Path(config.model), config.served_model_name, words, _variables(plan, threads))


def thread_counts(cores: int) -> list[int]:
    """Return thread counts to try on a CPU host. The first leaves a core free for vLLM's processes, which spin while
    they wait (two cores, one client: 300 instead of 16 tokens/s)."""
    return [cores - 1, cores] if cores > 1 else [cores]


def _arguments(plan: Plan, tensor: int, batch: int) -> dict[str, Any]:
    """Return arguments in vLLM's spelling."""
    assert plan.config.decode is not None
    args = plan.config.decode.engine_args
    found: dict[str, Any] = {name: value for name, value in args.items() if name not in _NOT_TAKEN}
    for name in _OF_ALL_WORKERS:
        values = [worker.config.engine_args.get(name) for worker in plan.workers]
        if None not in values:
            found[name] = sum(int(str(value)) for value in values)
    if tensor > 1:
        found["tensor-parallel-size"] = tensor
    if batch:
        found["max-num-batched-tokens"] = batch
    if share := _share_of_a_gpu(plan):
        found["gpu-memory-utilization"] = share
    return found


def _variables(plan: Plan, threads: int) -> dict[str, str]:
    if gpus := _gpus(plan):
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    space = sum(
        cpu_kv_bytes(worker.config.engine_args, worker.slot.env) * worker.config.ranks
        for worker in plan.workers
    )
    return {
        "OMP_NUM_THREADS": str(threads or plan.machine.cores),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        CPU_KV_VARIABLE: str(max(1, space // GIB)),
    }


def _share_of_a_gpu(plan: Plan) -> float | None:
    """Sum the workers' memory shares on each GPU and return the smallest sum, at most vLLM's default; None if the file
    sets no share."""
    if not any("gpu-memory-utilization" in worker.config.engine_args for worker in plan.workers):
        return None
    shares = [
        sum(gpu_share(worker.config.engine_args) for worker in plan.workers if gpu in worker.slot.gpus)
        for gpu in _gpus(plan)
    ]
    return round(min(MOST_OF_A_GPU, *shares), 4) if shares else None


def _gpus(plan: Plan) -> list[int]:
    return sorted({gpu for worker in plan.workers for gpu in worker.slot.gpus})
