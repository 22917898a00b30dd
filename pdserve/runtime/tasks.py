"""Background tasks: each has an owner, and none ends unseen.

A background task is a task that nothing awaits while it runs: heartbeats, watches, reconnecting connections. When it
ends by mistake, its process goes on without a part of itself and looks healthy. So such tasks are made here and
nowhere else (`tests/test_house.py` checks it); a task that the next lines await may be made anywhere.

`forever` restarts work that must not end. `isolate_errors` keeps an error about one item, such as one connection, from
the others. `Owner` holds the tasks of one object, `process_owner` those of all objects of a process. `Lifetime` is the
base class of objects that are entered with `async with`.

Two errors win over all others, since a task that keeps one of them goes on for ever: a cancellation, which is repeated
until the task ends, and EngineDead, which is also found inside an exception group (docs/decisions/0097).
"""

import asyncio
import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any, Self, TypeVar

from pdserve.observe.metrics import TASK_FAILURES
from pdserve.util.errors import find_engine_death

logger = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
"""seconds before a failed task starts again; doubled with each failure"""
HEALTHY = 30.0
"""seconds of running after which the next failure counts as the first"""
CANCEL_INTERVAL = 2.0
"""seconds between two cancellations of a task that is to stop: an error in a `finally`, or a library, may have
replaced the one before"""
_REMEMBERED = 100
"""distinct failures that are logged, of one task"""

T = TypeVar("T")
Work = Callable[[], Awaitable[None]]


async def run_on_loop(loop: asyncio.AbstractEventLoop, work: Awaitable[T]) -> T:
    """Await `work` on this loop, which may be another thread's. Context variables go with it."""
    if asyncio.get_running_loop() is loop:
        return await work

    async def there() -> T:
        return await work

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), loop))


class Lifetime(ABC):
    """An object to enter with `async with`. `_lifetime`, an `@asynccontextmanager`, sets it up, yields and takes it
    down. It may be entered again after it was left."""

    @abstractmethod
    def _lifetime(self) -> AbstractAsyncContextManager[None]: ...

    async def __aenter__(self) -> Self:
        self._entered = self._lifetime()
        await self._entered.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._entered.__aexit__(*error)


class TaskOwner:
    """The background tasks of one object. Leaving cancels them and waits for their end. It may be entered again, from
    any task of the loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            done, _ = await asyncio.wait(tasks, timeout=CANCEL_INTERVAL)
            self._tasks.difference_update(done)

    async def settle(self, within: float) -> None:
        """Wait up to `within` seconds for the tasks to end by themselves."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)

    def forever(self, work: Work, name: str, *, again_after: float | None = None) -> asyncio.Task[None]:
        """Start a task that runs the function `forever` with these arguments."""
        return self.start(forever(work, name, again_after=again_after), name)

    def start(
        self,
        work: Coroutine[Any, Any, None],
        name: str,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[None]:
        """Start a task that runs `work` once. A failure is logged, counted and passed to `on_failure`; so is a
        cancellation that nothing outside the task asked for."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        for owner in {self, _process_owner.get() or self}:
            owner._tasks.add(task)
            task.add_done_callback(owner._tasks.discard)

        def ended(task: asyncio.Task[None]) -> None:
            if (error := _failure(task)) is not None:
                TASK_FAILURES.labels(_kind_of(name)).inc()
                logger.error("%s failed", name, exc_info=error)
                if on_failure is not None:
                    on_failure(error)

        task.add_done_callback(ended)
        return task


_process_owner: ContextVar[TaskOwner | None] = ContextVar("pdserve_process_owner", default=None)


@asynccontextmanager
async def process_owner() -> AsyncIterator[None]:
    """Cancel at the end every task that any Owner started meanwhile, also where its object was not left."""
    async with TaskOwner() as owner:
        token = _process_owner.set(owner)
        try:
            yield
        finally:
            _process_owner.reset(token)


async def forever(
    work: Work, name: str, *, until_done: bool = False, again_after: float | None = None
) -> None:
    """Run `work` again whenever it ends, with a back-off, until cancelled. Each distinct failure is logged once, all
    are counted. Raises EngineDead where `work` does: the process has to end.

    To return is a failure too, unless `until_done` (then this returns as well) or `again_after`, the seconds until
    `work` runs again: it may be the life of one connection."""
    seen: set[str] = set()
    pause = FIRST_PAUSE
    while True:
        started = time.monotonic()
        try:
            await _until_it_ends(work)
            if until_done:
                return
            if again_after is None:
                raise RuntimeError(f"{name} ended by itself")
            pause = FIRST_PAUSE
            await asyncio.sleep(again_after)
            continue
        except (Exception, asyncio.CancelledError) as error:
            reraise_fatal(error)
            failure = error  # of a cancellation: a library's
        if time.monotonic() - started > HEALTHY:
            pause = FIRST_PAUSE
        TASK_FAILURES.labels(_kind_of(name)).inc()
        what = _fingerprint(failure)
        if what not in seen and len(seen) < _REMEMBERED:
            seen.add(what)
            logger.error(
                "%s failed and starts again (the same failure is logged once)", name, exc_info=failure
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)


async def _until_it_ends(work: Work) -> None:
    """Await `work` in a task of its own, which is cancelled until it ends once this one is asked to stop."""
    task = asyncio.ensure_future(work())
    try:
        await asyncio.wait([task])
    finally:
        while not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task], timeout=CANCEL_INTERVAL)
        reraise_fatal(task.exception() if not task.cancelled() else None)
    task.result()


class isolate_errors:
    """Log and count an error in the block instead of raising it, so that one bad item (a connection, a request, a
    message) does not stop the loop. `error` holds it after the block. Fatal errors are raised (`reraise_fatal`)."""

    def __init__(self, name: str) -> None:
        self.error: Exception | None = None
        self._name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        reraise_fatal(error)
        self.error = error
        TASK_FAILURES.labels(_kind_of(self._name)).inc()
        # stacklevel: the log filter drops repetitions by the line of the block
        logger.error("error in %s; continuing", self._name, exc_info=error, stacklevel=2)
        return True


def reraise_fatal(error: BaseException | None) -> None:
    """Raise EngineDead if `error` is one or contains one, and CancelledError if the current task was asked to stop,
    whatever `error` replaced it. A handler that keeps any error calls this first."""
    if (death := find_engine_death(error)) is not None:
        raise death
    if is_cancelled():
        raise asyncio.CancelledError from error


def is_cancelled() -> bool:
    """Whether something cancelled the current task, and not only what it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    """The error of a finished task; None where it returned or was asked to stop."""
    if task.cancelled():
        return None if task.cancelling() else asyncio.CancelledError("nothing asked the task to stop")
    return task.exception()


def _kind_of(name: str) -> str:
    """The label of the metric: the name up to a colon, so that there are few of them."""
    return name.partition(":")[0]


def _fingerprint(failure: BaseException) -> str:
    """The type of the error and the line that raised it."""
    frames = traceback.extract_tb(failure.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(failure).__name__} {place}"
