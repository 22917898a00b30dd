"""Tiny roles for the supervisor's tests: Python scripts that run through the same code as real roles."""

import asyncio
import contextlib
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from io import StringIO
from pathlib import Path

from pdserve.contract.records import Instance, Role, SlotState, decode_slot_state, encode_record
from pdserve.plan.graph import ProcessSpec
from pdserve.process.presence import instance_id
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import TaskOwner
from pdserve.supervisor.output import ProcessOutput
from pdserve.supervisor.processes.exits import Guardian
from pdserve.supervisor.processes.readiness import RegisteredInstances
from pdserve.supervisor.processes.restarts import RestartPolicy
from pdserve.supervisor.roles import RoleSupervisor
from tests.conditions import until
from tests.memory.registry import MemoryRegistry, MemoryServer

QUICK = RestartPolicy(first=0.01, ceiling=0.05, healthy=60, failed_starts=3, kills=5)

UP = 'print("up", os.getpid(), os.environ["PDSERVE_BOOT"], flush=True); time.sleep(600)'
SERVE = f"""
    import os, signal, sys, time
    def stop(*_):
        print("drained", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    {UP}
"""
"""A role that drains at SIGTERM."""


def fake(script: str, role: Role = Role.DECODE, index: int = 0, **env: str) -> ProcessSpec:
    command = (sys.executable, "-c", textwrap.dedent(script))
    return ProcessSpec(f"{role.value}-{index}", role, command, env)


class Graph:
    """Supervised fake roles; `async with` runs them and stops them. A role is registered once it has printed `up`.
    The test ends its lease with `lease_ends`."""

    def __init__(
        self,
        folder: Path,
        *specs: ProcessSpec,
        registered: bool = True,
        policy: RestartPolicy = QUICK,
        patience: float = 10,
    ) -> None:
        self.stream = StringIO()
        self.output = ProcessOutput(folder / "logs", stream=self.stream)
        self.ready = asyncio.Event()
        self.on_ready: Callable[[], None] = self.ready.set
        self.reported: list[SlotState] = []
        self._registered = registered
        self._specs, self._policy, self._patience = specs, policy, patience
        self._registry = MemoryRegistry(MemoryServer())
        self._registrations: dict[int, str] = {}
        """pid -> registry key; a deleted key is not written again"""

    async def __aenter__(self) -> "Graph":
        async with contextlib.AsyncExitStack() as stack:
            guardian = stack.enter_context(Guardian(self._patience))
            await stack.enter_async_context(self._registry)
            tasks = await stack.enter_async_context(TaskOwner())
            tasks.forever(self._follow, "registry of the test")
            if self._registered:
                tasks.forever(self._register, "fake registrations")
            view = await stack.enter_async_context(RegistryView(self._registry))
            instances = RegisteredInstances(self._registry, view, "10.0.0.1")
            self.supervisor = RoleSupervisor(
                self._specs, instances, self.output, guardian, self._policy, self._patience
            )
            work = self.supervisor.run(_nothing_missing(), lambda *_: self.on_ready())
            self.running = asyncio.create_task(work)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.running.done():
            self.supervisor.stop()
        with contextlib.suppress(Exception):
            await self.running
        await self._stack.aclose()
        self.output.close()

    async def up(self, roles: int = 1) -> None:
        """Wait until `roles` roles have started and the graph is ready."""
        await until(lambda: len(self.pids()) == roles)
        await asyncio.wait_for(self.ready.wait(), 30)

    async def lease_ends(self, pid: int) -> None:
        """Delete a process's registration; the process stays."""
        await self._registry.delete(self._registrations[pid])

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def pids(self, word: str = "up") -> list[int]:
        """The pids that roles printed after `word`, in order of time."""
        found = [line.split(f" {word} ")[1] for line in self.text.splitlines() if f" {word} " in line]
        return [int(pid.split()[0]) for pid in found]

    async def _register(self) -> None:
        while True:
            for line in [line for line in self.text.splitlines() if " up " in line]:
                name, pid, boot = (line.split()[word] for word in (2, -2, -1))
                if int(pid) not in self._registrations:
                    instance = Instance(instance_id(name, boot), Role(name.split("-")[0]), pid=int(pid))
                    self._registrations[instance.pid] = keys.instance(instance)
                    await self._registry.put(keys.instance(instance), encode_record(instance), leased=False)
            await asyncio.sleep(0.005)

    async def _follow(self) -> None:
        async for changes in self._registry.watch(keys.SLOTS):
            self.reported += [decode_slot_state(change.value) for change in changes if change.value]


async def _nothing_missing() -> AsyncIterator[str]:
    if False:
        yield ""
