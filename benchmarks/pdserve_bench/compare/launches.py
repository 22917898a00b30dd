"""What runs at the moment. Several systems start side by side; each is stopped when it is no longer needed."""

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pdserve.errors import ConfigError, Unavailable
from pdserve.tasks import Lifetime
from pdserve_bench.compare.candidates import Launch
from pdserve_bench.systems.cpu import CpuMeter
from pdserve_bench.systems.system import RunningSystem, Say


class RunningLaunches(Lifetime):
    """Leaving it stops all that still runs."""

    def __init__(self, folder: Path, say: Say) -> None:
        """`folder` is there; each system gets one in it."""
        self.running: dict[str, RunningSystem] = {}
        """by the launch's key"""
        self.meters: dict[str, CpuMeter] = {}
        self._folder, self._say = folder, say
        self._stacks: dict[str, AsyncExitStack] = {}

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.stop(list(self.running))

    async def start(self, launches: Iterable[Launch]) -> dict[str, str]:
        """All at the same time. Returns why those did not come up that did not, by key."""
        wanted = [launch for launch in launches if launch.key not in self.running]
        async with asyncio.TaskGroup() as group:
            starts = {launch.key: group.create_task(self._start(launch)) for launch in wanted}
        return {key: problem for key, start in starts.items() if (problem := start.result())}

    async def stop(self, keys: Collection[str]) -> None:
        for key in keys:
            del self.running[key], self.meters[key]
        await asyncio.gather(*(self._stacks.pop(key).aclose() for key in keys), return_exceptions=True)

    async def _start(self, launch: Launch) -> str:
        """Returns why it did not come up; empty where it did."""
        folder = self._folder / re.sub(r"\W+", "-", launch.key)
        folder.mkdir(exist_ok=True)
        stack = AsyncExitStack()
        try:
            running = await stack.enter_async_context(launch.system.start(folder, lambda _: None))
        except (ConfigError, Unavailable, OSError) as error:
            self._say(f"{launch.key}: {error}")
            return _brief(str(error))
        self.running[launch.key], self._stacks[launch.key] = running, stack
        self.meters[launch.key] = running.cpu_meter()
        return ""


def _brief(text: str) -> str:
    """Without the log in the middle of it, which was said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]]))[:300] if lines else "no reason was told"
