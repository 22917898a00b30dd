"""The processes of this machine with their GPUs, ports and environment: pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from pdserve.config.schema import Config, WorkerConfig
from pdserve.plan.machine import Gpu, Machine
from pdserve.plan.memory import CPU_KV_GIB, CPU_KV_VARIABLE, Memory
from pdserve.records import Role


@dataclass(frozen=True)
class Slot:
    """A process's place on this machine, decided before anything starts."""

    role: Role
    index: int
    gpus: tuple[int, ...] = ()
    kv_port: int = 0
    """of the NIXL side channel; workers only"""
    env: Mapping[str, str] = field(default_factory=dict)
    """environment variables to start the process with (CUDA_VISIBLE_DEVICES, KV cache space, threads, …)"""

    @property
    def name(self) -> str:
        return f"{self.role.value}-{self.index}"


@dataclass(frozen=True)
class PlannedWorker:
    slot: Slot
    config: WorkerConfig
    gpus: int
    """GPUs that it needs; its slot has none if they were not found"""
    memory: Memory | None = None
    """None for a simulated engine, and if sizes are unknown (see the plan's notes)"""


def card_of(worker: PlannedWorker, machine: Machine) -> Gpu | None:
    """The worker's GPU with the least memory, which bounds all its ranks; None if it has none."""
    cards = [gpu for gpu in machine.gpus if gpu.index in worker.slot.gpus]
    return min(cards, key=lambda gpu: gpu.memory, default=None)


@dataclass(frozen=True)
class Selection:
    """The processes of the graph to plan: all, those of some roles, or one of a role."""

    roles: Collection[Role] | None = None
    index: int | None = None

    def has(self, role: Role, number: int) -> bool:
        return (self.roles is None or role in self.roles) and self.index in (None, number)

    def leaves_gpus_to(self, role: Role, number: int) -> bool:
        """Whether this worker gets GPUs: selected ones, and those before them, which may be started by hand here."""
        return (self.roles is None or role in self.roles) and (self.index is None or number <= self.index)


def place_workers(
    config: Config, machine: Machine, selection: Selection, env: Mapping[str, str]
) -> tuple[list[PlannedWorker], list[str]]:
    """The workers, prefill workers last, and the problems of placing them. Ports are those of the whole graph, so that
    roles that are started one by one do not collide."""
    workers = [
        (port, role, number, worker)
        for port, (role, number, worker) in enumerate(_all_workers(config), start=config.kv_port)
        if selection.leaves_gpus_to(role, number)
    ]
    requests = [_gpu_request(role, number, worker, machine) for _, role, number, worker in workers]
    gpus_of, problems = place(requests, [gpu.index for gpu in machine.gpus])
    ranks = sum(worker.ranks for *_, worker in workers)
    placed = []
    for (port, role, number, worker), request in zip(workers, requests, strict=True):
        gpus = gpus_of[request.worker]
        slot_env: dict[str, str] = {}
        if worker.engine == "vllm":
            slot_env = _address_env(config.host, port) | _network_env(config.host, worker, machine, env)
            slot_env |= _device_env(worker, machine, gpus, ranks, env)
        if selection.has(role, number):
            placed.append(PlannedWorker(Slot(role, number, gpus, port, slot_env), worker, request.gpus))
    return placed, problems


def frontend_slots(config: Config, selection: Selection) -> tuple[Slot, ...]:
    count = config.frontend.processes if config.frontend else 0
    return tuple(
        Slot(Role.FRONTEND, number) for number in range(count) if selection.has(Role.FRONTEND, number)
    )


def _all_workers(config: Config) -> Iterator[tuple[Role, int, WorkerConfig]]:
    if config.decode is not None:
        role = Role(config.decode.role)
        yield from ((role, number, config.decode) for number in range(config.decode.count))
    if config.prefill is not None:
        yield from ((Role.PREFILL, number, config.prefill) for number in range(config.prefill.count))


def gpus_needed(worker: WorkerConfig, machine: Machine) -> int:
    """GPUs per worker: those of the file, else one for each rank if this machine has GPUs to use."""
    if worker.engine == "sim":
        return 0
    if worker.gpus is not None:
        return worker.gpus
    return worker.ranks if machine.gpus and machine.build != "cpu" else 0


