"""Background tasks: each has an owner that cancels and awaits it, and each failure is logged and counted.

A background task is one that nothing awaits while it runs: a heartbeat, a watch, a reconnecting connection. If one ends
by mistake, its process looks healthy but has lost a part. So background tasks are made only here (`tests/test_house.py`
checks it). A task that the next lines await may be made anywhere.

`forever` restarts work that must not end. `isolate_errors` contains an error about one item, such as one connection.
`TaskOwner` holds the tasks of an object, `process_owner` those of a process. `Lifetime` is the base class of objects
that are entered with `async with`.

Two errors are never swallowed: EngineDead, also inside an exception group, and a cancellation, which is repeated until
the task ends (docs/decisions/0097).
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
"""Seconds before a failed task restarts: the first pause doubles with each failure, up to the last."""
HEALTHY = 30.0
"""Seconds of running after which the back-off starts again at the first pause."""
CANCEL_INTERVAL = 2.0
"""Seconds between two cancellations of a task that should stop, because an error in a `finally` block or a library may
have swallowed the first."""
_MAX_LOGGED = 100
"""Maximum of distinct failures of a task that are logged."""

T = TypeVar("T")
Work = Callable[[], Awaitable[None]]


async def run_on_loop(loop: asyncio.AbstractEventLoop, work: Awaitable[T]) -> T:
    """Await `work` on this loop, which may run in another thread, with the caller's context variables."""
    if asyncio.get_running_loop() is loop:
        return await work

    async def run() -> T:
        return await work

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))


class Lifetime(ABC):
    """Base of objects that are entered with `async with`. `_lifetime`, an `@asynccontextmanager`, sets the object up,
    yields and tears it down. The object may be entered again after it was left."""

    @abstractmethod
    def _lifetime(self) -> AbstractAsyncContextManager[None]: ...

    async def __aenter__(self) -> Self:
        self._entered = self._lifetime()
        await self._entered.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._entered.__aexit__(*error)


class TaskOwner:
    """The background tasks of one object. Leaving it cancels and awaits them. It may be entered again, from any task of
    the loop."""

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
        """Wait up to `within` seconds for the tasks to end on their own."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)

    def forever(self, work: Work, name: str, *, again_after: float | None = None) -> asyncio.Task[None]:
        """Start a task that runs `forever` with these arguments."""
        return self.start(forever(work, name, again_after=again_after), name)

    def start(
        self,
        work: Coroutine[Any, Any, None],
        name: str,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[None]:
        """Start a task that runs `work` once. A failure is logged, counted and passed to `on_failure`, and so is a
        CancelledError that no `cancel()` of this task caused."""
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
    """On leaving, cancel every task that any TaskOwner started since the entry, also those of objects that were not
    left."""
    async with TaskOwner() as owner:
        token = _process_owner.set(owner)
        try:
            yield
        finally:
            _process_owner.reset(token)


async def forever(
    work: Work, name: str, *, until_done: bool = False, again_after: float | None = None
) -> None:
    """Run `work` until cancelled, and restart it with a back-off when it fails. Each distinct failure is logged once;
    all are counted. Raises EngineDead if `work` does, because the process must end.

    A return of `work` counts as a failure, except in two cases: with `until_done`, this returns, too; with
    `again_after`, `work` runs again after that many seconds."""
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
            failure = error
        if time.monotonic() - started > HEALTHY:
            pause = FIRST_PAUSE
        TASK_FAILURES.labels(_kind_of(name)).inc()
        fingerprint = _fingerprint(failure)
        if fingerprint not in seen and len(seen) < _MAX_LOGGED:
            seen.add(fingerprint)
            logger.error(
                "%s failed; restarting it (each distinct failure is logged once)", name, exc_info=failure
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)


async def _until_it_ends(work: Work) -> None:
    """Await `work` in an inner task. When this task is cancelled, cancel the inner task until it ends."""
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
    """Raise EngineDead if `error` is or contains one, and CancelledError if the current task was cancelled. Every
    handler that swallows arbitrary errors calls this first."""
    if (death := find_engine_death(error)) is not None:
        raise death
    if is_cancelled():
        raise asyncio.CancelledError from error


def is_cancelled() -> bool:
    """Whether the current task was cancelled, and not only the future that it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    """Return the error of a finished task; None if it returned or was cancelled on purpose."""
    if task.cancelled():
        return None if task.cancelling() else asyncio.CancelledError("the task was not asked to stop")
    return task.exception()


def _kind_of(name: str) -> str:
    """Return the metric's label: the name up to a colon, so that there are few labels."""
    return name.partition(":")[0]


def _fingerprint(failure: BaseException) -> str:
    """Return the error's type and the line that raised it."""
    frames = traceback.extract_tb(failure.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(failure).__name__} {place}"
