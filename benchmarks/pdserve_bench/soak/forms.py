"""The forms of launch that a soak runs: `serve`, roles under a manager, and pods of the chart. Each has two workers of
each role, two frontends, and simulated engines."""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

import psutil

from pdserve.contract.records import Instance
from pdserve.security.credentials import create
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import Unavailable
from pdserve_bench.endpoint import Endpoint, key_headers
from pdserve_bench.graphs.launch import RunningGraph, started
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.graphs.without_serve import GraphWithoutServe, started_without_serve
from pdserve_bench.hosts.network import Network, network
from pdserve_bench.hosts.pods import Pod, pods_of, rendered, write_names
from pdserve_bench.soak.usage import Part, part_alone, parts_of_serve

WORKERS = 2
SIMULATED = simulated(
    {"step-seconds": 0.005, "prefill-rate": 20000}, common={"num-gpu-blocks-override": 1024}
)
RESTARTED = ("decode-1", "prefill-1", "frontend-1", "nats", "etcd")
"""Parts to restart in turn. The other parts run on, and show what grows when their peers restart."""
READY_WITHIN, STOP_WITHIN = 300.0, 60.0
HTTP_PORT = 8000
POLL_INTERVAL = 0.5
KEY = "sk-of-the-soak"


def harm(turn: int) -> tuple[str, Signals]:
    """Return the part to restart, and its signal: all parts get SIGTERM in turn, then SIGKILL. A frontend always gets
    SIGTERM, because SIGKILL would fail its requests."""
    cycle, place = divmod(turn, len(RESTARTED))
    name = RESTARTED[place]
    return name, SIGKILL if cycle % 2 and not name.startswith("frontend") else SIGTERM


class SoakedGraph(ABC):
    graph: GraphRecord

    @abstractmethod
    def pick(self) -> Endpoint:
        """Return the frontend for the next request."""

    @abstractmethod
    def parts(self, instances: Iterable[Instance]) -> dict[str, Part]:
        """Return the graph's processes by name: `frontend-0`, `nats` and so on. `instances`: the registered ones."""

    @abstractmethod
    def folders(self) -> dict[str, Path]:
        """Return folders of temporary files and shared memory by name."""

    async def end(self, name: str, number: Signals, part: Part) -> None:
        """End a part, which its manager starts again. SIGTERM goes to the process that the manager started (as systemd
        does), SIGKILL to the role's own (as the OOM killer does)."""
        (part.parent if part.parent and number == SIGTERM else part.process).send_signal(number)


class _OneAddress(SoakedGraph):
    """The frontends share a port."""

    def __init__(self, running: RunningGraph) -> None:
        self.graph, self._state_dir = running.graph, running.state_dir

    def pick(self) -> Endpoint:
        return Endpoint(self.graph.url, self.graph.model)

    def folders(self) -> dict[str, Path]:
        return {"tmp": self._state_dir.with_name("tmp")}


class _Serve(_OneAddress):
    def parts(self, instances: Iterable[Instance]) -> dict[str, Part]:
        folders = {name: self._state_dir / "servers" / name for name in ("nats", "etcd")}
        return parts_of_serve(self.graph.pid, instances, folders)


class _Roles(_OneAddress):
    def __init__(self, running: GraphWithoutServe) -> None:
        super().__init__(running)
        self._running = running

    def parts(self, instances: Iterable[Instance]) -> dict[str, Part]:
        instances, found = list(instances), {}
        for name, run in self._running.roles.items():
            if part := part_alone(run.process.pid, instances):
                found[name] = part
        for server in self._running.servers:
            if server.child and server.child.running:
                found[server.name] = Part(psutil.Process(server.child.pid), folder=server.data_dir)
        return found


