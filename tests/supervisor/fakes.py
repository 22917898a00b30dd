"""Tiny roles for the supervisor's tests: Python one-liners that run through the same code as the real
ones."""

import asyncio
import contextlib
import os
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from io import StringIO
from pathlib import Path

from pdserve.graph import ProcessSpec
from pdserve.messages import Instance, Role, SlotState
from pdserve.supervisor.backoff import Policy
from pdserve.supervisor.guardian import Guardian
from pdserve.supervisor.output import Output
from pdserve.supervisor.rollcall import Roll
from pdserve.supervisor.supervision import Supervision

QUICK = Policy(first=0.01, ceiling=0.05, healthy=60, failed_starts=3, kills=5)
"""for tests that want restarts now"""

SERVE = """
    import os, signal, sys, time
    def stop(*_):
        print("drained", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    print("up", os.getpid(), flush=True)
    time.sleep(600)
"""
"""a role that behaves"""


def fake(script: str, role: Role = Role.DECODE, index: int = 0, **env: str) -> ProcessSpec:
    command = (sys.executable, "-c", textwrap.dedent(script))
    return ProcessSpec(f"{role.value}-{index}", role, command, env)


class Registered(Roll):
    """A registry in which a process is as soon as it has printed `up` and its pid, or none ever."""

    def __init__(self, up: Callable[[], list[int]], ever: bool = True) -> None:
        self.struck_off: list[int] = []
        self.reported: list[SlotState] = []
        self.hung = asyncio.Event()
        """set: the next instance that is looked for has vanished for long"""
        self._up, self._ever = up, ever

    async def until(self, instance_id: str, pid: int) -> Instance:
        while not self._ever or pid not in self._up():  # noqa: ASYNC110 (told by its output)
            await asyncio.sleep(0.005)
        return Instance(id=instance_id, role=Role.DECODE, pid=pid)

    async def vanished(self, instance: Instance) -> float:
        await self.hung.wait()
        self.hung.clear()
        return 60.0

    async def strike_off(self, instance: Instance) -> None:
        self.struck_off.append(instance.pid)

    async def report(self, state: SlotState) -> None:
        self.reported.append(state)


async def _healthy() -> AsyncIterator[str]:
    if False:
        yield ""


class Graph:
    """A supervision of fake roles; `async with` runs it and stops it."""

    def __init__(
        self,
        folder: Path,
        *jobs: ProcessSpec,
        registered: bool = True,
        policy: Policy = QUICK,
        patience: float = 10,
    ) -> None:
        self.stream = StringIO()
        self.output = Output(folder / "logs", stream=self.stream)
        self.ready = asyncio.Event()
        self._jobs, self._policy, self._patience = jobs, policy, patience
        self.roll = Registered(self.pids, registered)
        self._guardian = Guardian(patience)

    async def __aenter__(self) -> "Graph":
        self._guardian.__enter__()
        self.supervision = Supervision(
            self._jobs,
            self.roll,
            self.output,
            self._guardian,
            self._policy,
        )
        work = self.supervision.run(_healthy(), lambda *_: self.ready.set(), [], self._patience)
        self.running = asyncio.create_task(work)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.running.done():
            self.supervision.stop()
        with contextlib.suppress(Exception):
            await self.running
        self._guardian.__exit__(None, None, None)
        self.output.close()

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def pids(self, word: str = "up") -> list[int]:
        """The pids that roles printed after `word`, in order of time."""
        found = [line.split(f" {word} ")[1] for line in self.text.splitlines() if f" {word} " in line]
        return [int(pid.split()[0]) for pid in found]


def alive(pid: int) -> bool:
    """False for zombies too."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def group_of(pid: int) -> int:
    return os.getpgid(pid)
