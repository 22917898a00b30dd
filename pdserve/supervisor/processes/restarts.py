"""The restart loop with back-off, for roles and embedded servers alike: start, readiness, health check, restart.

The loop gives up, and the graph with it, only where the configuration is wrong or no process of this kind has ever
become ready. Later, a process that does not come back is no reason to stop the others: it is started again without end,
at the back-off's ceiling.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from pdserve.runtime.tasks import forever, isolate_errors
from pdserve.supervisor.processes.child import CONFIG_ERROR, Child, Exit
from pdserve.util import clock
from pdserve.util.errors import PdserveError

logger = logging.getLogger(__name__)

LOADING_PATIENCE = 2.0
"""seconds to stop for a process that is not ready: it has nothing to drain"""
_HISTORY = 50
"""runs that are remembered"""
_WAIT_AGAIN = 0.5
"""seconds"""

# the policy


@dataclass(frozen=True)
class RestartPolicy:
    first: float = 1.0
    """seconds before the first restart; doubled with each further one"""
    ceiling: float = 30.0
    """seconds before a restart, at most"""
    healthy: float = 60.0
    """seconds of a run that ends a series of failures"""
    failed_starts: int = 3
    """failed starts in a row after which the process cannot be started"""
    kills: int = 20
    """the same for starts that were ended from outside, such as by the kernel for lack of memory"""


@dataclass(frozen=True)
class PastRun:
    """One run of a process, from its start to its end."""

    seconds: float
    ready: bool
    """whether it became ready"""
    exit: Exit


@dataclass(frozen=True)
class Restart:
    delay: float


@dataclass(frozen=True)
class NoRestart:
    reason: str


def decide(
    history: Sequence[PastRun],
    policy: RestartPolicy,
    *,
    was_ready: bool = False,
    kind_was_ready: bool = False,
) -> Restart | NoRestart:
    """Decide what to do after the last of these runs (oldest first, at least one) ended unasked. `was_ready`: this
    process has ever been ready; `kind_was_ready`: any process of its kind has. Pure."""
    if history[-1].exit.code == CONFIG_ERROR and not was_ready:
        return NoRestart("its configuration is wrong")
    if not kind_was_ready:
        failed = failed_starts(history)
        if failed >= policy.failed_starts:
            return NoRestart(f"it failed to start {_times(failed)} in a row")
        if len(history) >= policy.kills:
            return NoRestart(f"it was ended {_times(len(history))} while it started")
    return Restart(min(policy.ceiling, policy.first * 2 ** max(0, _failures_in_a_row(history, policy) - 1)))


def failed_starts(history: Sequence[PastRun]) -> int:
    """Failed starts since it was last ready. A start that was ended from outside did not fail."""
    count = 0
    for run in reversed(history):
        if run.ready:
            break
        count += not run.exit.from_outside
    return count


def _failures_in_a_row(history: Sequence[PastRun], policy: RestartPolicy) -> int:
    """Runs that failed since the last healthy one, without those that were ended from outside."""
    count = 0
    for run in reversed(history):
        if run.seconds >= policy.healthy:
            break
        count += not run.exit.from_outside
    return count


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# the loop


class ProcessState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    WAITING = "waiting to restart"
    STOPPED = "stopped"


class CannotStart(PdserveError):
    """A process cannot be started, and the graph ends with it; the text has the cause."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class SupervisedProcess(ABC):
    """The process of a restart loop: how to start it and how to watch it."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def spawn(self) -> Child:
        """Start it; raises OSError or ConfigError where that cannot be done now."""

    @abstractmethod
    async def watch(self, child: Child, ready: Callable[[], None]) -> str:
        """Call `ready` when the child is ready. Return what is wrong where it does not become ready, or hangs: the loop
        ends it then. May be called again for the same child."""

    @property
    def patience(self) -> float:
        """Seconds that it gets to finish its work where it seems to hang; 0: it is killed at once."""
        return 0.0

    @property
    @abstractmethod
    def kind_was_ready(self) -> bool:
        """Whether a process of this kind has ever been ready: then its configuration is right."""

    async def ended(self, exit_: Exit) -> None:  # noqa: B027 (servers have nothing to do)
        """Called when the child has ended and nothing of it is left."""


AnyProcess = TypeVar("AnyProcess", bound=SupervisedProcess)


class RestartLoop(Generic[AnyProcess]):
    """Keeps one process running. Its owner awaits `run`; `stop` may be called at any time."""

    def __init__(
        self,
        process: AnyProcess,
        policy: RestartPolicy,
        on_change: Callable[["RestartLoop[AnyProcess]"], None],
        child: Child | None = None,
    ) -> None:
        """`on_change` is called after each change of `state`. `child`, if given, is running and ready."""
        self.process = process
        self.state = ProcessState.STARTING
        self.since = clock.unix()
        """Unix seconds when it became ready or ceased to be"""
        self.restarts = 0
        self.history: deque[PastRun] = deque(maxlen=_HISTORY)
        self.settled = asyncio.Event()
        """set when the graph need not wait for it any more: it has been ready, or it does not start while others of its
        kind do"""
        self._policy = policy
        self._on_change = on_change
        self._child = child
        self._failed_start: Exit | None = None
        """why the present child is killed before it became ready"""
        self._was_ready = child is not None
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Return when stopped. Raises CannotStart where starting it again would not help. Kills it when cancelled."""
        try:
            while self._child or not self._stopping.is_set():
                self.history.append(await self._run_once())
                if not self._stopping.is_set():
                    await self._back_off(self.history[-1].exit)
                    self.restarts += 1
        finally:
            self._stopped.set()
            self._become(ProcessState.STOPPED)

    async def stop(self, patience: float) -> None:
        """Send SIGTERM, and SIGKILL after `patience` seconds to drain, `LOADING_PATIENCE` where the process is not
        ready. Return when nothing of it is left."""
        self._stopping.set()
        if self._child:
            if self.state is ProcessState.READY:
                self._become(ProcessState.DRAINING)
            draining = self.state is ProcessState.DRAINING
            await self._child.stop(patience if draining else min(patience, LOADING_PATIENCE))
        await self._stopped.wait()

    def kill(self) -> None:
        self._stopping.set()
        if self._child:
            self._child.kill()

    async def _run_once(self) -> PastRun:
        started = time.monotonic()
        self._become(ProcessState.STARTING)
        try:
            child = self._child = self._child or self.process.spawn()
        except Exception as error:  # no memory for another process, too many of them, a full disk
            exit_ = Exit(1, (f"it could not be started: {error}",))
            return PastRun(0.0, ready=False, exit=exit_)
        watching = asyncio.create_task(forever(lambda: self._watch(child), "child watch", until_done=True))
        self._failed_start = None
        try:
            exit_ = await _wait_for_exit(child)
        except asyncio.CancelledError:
            child.kill()
            await child.wait()
            raise
        finally:
            self._child = None
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        with isolate_errors("ends of processes"):
            await self.process.ended(exit_)
        ready = self.state in (ProcessState.READY, ProcessState.DRAINING)
        return PastRun(time.monotonic() - started, ready, self._failed_start or exit_)

    async def _watch(self, child: Child) -> None:
        """End a child that hangs, unless it is being stopped."""

        def ready() -> None:
            child.note_memory()
            self._was_ready = True
            self.settled.set()
            self._become(ProcessState.READY)

        problem = await self.process.watch(child, ready)
        if child.running and not self._stopping.is_set():
            was_ready = self.state is ProcessState.READY
            what = "hangs" if was_ready else "does not become ready"
            patience = self.process.patience if was_ready else 0.0
            how = f"stopping it, and killing it after {patience:g} s" if patience else "killing it"
            logger.error("%s %s: %s; %s", self.process.name, what, problem, how)
            self._failed_start = None if was_ready else Exit(1, (problem,))
            await child.stop(patience)

    async def _back_off(self, exit_: Exit) -> None:
        name, kind_was_ready = self.process.name, self.process.kind_was_ready
        decision = decide(
            self.history, self._policy, was_ready=self._was_ready, kind_was_ready=kind_was_ready
        )
        if isinstance(decision, NoRestart):
            text = f"{name} ended ({exit_}); not started again, for {decision.reason}.{exit_.tail()}"
            raise CannotStart(text, CONFIG_ERROR if exit_.code == CONFIG_ERROR else 1)
        logger.error("%s ended (%s), starts again in %g s%s", name, exit_, decision.delay, exit_.tail(5))
        if kind_was_ready and failed_starts(self.history) >= self._policy.failed_starts:
            self.settled.set()
        self._become(ProcessState.WAITING)
        with suppress(TimeoutError):
            async with asyncio.timeout(decision.delay):
                await self._stopping.wait()

    def _become(self, state: ProcessState) -> None:
        if (state is ProcessState.READY) is not (self.state is ProcessState.READY):
            self.since = clock.unix()
        self.state = state
        with isolate_errors("states of processes"):
            self._on_change(self)


async def _wait_for_exit(child: Child) -> Exit:
    """Wait for its end, however often that fails: there may be no file descriptor left for it."""
    while True:
        with isolate_errors("ends of processes"):
            return await child.wait()
        await asyncio.sleep(_WAIT_AGAIN)
