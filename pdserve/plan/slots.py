"""Places the graph's processes on this machine: GPUs, ports and environment of each. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from pdserve.config.schema import Config, WorkerConfig
from pdserve.contract.records import Role
from pdserve.plan.machine import Gpu, Machine
from pdserve.plan.memory import CPU_KV_GIB, CPU_KV_VARIABLE, Memory
from pdserve.util.program import pdserve_command

ROUNDING = 1e-6
"""Tolerance when shares of a GPU are added up."""


@dataclass(frozen=True)
class Slot:
    """A process of the graph, with its resources on this machine."""

    role: Role
    index: int
    gpus: tuple[int, ...] = ()
    kv_port: int = 0
    """of the NIXL side channel; workers only"""
    env: Mapping[str, str] = field(default_factory=dict)
    """environment variables of the process (CUDA_VISIBLE_DEVICES, KV cache space, threads, ...)"""
    stream_port: int = 0
    """where a worker takes requests; 0: a free port"""
    pages_port: int = 0
    """of the process's pages; 0: a free port"""
    node: int = 0
    """node rank in a worker that spans hosts"""

    @property
    def worker(self) -> str:
        """The worker's name, the same on all of its hosts."""
        return f"{self.role.value}-{self.index}"

    @property
    def name(self) -> str:
        return f"{self.worker}-node-{self.node}" if self.node else self.worker


def worker_config(config: Config, slot: Slot) -> WorkerConfig:
    section = config.decode if slot.role.includes(Role.DECODE) else config.prefill
    assert section is not None, f"{config.path} has no section for a {slot.role.value} worker"
    return section


def disk_folder(config: Config, worker: WorkerConfig) -> Path:
    return worker.kv_offload_folder or config.state_dir


@dataclass(frozen=True)
class PlannedWorker:
    slot: Slot
    config: WorkerConfig
    gpus: int
    """GPUs that the worker needs on this host; its slot has none if the host has too few"""
    memory: Memory | None = None
    """None for a simulated engine, or if sizes are unknown (`Plan.unknown` says why)"""


def smallest_gpu(worker: PlannedWorker, machine: Machine) -> Gpu | None:
    """Return the worker's GPU with the least memory, which bounds all its ranks; None without GPUs."""
    gpus = [gpu for gpu in machine.gpus if gpu.index in worker.slot.gpus]
    return min(gpus, key=lambda gpu: gpu.memory, default=None)


@dataclass(frozen=True)
class Selection:
    """The processes to plan: of some roles, with one index, on one host of workers that span hosts. None: all."""

    roles: Collection[Role] | None = None
    index: int | None = None
    node: int | None = None

    def has(self, role: Role, number: int) -> bool:
        return (self.roles is None or role in self.roles) and self.index in (None, number)

    def port(self, first: int | None, number: int, position: int) -> int:
        """Return the port of a process; 0: a free one. The ports of a whole graph are consecutive. A role that runs
        alone has `first` plus its number."""
        return first + (position if self.roles is None else number) if first else 0

    def places(self, role: Role, number: int) -> bool:
        """Whether to place this worker. Lower indices than the selected one are placed too: they may run here."""
        return (self.roles is None or role in self.roles) and (self.index is None or number <= self.index)


def place_workers(
    config: Config, machine: Machine, selection: Selection, env: Mapping[str, str]
) -> tuple[list[PlannedWorker], list[str]]:
    """Return the placed workers, prefill workers last, and the problems. KV ports are those of the whole graph, so that
    roles that are started one by one do not collide. If a worker spans hosts,
    each node rank of a role is placed on a host of its own, with this machine's hardware."""
    hosts: dict[tuple[Role, int] | None, list[tuple[int, Role, int, WorkerConfig]]] = {}
    spans = config.spans_hosts
    for position, (role, number, worker) in enumerate(_all_workers(config)):
        if selection.places(role, number):
            for node in range(worker.nodes):
                hosts.setdefault((role, node) if spans else None, []).append((position, role, number, worker))
    placed, problems = list[PlannedWorker](), list[str]()
    for host, workers in hosts.items():
        node = host[1] if host else 0
        if selection.node in (None, node):
            found, unplaced = _place_on_host(config, machine, selection, env, node, workers)
            placed += found
            problems += [problem for problem in unplaced if problem not in problems]
    return placed, problems


