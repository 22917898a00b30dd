"""A system under test: plain vLLM, a graph, or a server that runs already; and the stage, on which they run."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pdserve.records import Instance, Role, decode_instance
from pdserve.registry import connect, keys
from pdserve.tasks import Lifetime
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.launch import VLLM, family, plain_vllm, started
from pdserve_bench.progress import Schedule
from pdserve_bench.simulated import write
from pdserve_bench.systems.cpu import CpuMeter

Say = Callable[[str], None]


class RunningSystem:
    """One that answers."""

    def __init__(self, endpoint: Endpoint, pid: int = 0) -> None:
        """`pid` is the process above all others of it; 0 where they are not on this machine."""
        self.endpoint = endpoint
        self._pid = pid

    def processes(self) -> list[psutil.Process]:
        return family(self._pid) if self._pid else []

    def cpu_meter(self) -> CpuMeter:
        """Of the processes that it has now; of none where they are not known."""
        return CpuMeter(self.processes())

    async def apply(self, settings: Mapping[str, str]) -> None:
        """Live settings; the others are those of its file. Raises ValueError where it has none."""
        if settings:
            raise ValueError(f"no such settings here: {', '.join(settings)}")

    async def instances(self, role: Role) -> list[Instance]:
        """What its processes of this role say of themselves. Empty where it is no graph."""
        return []


class System(ABC):
    """A recipe for one."""

    name: str

    @abstractmethod
    def start(self, folder: Path, say: Say) -> AbstractAsyncContextManager[RunningSystem]:
        """In a folder that is there and its own. Entering raises ConfigError and Unavailable where it does not come up;
        leaving stops it."""


@dataclass(frozen=True)
class PlainVllm(System):
    """vLLM's own API server, one engine."""

    name: str
    model: Path
    served: str
    arguments: Sequence[str] = ()
    """of its command line"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """as OMP_NUM_THREADS, which says how much of a CPU host the engine may have"""
    program: Sequence[str] = VLLM
    """a module and its first arguments"""

    @asynccontextmanager
    async def start(self, folder: Path, say: Say) -> AsyncIterator[RunningSystem]:
        arguments = [*self.arguments, "--served-model-name", self.served]
        server = plain_vllm(self.model, arguments, folder, say, self.variables, self.program)
        async with server as (url, pid):
            yield RunningSystem(Endpoint(url, self.served), pid)


@dataclass(frozen=True)
class GraphSystem(System):
    """`pdserve serve` of a configuration."""

    name: str
    sections: Mapping[str, Any]
    """of the file; ports, NATS and etcd are chosen where it is started"""
    variables: Mapping[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def start(self, folder: Path, say: Say) -> AsyncIterator[RunningSystem]:
        file = write(self.sections, folder / "system.yaml")
        async with started(file, folder, say, variables=self.variables) as running:
            graph = running.graph
            async with connect(graph.etcd, graph.namespace, graph.load_credentials()) as registry:
                yield _RunningGraph(Endpoint(graph.url, graph.model), graph.pid, registry)


class _RunningGraph(RunningSystem):
    def __init__(self, endpoint: Endpoint, pid: int, registry: Any) -> None:
        super().__init__(endpoint, pid)
        self._registry = registry

    async def apply(self, settings: Mapping[str, str]) -> None:
        """The workers have them some milliseconds later."""
        for key in await self._registry.read(keys.SETTINGS):
            if key.removeprefix(keys.SETTINGS) not in settings:
                await self._registry.delete(key)
        for name, value in settings.items():
            await self._registry.put(keys.setting(name), value.encode(), leased=False)

    async def instances(self, role: Role) -> list[Instance]:
        found = await self._registry.read(keys.INSTANCES)
        instances = [decode_instance(value) for value in found.values()]
        return [instance for instance in instances if instance.role.does(role)]


@dataclass(frozen=True)
class Elsewhere(System):
    """A server that runs already."""

    name: str
    endpoint: Endpoint

    @asynccontextmanager
    async def start(self, folder: Path, say: Say) -> AsyncIterator[RunningSystem]:
        yield RunningSystem(self.endpoint)


ALL_LOCAL = {"max-local-prefill-length": str(2**31 - 1)}
"""live settings: no prompt is prefilled remotely"""
ALL_REMOTE = {"max-local-prefill-length": "0", "max-prefill-queue-size": str(2**31 - 1)}
"""live settings: every prompt is, which has tokens outside of the prefix cache"""


START_SECONDS = {"cpu": 30.0, "gpu": 90.0, "sim": 12.0}
"""that a start takes, about"""


class Stage(Lifetime):
    """Which systems run at the moment. Starts them when they are asked for, and stops all of them on leaving, the last
    one first. `in_turn`: never two of those that it starts itself at a time."""

    def __init__(
        self,
        systems: Mapping[str, System],
        folder: Path,
        schedule: Schedule,
        *,
        in_turn: bool,
        start_seconds: float,
    ) -> None:
        self.systems = dict(systems)
        """by name; may be changed for those that do not run"""
        self.in_turn, self.start_seconds = in_turn, start_seconds
        self._folder, self._schedule = folder, schedule
        self._up: dict[str, tuple[AsyncExitStack, RunningSystem]] = {}
        self._starts: dict[str, int] = {}

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for name in reversed(list(self._up)):
                await self.stop(name)

    @property
    def up(self) -> Mapping[str, RunningSystem]:
        return {name: running for name, (_, running) in self._up.items()}

    def ours(self, name: str) -> bool:
        """It is started here."""
        return not isinstance(self.systems.get(name), Elsewhere)

    async def get(self, name: str) -> RunningSystem:
        """It runs then. Raises ConfigError and Unavailable where it does not come up."""
        if name in self._up:
            return self._up[name][1]
        if self.in_turn and self.ours(name):
            for other in filter(self.ours, list(self._up)):
                await self.stop(other)
        count = self._starts[name] = self._starts.get(name, 0) + 1
        folder = self._folder / f"{name.replace(' ', '-').replace('/', '-')}-{count}"
        await asyncio.to_thread(folder.mkdir)
        async with AsyncExitStack() as stack:
            with self._schedule.phase(start_phase(name, count), self.start_seconds * self.ours(name)):
                system = self.systems[name].start(folder, self._schedule.update)
                running = await stack.enter_async_context(system)
            self._up[name] = (stack.pop_all(), running)
        return running

    async def stop(self, name: str) -> None:
        """Fine where it does not run."""
        if name in self._up:
            stack, _ = self._up.pop(name)
            await stack.aclose()

    def meters(self, name: str) -> tuple[CpuMeter, CpuMeter]:
        """Of the processes of this system, and of those of all others that run."""
        others = [running.cpu_meter() for other, running in self.up.items() if other != name]
        return self.up[name].cpu_meter(), CpuMeter.of(*others)


def start_phase(name: str, count: int) -> str:
    """What is shown while a system starts, for the first time, the second time and so on."""
    return f"starting {name}" + (f" (start {count})" if count > 1 else "")
