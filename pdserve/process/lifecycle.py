"""The life of a worker: announce, serve until told to stop or until something dies, drain, end."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from pdserve.errors import EngineDead
from pdserve.tasks import unending

STOPPERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""from a supervisor, from Ctrl-C, from a terminal that is closed"""

SUPERVISOR_DIED = signal.SIGUSR1
"""from the kernel. Unhandled, as long as a role is starting, it ends the role; one that serves drains when the
supervisor's guardian tells it to, in its turn"""


class Lifecycle:
    """Owns every task of a worker. The first one to fail ends the worker with its error."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.draining = False
        self._stop = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    def stop(self) -> None:
        self._stop.set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something beside the permanent tasks; only while `run` runs."""
        assert self._group is not None
        return self._group.create_task(work, name=name)

    async def run(
        self,
        announce: Callable[[], Awaitable[None]],
        permanent: Sequence[Coroutine[Any, Any, None]],
        drain: Callable[[], Awaitable[None]],
        engine_died: Callable[[EngineDead], Awaitable[None]],
    ) -> None:
        """`permanent` coroutines never end by themselves: when any does, the worker fails. They go on during the
        drain, since running requests need them. Raises EngineDead as itself, after `engine_died` has told others of it;
        other failures as the group of them."""
        try:
            async with asyncio.TaskGroup() as self._group:
                tasks = [
                    self._group.create_task(unending(work, getattr(work, "__qualname__", "a task")))
                    for work in permanent
                ]
                await announce()
                self.ready.set()
                await self._stop.wait()
                self.draining = True
                self.ready.clear()
                await drain()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as failures:
            if dead := failures.subgroup(EngineDead):
                death = EngineDead(str(_first(dead)))
                await engine_died(death)
                raise death from failures
            raise


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