def by_host(workers: Sequence[PlannedWorker]) -> list[list[PlannedWorker]]:
    """Group the workers by the machine on which they are placed."""
    if not any(worker.config.nodes > 1 for worker in workers):
        return [list(workers)]
    hosts: dict[tuple[Role, int], list[PlannedWorker]] = {}
    for worker in workers:
        hosts.setdefault((worker.slot.role, worker.slot.node), []).append(worker)
    return list(hosts.values())


def _place_on_host(
    config: Config,
    machine: Machine,
    selection: Selection,
    env: Mapping[str, str],
    node: int,
    workers: Sequence[tuple[int, Role, int, WorkerConfig]],
) -> tuple[list[PlannedWorker], list[str]]:
    requests = [_gpu_request(role, number, worker, machine) for _, role, number, worker in workers]
    gpus_of, problems = place(requests, [gpu.index for gpu in machine.gpus])
    ranks = sum(worker.ranks_per_node for *_, worker in workers)
    placed = []
    for (position, role, number, worker), request in zip(workers, requests, strict=True):
        gpus, port = gpus_of[request.worker], config.kv_port + position
        slot_env: dict[str, str] = {}
        if worker.engine == "vllm":
            slot_env = _address_env(config.host, port) | _network_env(config.host, worker, machine, env)
            slot_env |= _device_env(worker, machine, gpus, ranks, env)
        if selection.has(role, number):
            stream = selection.port(config.stream_port, number, position)
            pages = selection.port(config.pages_port, number, position)
            slot = Slot(role, number, gpus, port, slot_env, stream, pages)
            if node:  # only the leader listens for other workers
                slot = replace(slot, kv_port=0, stream_port=0, node=node)
            placed.append(PlannedWorker(slot, worker, request.gpus))
    return placed, problems


def frontend_slots(config: Config, selection: Selection) -> tuple[Slot, ...]:
    """Return the frontends. An index selects one, even beyond the file's count: an upgrade starts one more."""
    count = config.frontend.processes if config.frontend and not selection.node else 0
    workers = sum(1 for _ in _all_workers(config))
    numbers = range(count) if selection.index is None or not count else (selection.index,)
    return tuple(
        Slot(Role.FRONTEND, number, pages_port=selection.port(config.pages_port, number, workers + number))
        for number in numbers
        if selection.has(Role.FRONTEND, number)
    )


def start_commands(config: Config) -> str:
    """Return the commands that start a graph with workers that span hosts, as the end of a sentence."""
    slots = list(frontend_slots(config, Selection()))
    for role, number, worker in _all_workers(config):
        slots += [Slot(role, number, node=node) for node in range(worker.nodes)]
    lines = []
    for slot in slots:
        numbers = f" --index {slot.index}" * bool(slot.index) + f" --node-rank {slot.node}" * bool(slot.node)
        lines.append(f"`{pdserve_command(f'{slot.role.value} -f {config.path}{numbers}')}`")
    return f"start these, in any order, each node rank of a worker on its own machine: {', '.join(lines)}."


def _all_workers(config: Config) -> Iterator[tuple[Role, int, WorkerConfig]]:
    if config.decode is not None:
        role = Role(config.decode.role)
        yield from ((role, number, config.decode) for number in range(config.decode.count))
    if config.prefill is not None:
        yield from ((Role.PREFILL, number, config.prefill) for number in range(config.prefill.count))


def gpus_needed(worker: WorkerConfig, machine: Machine) -> int:
    """Return a worker's GPUs on a host: as the file says, else one for each rank if this machine has usable GPUs."""
    if worker.engine == "sim":
        return 0
    if worker.gpus is not None:
        return worker.gpus // worker.nodes
    return worker.ranks_per_node if machine.gpus and machine.build != "cpu" else 0


@dataclass(frozen=True)
class GpuRequest:
    worker: str
    gpus: int
    pinned: tuple[int, ...] = ()
    """the GPUs that the worker must get; other pinned workers may share them"""
    share: float = 1.0
    """the worker's part of a GPU; other workers may use the rest"""


def place(
    requests: Sequence[GpuRequest], gpus: Sequence[int]
) -> tuple[Mapping[str, tuple[int, ...]], list[str]]:
    """Return the GPUs of each worker (none on the CPU, or if there are too few) and the problems. A worker that is
    not pinned gets neighbouring GPUs, which share the fastest links, or else any. A share of a GPU is taken from the
    first GPU with room for it."""
    pinned = {index for request in requests for index in request.pinned}
    groups = _groups(requests, [index for index in sorted(gpus) if index not in pinned])
    problems = []
    if absent := sorted(pinned - set(gpus)):
        have = _listed(gpus) or "none"
        problems.append(
            f"gpu-ids asks for GPU {_listed(absent)}, but this machine has {have}: correct gpu-ids or "
            "CUDA_VISIBLE_DEVICES."
        )
    if any(len(groups[request.worker]) != request.gpus for request in requests):
        others = [request for request in requests if not request.pinned]
        enough = _groups(others, range(sum(request.gpus for request in others)))
        needed = len({index for group in enough.values() for index in group}) + len(pinned)
        problems.append(_too_few(requests, needed, len(gpus)))
    return groups, problems


