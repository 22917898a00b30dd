"""What runs at the moment. Several systems start side by side; each is stopped when it is no longer needed."""

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from pdserve.errors import ConfigError, Unavailable
from pdserve_bench.compare.candidates import Launch
from pdserve_bench.systems.cpu import CpuMeter
from pdserve_bench.systems.system import RunningSystem, Say


class RunningLaunches:
    """Leaving it stops all that still runs."""

    def __init__(self, folder: Path, say: Say) -> None:
        """`folder` is there; each system gets one in it."""
        self.running: dict[str, RunningSystem] = {}
        """by the launch's key"""
        self.meters: dict[str, CpuMeter] = {}
        self._folder, self._say = folder, say
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Event] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(list(self._tasks))

    async def start(self, launches: Iterable[Launch]) -> dict[str, str]:
        """All at the same time. Returns why those did not come up that did not, by key."""
        wanted = {launch.key: launch for launch in launches if launch.key not in self._tasks}
        loop = asyncio.get_running_loop()
        ready: dict[str, asyncio.Future[str]] = {key: loop.create_future() for key in wanted}
        for key, launch in wanted.items():
            self._stops[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._hold(launch, ready[key]))
        problems = dict(zip(ready, await asyncio.gather(*ready.values()), strict=True))
        return {key: problem for key, problem in problems.items() if problem}

    async def stop(self, keys: Iterable[str]) -> None:
        """Those that have not come up yet are broken off."""
        tasks = []
        for key in keys:
            if task := self._tasks.pop(key, None):
                self._stops.pop(key).set()
                if key not in self.running:
                    task.cancel()
                tasks.append(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self, launch: Launch, ready: "asyncio.Future[str]") -> None:
        """`ready` gets an empty text, or why it did not come up."""
        folder = self._folder / re.sub(r"\W+", "-", launch.key)
        folder.mkdir(exist_ok=True)
        stop = self._stops[launch.key]
        try:
            async with launch.system.start(folder, lambda _: None) as running:
                self.running[launch.key] = running
                self.meters[launch.key] = running.cpu_meter()
                ready.set_result("")
                await stop.wait()
        except (ConfigError, Unavailable, OSError) as error:
            self._say(f"{launch.key}: {error}")
            if not ready.done():
                ready.set_result(_brief(str(error)))
        finally:
            self.running.pop(launch.key, None)
            self.meters.pop(launch.key, None)
            if not ready.done():
                ready.cancel()


def _brief(text: str) -> str:
    """Without the log in the middle of it, which was said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]]))[:300] if lines else "no reason was told"
