"""The baseline: one server without separation, with all the hardware that a graph has.

Plain vLLM with the model, block size, lengths and types of the graph's decode workers. On a CPU host one engine has all
cores and the KV space of all workers. On GPUs it has all GPUs of the graph: as replicas of an engine of the decode
workers' size, or as one engine over all of them. Where the engines are simulated, a graph of as many workers as decode
and prefill together, which prefill what they decode. Several ways to run it are tried before, so that it takes part at
its best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.config.arguments import to_argv
from pdserve.config.schema import DecodeConfig
from pdserve.errors import ConfigError
from pdserve.plan.machine import GIB
from pdserve.plan.memory import CPU_KV_VARIABLE, cpu_kv_bytes, gpu_share
from pdserve.plan.plan import Plan
from pdserve_bench.launch import derive
from pdserve_bench.sections import Sections, Shape, reshape
from pdserve_bench.systems.system import GraphSystem, PlainVllm, System

ON_CPU = (256, 2048, 8192)
ON_GPU = (2048, 8192, 16384)
"""max-num-batched-tokens that are tried: vLLM's own choice, and below and above it"""
MOST_OF_A_GPU = 0.92
"""vLLM's default of gpu-memory-utilization"""
_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
_OF_ALL_WORKERS = ("max-num-seqs", "num-gpu-blocks-override")
"""the baseline has as many as decode and prefill workers together"""
_NOT_TAKEN = (
    *_PARALLEL,
    *_OF_ALL_WORKERS,
    "max-num-batched-tokens",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "kv-transfer-config",
    "additional-config",
)


@dataclass(frozen=True)
class Layout:
    """How the baseline's engines are spread."""

    tensor: int = 1
    """GPUs of one engine"""
    replicas: int = 1
    """engines behind the same server"""
    threads: int = 0
    """that compute, on a CPU host; 0: as many as it has cores"""

    def __str__(self) -> str:
        if self.threads:
            return f"one engine of {self.threads} thread{'s' * (self.threads > 1)}"
        if self.tensor * self.replicas == 1:
            return "one engine"
        if self.replicas == 1:
            return f"one engine over {self.tensor} GPUs"
        each = f" over {self.tensor} GPUs each" if self.tensor > 1 else ", a GPU each"
        return f"{self.replicas} engines{each}"


@dataclass(frozen=True)
class Baseline:
    """A way to run it. `batch` is max-num-batched-tokens, None: vLLM's own choice."""

    plan: Plan
    layout: Layout
    batch: int | None
    dtype: str = ""

    @property
    def batch_told(self) -> str:
        return f"max-num-batched-tokens {self.batch}" if self.batch else "batches as the engine likes them"

    @property
    def told(self) -> str:
        """What differs between those that are tried."""
        alone = self.layout == Layout()
        return self.batch_told if alone else f"{self.layout}, {self.batch_told}"

    @property
    def hardware(self) -> str:
        decode = _decode(self.plan)
        if decode.engine == "sim":
            return f"{len(self.plan.workers)} simulated workers that prefill what they decode"
        gpus = gpus_of(self.plan)
        where = f"GPU {', '.join(map(str, gpus))}" if gpus else f"{self.plan.machine.cores} cores"
        return f"{self.layout} on {where}"

    def system(self, name: str) -> System:
        decode = _decode(self.plan)
        if decode.engine == "sim":
            return GraphSystem(name, simulated_sections(self.plan, self.batch))
        arguments = vllm_arguments(self.plan, self.layout, self.batch)
        if self.dtype:
            arguments["dtype"] = self.dtype
        extra = ["--disable-uvicorn-access-log"]
        if self.layout.replicas > 1:
            extra += ["--data-parallel-size", str(self.layout.replicas)]
        config = self.plan.config
        words = [*to_argv(arguments), *extra]
        return PlainVllm(
            name, Path(config.model), config.served_model_name, words, variables(self.plan, self.layout)
        )