@dataclass(frozen=True)
class GpuRequest:
    worker: str
    gpus: int
    pinned: tuple[int, ...] = ()
    """exactly these; other pinned workers may share them"""


def place(
    requests: Sequence[GpuRequest], gpus: Sequence[int]
) -> tuple[Mapping[str, tuple[int, ...]], list[str]]:
    """GPUs by worker (none on the CPU, and if there are too few), and problems. Pinned workers get their GPUs. Of the
    rest, each worker in order gets a group of neighbours (which share the fastest links), or any GPUs if there is no
    such group."""
    pinned = {index for request in requests for index in request.pinned}
    free = [index for index in sorted(gpus) if index not in pinned]
    groups: dict[str, tuple[int, ...]] = {}
    for request in requests:
        group = request.pinned or _group(free, request.gpus)
        groups[request.worker] = group
        free = [index for index in free if index not in group]
    problems = []
    if absent := sorted(pinned - set(gpus)):
        have = _listed(gpus) or "none"
        problems.append(
            f"gpu-ids asks for GPU {_listed(absent)}, but there are {have}: correct gpu-ids or CUDA_VISIBLE_DEVICES."
        )
    if any(len(groups[request.worker]) != request.gpus for request in requests):
        needed = sum(request.gpus for request in requests if not request.pinned) + len(pinned)
        problems.append(_too_few(requests, needed, len(gpus)))
    return groups, problems


def _gpu_request(role: Role, number: int, worker: WorkerConfig, machine: Machine) -> GpuRequest:
    needed = gpus_needed(worker, machine)
    pinned = worker.gpu_ids[number * needed : (number + 1) * needed]
    return GpuRequest(f"{role.value}-{number}", needed, pinned)


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
    workers = ", ".join(f"{request.gpus} for {request.worker}" for request in requests if request.gpus)
    return (
        f"The graph needs {needed} GPU{'s' * (needed != 1)} ({workers}), found {present}: run it where there are "
        f"{needed}, lower tensor-parallel-size or ServiceArgs.workers, or set resources.gpu: 0 to run on the CPU."
    )


def _address_env(host: str, kv_port: int) -> dict[str, str]:
    return {
        "VLLM_HOST_IP": host,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv_port),
    }


def _network_env(host: str, worker: WorkerConfig, machine: Machine, env: Mapping[str, str]) -> dict[str, str]:
    """Make UCX, Gloo and NCCL listen only on the network device of `Graph.host`. By default UCX listens on all devices,
    and Gloo and NCCL on one of their choice. RDMA ports do not listen, and stay in use. The user's environment wins.
    Nothing is set for a worker that spans machines: Ray copies the environment to all of them, where the device may
    have another name."""
    device = _device(host, machine)
    if not device or worker.engine_args.get("distributed-executor-backend") == "ray":
        return {}
    chosen = {
        "UCX_NET_DEVICES": ",".join([device, *machine.rdma]),
        "GLOO_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": f"={device}",  # without the sign it would be a prefix
    }
    return {name: env.get(name) or value for name, value in chosen.items()}


def _device(host: str, machine: Machine) -> str | None:
    """The network device with that address; None if this machine has none."""
    try:
        return machine.devices.get("127.0.0.1" if ip_address(host).is_loopback else host)
    except ValueError:
        return machine.devices.get("127.0.0.1") if host == "localhost" else None


def _device_env(
    worker: WorkerConfig, machine: Machine, gpus: tuple[int, ...], ranks: int, env: Mapping[str, str]
) -> dict[str, str]:
    """On the CPU, the threads are shared by the `ranks` of the whole graph: engines that each take all cores slow each
    other down. A lone engine leaves one core to its other processes: spinning threads on all of 2 cores made it 5 times
    slower at 8 streams. On the CPU the user's environment wins."""
    if gpus:
        # PCI order is NVML's; CUDA's own default puts the fastest card first.
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if gpus_needed(worker, machine):
        return {}
    chosen = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, min(machine.cores // ranks, machine.cores - 1))),
    }
    if "kv-cache-memory-bytes" not in worker.engine_args:
        chosen[CPU_KV_VARIABLE] = str(CPU_KV_GIB)
    return {name: env.get(name) or value for name, value in chosen.items()}