def _groups(requests: Iterable[GpuRequest], free: Sequence[int]) -> dict[str, tuple[int, ...]]:
    groups: dict[str, tuple[int, ...]] = {}
    left: dict[int, float] = {}  # free share of each shared GPU
    for request in requests:
        room = (index for index in left if left[index] - request.share > -ROUNDING)
        shared = tuple(islice(room, 1)) if request.share < 1 else ()
        group = groups[request.worker] = request.pinned or shared or _group(free, request.gpus)
        if request.share < 1 and not request.pinned:
            left |= {index: left.get(index, 1.0) - request.share for index in group}
        free = [index for index in free if index not in group]
    return groups


def _gpu_request(role: Role, number: int, worker: WorkerConfig, machine: Machine) -> GpuRequest:
    needed = gpus_needed(worker, machine)
    pinned = worker.gpu_ids[number * needed : (number + 1) * needed]
    return GpuRequest(f"{role.value}-{number}", needed, pinned, worker.share)


def _group(free: Sequence[int], count: int) -> tuple[int, ...]:
    if count == 0 or len(free) < count:
        return ()
    for start in range(len(free) - count + 1):
        group = free[start : start + count]
        if group[-1] - group[0] == count - 1:
            return tuple(group)
    return tuple(free[:count])


def _listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus))


def _too_few(requests: Sequence[GpuRequest], needed: int, present: int) -> str:
    parts = ", ".join(f"{each.gpus * each.share:g} for {each.worker}" for each in requests if each.gpus)
    largest = max(request.gpus for request in requests)
    hosts = ""
    if present >= 2 and largest > present:
        hosts = f" A worker of {largest} GPUs needs several hosts: set nnodes."
    elif present >= 2:
        hosts = " On several hosts, start a part on each with pdserve decode and prefill (see pdserve plan --role)."
    return (
        f"The graph needs {needed} GPU{'s' * (needed != 1)} ({parts}), found {present}: use a machine with {needed}, "
        f"lower tensor-parallel-size or ServiceArgs.workers, or set resources.gpu: 0 to run on the CPU.{hosts}"
    )


def _address_env(host: str, kv_port: int) -> dict[str, str]:
    return {
        "VLLM_HOST_IP": host,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv_port),
    }


def _network_env(host: str, worker: WorkerConfig, machine: Machine, env: Mapping[str, str]) -> dict[str, str]:
    """Make UCX, Gloo and NCCL listen only on the network device of `Graph.host`. RDMA ports do not
    listen and stay in use. Ray workers get nothing: Ray copies the environment to all machines, where the device may
    have another name."""
    device = machine.device(host)
    if not device or worker.engine_args.get("distributed-executor-backend") == "ray":
        return {}
    chosen = {
        "UCX_NET_DEVICES": ",".join([device, *machine.rdma]),
        "GLOO_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": f"={device}",  # without `=` it would be a prefix
    }
    return {name: env.get(name) or value for name, value in chosen.items()}


def _device_env(
    worker: WorkerConfig, machine: Machine, gpus: tuple[int, ...], ranks: int, env: Mapping[str, str]
) -> dict[str, str]:
    """Show a worker only its GPUs. On the CPU, all `ranks` of this host share the cores. A lone engine leaves one core
    free: with both of 2 cores, it decoded 8 sequences 5 times slower."""
    if gpus:
        # PCI order is NVML's; CUDA's own default puts the fastest card first.
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if gpus_needed(worker, machine):
        return {}
    chosen = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, min(machine.cores // ranks, machine.cores - 1))),
    }
    if "OMP_NUM_THREADS" not in env:
        chosen["PDSERVE_MAX_THREADS"] = str(machine.cores)
    if "kv-cache-memory-bytes" not in worker.engine_args:
        chosen[CPU_KV_VARIABLE] = str(CPU_KV_GIB)
    return {name: env.get(name) or value for name, value in chosen.items()}