def candidates(plan: Plan, batches: Sequence[int], dtype: str = "") -> list[Baseline]:
    """The layouts, which are tried first, with one of the batches; the best of them is then tried with the others.
    Without batches the likeliest layout alone."""
    found = layouts(plan)
    if not batches:
        return [Baseline(plan, found[0], None, dtype)]
    return [Baseline(plan, layout, batches[len(batches) // 2], dtype) for layout in found]


def layouts(plan: Plan) -> list[Layout]:
    """Return the layouts that make sense, the likeliest first. One engine over all GPUs only where that is a power of
    two, which divides the heads of nearly every model. On a CPU host first with a core left to all that does not
    compute, as vLLM does itself where it binds its threads. With a thread on each core vLLM's processes, which spin
    while they wait, take the cores from the threads: seen on two cores, between 16 and 300 tokens/s of the same engine
    under one client."""
    count, cores = len(gpus_of(plan)), plan.machine.cores
    if not count and _decode(plan).engine != "sim" and cores > 1:
        return [Layout(threads=cores - 1), Layout(threads=cores)]
    if count <= 1:
        return [Layout()]
    own = _decode(plan).ranks
    replicas = [Layout(own, count // own)] if count >= own else []
    whole = [Layout(count, 1)] if count & (count - 1) == 0 and count != own else []
    return [*replicas, *whole] or [Layout(count, 1)]


def batches(plan: Plan, asked: Sequence[int] = ()) -> list[int]:
    """Values to try that vLLM takes. Raises ConfigError where one was asked for that it would not."""
    args = _decode(plan).engine_args
    sequences = int(str(_total(plan, "max-num-seqs") or 1))
    least = {f"max-num-seqs {sequences}": sequences}
    if args.get("enable-chunked-prefill") is False and "max-model-len" in args:
        length = int(str(args["max-model-len"]))
        least[f"max-model-len {length} without chunked prefill"] = length
    problems = [
        f"--batch {batch}: vLLM takes no max-num-batched-tokens below {reason}."
        for batch in asked
        for reason, bound in least.items()
        if batch < bound
    ]
    if problems:
        raise ConfigError(problems)
    values = asked or (ON_GPU if gpus_of(plan) else ON_CPU)
    return [batch for batch in values if batch >= max(least.values())]


def gpus_of(plan: Plan) -> list[int]:
    return sorted({gpu for worker in plan.workers for gpu in worker.slot.gpus})


def vllm_arguments(plan: Plan, layout: Layout, batch: int | None) -> dict[str, Any]:
    """Return the arguments of the baseline's command line, in vLLM's names."""
    decode = _decode(plan)
    found: dict[str, Any] = {
        name: value for name, value in decode.engine_args.items() if name not in _NOT_TAKEN
    }
    for name in _OF_ALL_WORKERS:
        if (total := _total(plan, name)) is not None:
            found[name] = -(-total // layout.replicas)
    if layout.tensor > 1:
        found["tensor-parallel-size"] = layout.tensor
    if batch:
        found["max-num-batched-tokens"] = batch
    if gpus_of(plan) and (share := _share_of_a_gpu(plan)) is not None:
        found["gpu-memory-utilization"] = share
    return found


def variables(plan: Plan, layout: Layout) -> dict[str, str]:
    """Environment of plain vLLM."""
    if gpus := gpus_of(plan):
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    space = sum(
        cpu_kv_bytes(worker.config.engine_args, worker.slot.env) * worker.config.ranks
        for worker in plan.workers
    )
    return {
        "OMP_NUM_THREADS": str(layout.threads or plan.machine.cores),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        CPU_KV_VARIABLE: str(max(1, space // GIB)),
    }


def simulated_sections(plan: Plan, batch: int | None) -> Sections:
    """Return a file with as many decode workers as the graph has workers, which prefill for themselves."""
    return reshape(derive(plan.config.path, 1, 8000, 5600), Shape(0, len(plan.workers), batch or 0))


def _decode(plan: Plan) -> DecodeConfig:
    if plan.config.decode is None:
        raise ConfigError([f"{plan.config.path} has no VllmWorker section: there is nothing to compare."])
    return plan.config.decode


def _total(plan: Plan, name: str) -> int | None:
    """Over all workers; None where one leaves it to vLLM."""
    values = [worker.config.engine_args.get(name) for worker in plan.workers]
    return None if None in values else sum(int(str(value)) for value in values)


def _share_of_a_gpu(plan: Plan) -> float | None:
    """What the graph's workers take together of a GPU that they share; None where none of them says."""
    if not any("gpu-memory-utilization" in worker.config.engine_args for worker in plan.workers):
        return None
    shares = [
        sum(gpu_share(worker.config.engine_args) for worker in plan.workers if gpu in worker.slot.gpus)
        for gpu in gpus_of(plan)
    ]
    return round(min(MOST_OF_A_GPU, *shares), 4)