class _Pods(SoakedGraph):
    """Plays the chart's Deployments, StatefulSets, and the Service of the frontends."""

    def __init__(self, graph: GraphRecord, net: Network, folder: Path, pods: Iterable[Pod]) -> None:
        self.graph, self._net = graph, net
        self._pods = {_name(pod): pod for pod in pods}
        self._names = write_names(folder, list(self._pods.values()))
        self._serving: list[str] = []
        """URLs of ready frontends."""
        self._turns = count()

    def pick(self) -> Endpoint:
        url = self._serving[next(self._turns) % len(self._serving)]
        return Endpoint(url, self.graph.model, key_headers(KEY))

    def parts(self, instances: Iterable[Instance]) -> dict[str, Part]:
        by_host = defaultdict[str, list[Instance]](list)
        for instance in instances:
            by_host[instance.host].append(instance)
        found = {}
        for name, pod in self._pods.items():
            pid = pod.process.pid if pod.process else 0
            if pid and not pod.is_role:
                found[name] = Part(psutil.Process(pid), folder=Path(f"/proc/{pid}/root/srv"))
            elif part := part_alone(pid, by_host[pod.host.address]):
                found[name] = part
        return found

    def folders(self) -> dict[str, Path]:
        pods = {name: pod.process.pid for name, pod in self._pods.items() if pod.process}
        return {f"{name} shm": Path(f"/proc/{pid}/root/dev/shm") for name, pid in pods.items() if pid}

    async def start(self) -> None:
        await asyncio.gather(*(pod.start(self._names) for pod in self._pods.values()))
        await asyncio.gather(*map(self._until_ready, self._pods))

    async def end(self, name: str, number: Signals, part: Part) -> None:
        """For SIGTERM to a role, replace its pod by one at another address; else restart the container."""
        pod = self._pods[name]
        self._serving = [url for url in self._serving if url != _url(pod)]
        if pod.is_role and number == SIGTERM:
            if (code := await pod.end()) != 0:
                raise Unavailable(f"{name} ended with {code} on SIGTERM")
            pod = self._pods[name] = Pod(pod.owner, self._net.host(pod.host.name), pod.files)
            await pod.start(self._names)
        else:
            assert pod.process
            await super().end(name, number, part)
            await pod.process.ended(STOP_WITHIN)
            pod.run()
        await self._until_ready(name)

    async def stop(self) -> None:
        """Delete the roles' pods, frontends first. Raises Unavailable if a role exits with an error."""
        self._serving = []
        for kind in ("frontend", "decode", "prefill"):
            pods = {name: pod for name, pod in self._pods.items() if name.startswith(kind)}
            codes = dict(zip(pods, await asyncio.gather(*(pod.end() for pod in pods.values())), strict=True))
            if any(codes.values()):
                raise Unavailable(f"exit codes on SIGTERM: {codes}")

    async def _until_ready(self, name: str) -> None:
        pod, deadline = self._pods[name], time.monotonic() + READY_WITHIN
        while not await pod.well("readinessProbe"):
            if time.monotonic() > deadline:
                raise Unavailable(f"{name} is not ready after {READY_WITHIN:g} s; its log: {pod.log}")
            await asyncio.sleep(POLL_INTERVAL)
        if name.startswith("frontend"):
            self._serving.append(_url(pod))


def _name(pod: Pod) -> str:
    """`decode-0`, or `etcd`."""
    name = pod.host.name.removeprefix("pdserve-")
    return name if pod.is_role else name.rpartition("-")[0]


def _url(pod: Pod) -> str:
    return f"http://{pod.host.address}:{HTTP_PORT}"


@asynccontextmanager
async def _serve(folder: Path, say: Callable[[str], None]) -> AsyncIterator[SoakedGraph]:
    file, temporary = write(SIMULATED, folder / "sim.yaml"), _temporary(folder)
    async with started(file, folder, say, workers=WORKERS, thresholds=True, variables=temporary) as running:
        yield _Serve(running)


@asynccontextmanager
async def _roles(folder: Path, say: Callable[[str], None]) -> AsyncIterator[SoakedGraph]:
    file, temporary = write(SIMULATED, folder / "sim.yaml"), _temporary(folder)
    async with started_without_serve(file, folder, say, workers=WORKERS, variables=temporary) as running:
        yield _Roles(running)


@asynccontextmanager
async def _pods(folder: Path, say: Callable[[str], None]) -> AsyncIterator[SoakedGraph]:
    credentials = create(folder / "credentials")
    secrets = {
        "graph-certificates": {path.name: path.read_text() for path in credentials.folder.iterdir()},
        "keys": {"api-keys": KEY},
    }
    values = {
        "config": SIMULATED | {"Security": {"allow": ["plain-http"]}, "Graph": {"drain-timeout": 20}},
        "credentials": {"existingSecret": "graph-certificates"},
        "apiKeys": {"existingSecret": "keys"},
    }
    objects = rendered(values)
    with network(folder) as net:
        pods = pods_of(objects, net, secrets, WORKERS)
        addresses = {_name(pod): pod.host.address for pod in pods}
        etcd, nats = f"{addresses['etcd']}:2379", f"nats://{addresses['nats']}:4222"
        graph = GraphRecord(
            os.getpid(), "", "demo", "pdserve", etcd, nats, credentials=str(credentials.folder)
        )
        running = _Pods(graph, net, folder, pods)
        say(f"{len(pods)} pods, their logs: {folder}/*/log")
        await running.start()
        yield running
        await running.stop()


def _temporary(folder: Path) -> Mapping[str, str]:
    (folder / "tmp").mkdir()
    return {"TMPDIR": str(folder / "tmp")}


Launch = Callable[[Path, Callable[[str], None]], AbstractAsyncContextManager[SoakedGraph]]
FORMS: Mapping[str, Launch] = {"serve": _serve, "roles": _roles, "pods": _pods}
