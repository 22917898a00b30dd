"""Background tasks: each has an owner, and none ends unseen.

A background task is a task that is not awaited while it runs: heartbeats, watches, connections that come back. When it
ends by a mistake, its process goes on without a part of itself, and looks healthy. So such tasks are made here and
nowhere else (`tests/test_house.py` holds it); a task that the next lines await may be made anywhere.

`forever` is for work that has to go on: it is restarted. `Owner` holds the tasks of one object. `unending` is for work
whose failure must end the process: it raises. `process_owner` owns the tasks of all objects of a process together.

`Lifetime` is the shape of objects that are entered with `async with`.
"""

import asyncio
import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NoReturn, Self

from pdserve.errors import EngineDead
from pdserve.observe.metrics import TASK_FAILURES

log = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
"""seconds before a failed task starts again; doubled with each failure"""
HEALTHY = 30.0
"""seconds of running after which the next failure counts as the first"""
_REMEMBERED = 100

Work = Callable[[], Awaitable[None]]


class Lifetime(ABC):
    """An object to enter with `async with`. Its life is told in one place, `_lifetime`, an `@asynccontextmanager` that
    sets up, yields and takes down; it may be entered again after it was left."""

    @abstractmethod
    def _lifetime(self) -> AbstractAsyncContextManager[None]: ...

    async def __aenter__(self) -> Self:
        self._entered = self._lifetime()
        await self._entered.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._entered.__aexit__(kind, error, trace)


class Owner:
    """The background tasks of one object. Leaving cancels them and waits for their end; may be entered and left
    again, from any task of the loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    async def settle(self, within: float) -> None:
        """Let the tasks end by themselves for so many seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)

    def forever(self, work: Work, name: str, *, again_after: float | None = None) -> asyncio.Task[None]:
        """Keep `work` running, restarted whenever it ends; `again_after` as of `forever`."""
        return self.start(forever(work, name, again_after=again_after), name)

    def start(
        self,
        work: Coroutine[Any, Any, None],
        name: str,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[None]:
        """Run `work` once, to its end. A failure is logged and counted, then told to `on_failure`; so is a cancellation
        that comes from inside."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        for owner in {self, _process_owner.get() or self}:
            owner._tasks.add(task)
            task.add_done_callback(owner._tasks.discard)

        def ended(task: asyncio.Task[None]) -> None:
            if (error := _failure(task)) is not None:
                TASK_FAILURES.labels(_kind(name)).inc()
                log.error("%s failed", name, exc_info=error)
                if on_failure is not None:
                    on_failure(error)

        task.add_done_callback(ended)
        return task


_process_owner: ContextVar[Owner | None] = ContextVar("pdserve_process_owner", default=None)


@asynccontextmanager
async def process_owner() -> AsyncIterator[None]:
    """Own also every task that any Owner starts inside: whatever its object leaves behind ends here."""
    async with Owner() as owner:
        token = _process_owner.set(owner)
        try:
            yield
        finally:
            _process_owner.reset(token)


async def forever(
    work: Work, name: str, *, until_done: bool = False, again_after: float | None = None
) -> None:
    """Run `work` again and again, with a back-off, until cancelled (or, with `until_done`, until it returns). Each
    distinct failure is logged once, all are counted. EngineDead is raised: the process has to end.

    With `again_after` to return is no failure: `work` is the life of one connection, and so many seconds later
    the next one begins."""
    seen: set[str] = set()
    pause = FIRST_PAUSE
    while True:
        started = time.monotonic()
        try:
            await work()
            if until_done:
                return
            if again_after is None:
                _ended_unasked(name)
            pause = FIRST_PAUSE
            await asyncio.sleep(again_after)
            continue
        except asyncio.CancelledError as error:
            if asked_to_stop():
                raise
            failure: BaseException = error  # a library's: this task was not asked to stop
        except EngineDead:
            raise
        except Exception as error:
            failure = error
        if time.monotonic() - started > HEALTHY:
            pause = FIRST_PAUSE
        TASK_FAILURES.labels(_kind(name)).inc()
        what = _fingerprint(failure)
        if what not in seen and len(seen) < _REMEMBERED:
            seen.add(what)
            log.error("%s failed and starts again (the same failure is logged once)", name, exc_info=failure)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)


async def unending(work: Awaitable[None], name: str) -> None:
    """Await `work`, which must go on until it is cancelled; a return, or a cancellation that comes from inside,
    raises RuntimeError. A TaskGroup would take both for a good end."""
    try:
        await work
    except asyncio.CancelledError:
        if asked_to_stop():
            raise
    _ended_unasked(name)


def _ended_unasked(name: str) -> NoReturn:
    raise RuntimeError(f"{name} ended by itself")


def asked_to_stop() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    """Of a task that is done."""
    if task.cancelled():
        return None if task.cancelling() else asyncio.CancelledError("nothing asked the task to stop")
    return task.exception()


def _kind(name: str) -> str:
    """A label of few values: without what comes after a colon."""
    return name.partition(":")[0]


def _fingerprint(failure: BaseException) -> str:
    """Kind and place."""
    frames = traceback.extract_tb(failure.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(failure).__name__} {place}"
