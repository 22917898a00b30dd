"""Which processes run here, with their GPUs, ports and environment."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from pdserve.config.schema import Config, WorkerConfig
from pdserve.messages import Role
from pdserve.plan.defaults import cpu_env, gpus_each
from pdserve.plan.machine import Machine
from pdserve.plan.placement import Request, place


@dataclass(frozen=True)
class Slot:
    """One process's place on this machine, decided by the plan before anything starts."""

    role: Role
    index: int
    gpus: tuple[int, ...] = ()
    kv_port: int = 0
    """workers only"""
    env: Mapping[str, str] = field(default_factory=dict)
    """environment the process must be started with (CUDA_VISIBLE_DEVICES, KV cache space, threads, …)"""

    @property
    def name(self) -> str:
        return f"{self.role.value}-{self.index}"


@dataclass(frozen=True)
class Part:
    """What of the graph is meant: all of it, or some roles, or one process of a role."""

    roles: Collection[Role] | None = None
    index: int | None = None

    def has(self, role: Role, number: int) -> bool:
        return (self.roles is None or role in self.roles) and self.index in (None, number)

    def makes_room_for(self, role: Role, number: int) -> bool:
        """GPUs are handed out to the lower-numbered of a role too: several may be started by hand on one
        host."""
        return (self.roles is None or role in self.roles) and (self.index is None or number <= self.index)


@dataclass(frozen=True)
class Seat:
    """A worker with its place."""

    slot: Slot
    config: WorkerConfig
    gpus: int
    """that it needs; its slot has none where they were not found"""


def seat_workers(
    config: Config, machine: Machine, part: Part, env: Mapping[str, str]
) -> tuple[list[Seat], list[str]]:
    """Decode first, and what keeps them from being placed. Ports are those of the whole graph, so that parts
    of it that are started one by one do not collide."""
    every = list(_every_worker(config))
    ports = {(role, number): config.kv_port + place for place, (role, number, _) in enumerate(every)}
    guests = [each for each in every if part.makes_room_for(each[0], each[1])]
    requests = {(role, number): _request(role, number, worker, machine) for role, number, worker in guests}
    placement = place(list(requests.values()), [gpu.index for gpu in machine.gpus])
    ranks = sum(worker.ranks for _, _, worker in guests)
    seats = []
    for role, number, worker in guests:
        request, port = requests[role, number], ports[role, number]
        gpus = placement.gpus[request.worker]
        slot_env = _env(config, port) | _network_env(config, worker, machine, env)
        slot_env |= _device_env(worker, machine, gpus, ranks, env)
        slot = Slot(role, number, gpus, port, slot_env if worker.engine == "vllm" else {})
        if part.has(role, number):
            seats.append(Seat(slot, worker, request.gpus))
    return seats, placement.problems


def frontend_slots(config: Config, part: Part) -> tuple[Slot, ...]:
    count = config.frontend.processes if config.frontend else 0
    return tuple(Slot(Role.FRONTEND, number) for number in range(count) if part.has(Role.FRONTEND, number))


def _every_worker(config: Config) -> Iterator[tuple[Role, int, WorkerConfig]]:
    for role, worker in ((Role.DECODE, config.decode), (Role.PREFILL, config.prefill)):
        if worker is not None:
            yield from ((role, number, worker) for number in range(worker.count))


def _request(role: Role, number: int, worker: WorkerConfig, machine: Machine) -> Request:
    each = gpus_each(worker, machine)
    pinned = worker.gpu_ids[number * each : (number + 1) * each]
    return Request(f"{role.value}-{number}", each, pinned)


def _env(config: Config, port: int) -> dict[str, str]:
    return {
        "VLLM_HOST_IP": config.host,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": config.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }


def _network_env(
    config: Config, worker: WorkerConfig, machine: Machine, env: Mapping[str, str]
) -> dict[str, str]:
    """Have all that vLLM is made of listen on the network device of `Graph.host` and on no other; by themselves UCX
    takes all of the machine, and Gloo and NCCL one of their choice. RDMA ports do not listen, and stay in use. What
    the user's environment says wins; and a worker that spans machines is left alone, since Ray gives their
    environment to all of them, where a device may have another name."""
    device = _device(config.host, machine)
    if not device or worker.engine_args.get("distributed-executor-backend") == "ray":
        return {}
    chosen = {
        "UCX_NET_DEVICES": ",".join([device, *machine.rdma]),
        "GLOO_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": f"={device}",  # exactly that one; without the sign it would be a prefix
    }
    return {name: env.get(name) or value for name, value in chosen.items()}


def _device(host: str, machine: Machine) -> str | None:
    """None where no device of this machine has that address."""
    try:
        return machine.devices.get("127.0.0.1" if ip_address(host).is_loopback else host)
    except ValueError:
        return machine.devices.get("127.0.0.1") if host == "localhost" else None


def _device_env(
    worker: WorkerConfig, machine: Machine, gpus: tuple[int, ...], ranks: int, env: Mapping[str, str]
) -> dict[str, str]:
    if gpus:
        # PCI order is NVML's; CUDA's own default puts the fastest card first.
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {} if gpus_each(worker, machine) else cpu_env(worker, machine, ranks, env)
