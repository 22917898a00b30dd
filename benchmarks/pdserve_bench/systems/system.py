"""A system under test: plain vLLM or a graph; and the stage, on which systems run."""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.records import Role, decode_instance
from pdserve.registry import connect, keys
from pdserve.registry.base import Registry
from pdserve.tasks import Lifetime
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.launch import VLLM, family, plain_vllm, started
from pdserve_bench.simulated import write

Say = Callable[[str], None]


class RunningSystem:
    """One that answers."""

    def __init__(self, endpoint: Endpoint, pid: int = 0, frontend: int = 0) -> None:
        """`pid` is the process above all others of it; 0 where they are not on this machine. `frontend` is that which
        answers; 0 where no other does."""
        self.endpoint, self.frontend = endpoint, frontend
        self._pid = pid

    def pids(self) -> set[int]:
        """Of the processes that it has now; none where they are not known."""
        return {process.pid for process in family(self._pid)} if self._pid else set()

    async def apply(self, settings: Mapping[str, str]) -> None:
        """Live settings; the others are those of its file. Raises ValueError where it has none."""
        if settings:
            raise ValueError(f"no such settings here: {', '.join(settings)}")


class System(ABC):
    """A recipe for one."""

    name: str

    @abstractmethod
    def start(self, folder: Path, say: Say) -> AbstractAsyncContextManager[RunningSystem]:
        """Start it in an empty folder of its own. Entering raises ConfigError and Unavailable where it does not come
        up; leaving stops it."""


@dataclass(frozen=True)
class PlainVllm(System):
    """vLLM's own API server, one engine."""

    name: str
    model: Path
    served: str
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """as OMP_NUM_THREADS, which says how much of a CPU host the engine may have"""
    program: Sequence[str] = VLLM

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
                instances = map(decode_instance, (await registry.read(keys.INSTANCES)).values())
                frontend = next(each.pid for each in instances if each.role is Role.FRONTEND)
                yield _RunningGraph(Endpoint(graph.url, graph.model), graph.pid, frontend, registry)


class _RunningGraph(RunningSystem):
    def __init__(self, endpoint: Endpoint, pid: int, frontend: int, registry: Registry) -> None:
        super().__init__(endpoint, pid, frontend)
        self._registry = registry

    async def apply(self, settings: Mapping[str, str]) -> None:
        """The workers have them some milliseconds later."""
        await replace_settings(self._registry, settings)


async def replace_settings(registry: Registry, settings: Mapping[str, str]) -> None:
    """Live settings of a graph; what is not among these is as in the file."""
    for key in await registry.read(keys.SETTINGS):
        if key.removeprefix(keys.SETTINGS) not in settings:
            await registry.delete(key)
    for name, value in settings.items():
        await registry.put(keys.setting(name), value.encode(), leased=False)


class Stage(Lifetime):
    """The systems that run at the moment, by name. Leaving it stops all of them."""

    def __init__(self, folder: Path, say: Say) -> None:
        """Each start gets a new folder in `folder`, which exists."""
        self.up: dict[str, RunningSystem] = {}
        self._folder, self._say = folder, say
        self._stacks: dict[str, AsyncExitStack] = {}
        self._starts = 0

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.stop(*reversed(self.up))

    async def start(self, name: str, system: System) -> RunningSystem:
        """Raises ConfigError and Unavailable where it does not come up."""
        self._starts += 1
        folder = self._folder / re.sub(r"\W+", "-", f"{name} {self._starts}")
        await asyncio.to_thread(folder.mkdir)
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(system.start(folder, self._say))
            self.up[name], self._stacks[name] = running, stack.pop_all()
        return running

    async def stop(self, *names: str) -> None:
        """Stop these at the same time; those that do not run are left alone."""
        stacks = [self._stacks.pop(name) for name in names if self.up.pop(name, None)]
        ends = await asyncio.gather(*(stack.aclose() for stack in stacks), return_exceptions=True)
        for error in filter(None, ends):
            raise error
