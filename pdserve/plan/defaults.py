"""What pdserve adds to a configuration because of the machine that it runs on. The plan shows all of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from pdserve.config.schema import Config, WorkerConfig
from pdserve.plan.machine import GIB, Machine
from pdserve.plan.memory import CPU_KV_GIB

W = TypeVar("W", bound=WorkerConfig)

_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


def gpus_each(worker: WorkerConfig, machine: Machine) -> int:
    """GPUs that one worker needs here: what the file says, else one for each rank where there are GPUs to
    use."""
    if worker.engine == "sim":
        return 0
    if worker.gpus is not None:
        return worker.gpus
    return worker.ranks if machine.gpus and machine.build != "cpu" else 0


def with_machine_defaults(config: Config, machine: Machine) -> Config:
    """Without a GPU, engines run eagerly unless the file says otherwise: compiling takes minutes at each
    start."""
    decode = config.decode and _eager_on_cpu(config.decode, machine)
    prefill = config.prefill and _eager_on_cpu(config.prefill, machine)
    return replace(config, decode=decode, prefill=prefill)


def _eager_on_cpu(worker: W, machine: Machine) -> W:
    if worker.engine == "sim" or gpus_each(worker, machine) or "enforce-eager" in worker.engine_args:
        return worker
    return replace(
        worker,
        engine_args={**worker.engine_args, "enforce-eager": True},
        origins={**worker.origins, "enforce-eager": "pdserve (no GPU)"},
    )


def cpu_kv_bytes(worker: WorkerConfig, env: Mapping[str, str]) -> int:
    """Bytes for KV of each rank on the CPU: vLLM takes the variable before the argument."""
    if space := env.get(_KV_SPACE):
        return int(space) * GIB if space.isdecimal() else CPU_KV_GIB * GIB
    explicit = worker.engine_args.get("kv-cache-memory-bytes")
    return explicit if isinstance(explicit, int) else CPU_KV_GIB * GIB


def cpu_env(worker: WorkerConfig, machine: Machine, ranks: int, env: Mapping[str, str]) -> dict[str, str]:
    """For an engine on the CPU, of `ranks` in the whole graph. Threads are shared out, because engines that
    each take all cores stand in each other's way. What the user's environment says wins."""
    chosen = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, machine.cores // ranks)),
    }
    if "kv-cache-memory-bytes" not in worker.engine_args:
        chosen[_KV_SPACE] = str(CPU_KV_GIB)
    return {name: env.get(name) or value for name, value in chosen.items()}
