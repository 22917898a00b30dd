"""Which of the systems run at the moment."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from pdserve_bench.progress import Schedule
from pdserve_bench.systems.cpu import CpuMeter
from pdserve_bench.systems.system import Elsewhere, RunningSystem, System

START_SECONDS = {"cpu": 32.0, "gpu": 90.0, "sim": 12.0}
"""that a start takes, about"""


class Stage:
    """Starts systems when they are asked for, and stops all of them on leaving, the last one first. `in_turn`: never
    two of those that it starts itself at a time."""

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
        self.in_turn = in_turn
        self._folder, self._schedule, self._start_seconds = folder, schedule, start_seconds
        self._up: dict[str, tuple[AsyncExitStack, RunningSystem]] = {}
        self._starts: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self._up)):
            await self.stop(name)

    @property
    def up(self) -> Mapping[str, RunningSystem]:
        return {name: running for name, (_, running) in self._up.items()}

    async def get(self, name: str) -> RunningSystem:
        """It runs then. Raises ConfigError and Unavailable where it does not come up."""
        if name in self._up:
            return self._up[name][1]
        system = self.systems[name]
        here = not isinstance(system, Elsewhere)
        if self.in_turn and here:
            for other in [other for other in self._up if not isinstance(self.systems[other], Elsewhere)]:
                await self.stop(other)
        count = self._starts[name] = self._starts.get(name, 0) + 1
        folder = self._folder / f"{name.replace(' ', '-').replace('/', '-')}-{count}"
        await asyncio.to_thread(folder.mkdir)
        async with AsyncExitStack() as stack:
            with self._schedule.phase(start_phase(name, count), self._start_seconds if here else 0.0):
                running = await stack.enter_async_context(system.start(folder, self._schedule.update))
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
