"""The restart loop with backoff, for roles and embedded servers: start, wait for readiness, check health, restart.

The loop gives up, and ends the graph, in two cases: a process that was never ready has a wrong configuration, or starts
keep failing and no process of its kind was ever ready. Any other failure is retried for ever.
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
"""Seconds until a stopping process that is not ready is killed: it has no requests to drain."""
_HISTORY = 50
"""Past runs of a process to keep."""
_WAIT_AGAIN = 0.5
"""Seconds until a failed wait for a child's exit is repeated."""

# the policy


@dataclass(frozen=True)
class RestartPolicy:
    first: float = 1.0
    """Seconds before the first restart; doubled for each further failure."""
    ceiling: float = 30.0
    """Seconds before a restart, at most."""
    healthy: float = 60.0
    """A run of this many seconds resets the backoff."""
    failed_starts: int = 3
    """Failed starts in a row after which the loop gives up, if no process of its kind was ever ready."""
    kills: int = 20
    """Runs, also those ended from outside, after which the loop gives up, if no process of its kind was ever ready."""


@dataclass(frozen=True)
class PastRun:
    seconds: float
    ready: bool
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
    """Decide whether to restart a process after its last run. `history`: its runs, oldest first.
    `was_ready`: this process has ever been ready; `kind_was_ready`: any process of its kind has. Pure."""
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
    """Failed starts since the process was last ready, without those that were ended from outside."""
    count = 0
    for run in reversed(history):
        if run.ready:
            break
        count += not run.exit.from_outside
    return count


def _failures_in_a_row(history: Sequence[PastRun], policy: RestartPolicy) -> int:
    """Runs since the last healthy one, without those that were ended from outside."""
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
    """A process cannot be started, so the graph ends. The text has the cause."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class SupervisedProcess(ABC):
    """What a restart loop runs: how to start a process and how to watch it."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def spawn(self) -> Child:
        """Start a child; raises OSError or ConfigError if that fails now."""

    @abstractmethod
    async def watch(self, child: Child, ready: Callable[[], None]) -> str:
        """Call `ready` when the child is ready. Return the problem when it does not become ready, or hangs; the loop
        then stops it. May be called again for the same child."""

    @property
    def patience(self) -> float:
        """Seconds for a hung child to stop before it is killed."""
        return 0.0

    @property
    @abstractmethod
    def kind_was_ready(self) -> bool:
        """Whether a process of this kind has ever been ready, so that its configuration is right."""

    async def ended(self, exit_: Exit) -> None:  # noqa: B027 (optional)
        """Called when the child and its process group have ended."""


AnyProcess = TypeVar("AnyProcess", bound=SupervisedProcess)


class RestartLoop(Generic[AnyProcess]):
    """Keeps a process running. Its owner awaits `run`; `stop` may be called at any time."""

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
        """Unix seconds of the last change to or from READY."""
        self.restarts = 0
        self.history: deque[PastRun] = deque(maxlen=_HISTORY)
        self.settled = asyncio.Event()
        """Set when the start of the graph need not wait for this process: it has been ready, or its starts fail while
        another of its kind has been ready."""
        self._policy = policy
        self._on_change = on_change
        self._child = child
        self._failed_start: Exit | None = None
        """Why the loop stops a child that did not become ready; None otherwise."""
        self._was_ready = child is not None
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Return when stopped. Raises CannotStart if a restart would not help. Kills the child when cancelled."""
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
        """Send SIGTERM, and SIGKILL after `patience` seconds, or `LOADING_PATIENCE` if the process is not ready.
        Return when its process group has ended."""
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
        with isolate_errors("process exit"):
            await self.process.ended(exit_)
        ready = self.state in (ProcessState.READY, ProcessState.DRAINING)
        return PastRun(time.monotonic() - started, ready, self._failed_start or exit_)

    async def _watch(self, child: Child) -> None:
        """Stop a child that hangs or does not become ready, unless it is being stopped already."""

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
            text = f"{name} ended ({exit_}); not restarting it, because {decision.reason}.{exit_.tail()}"
            raise CannotStart(text, CONFIG_ERROR if exit_.code == CONFIG_ERROR else 1)
        logger.error("%s ended (%s); restarting it in %g s%s", name, exit_, decision.delay, exit_.tail(5))
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
        with isolate_errors("process state change"):
            self._on_change(self)


async def _wait_for_exit(child: Child) -> Exit:
    """Wait for the child's exit. Retry if waiting fails, for example for lack of file descriptors."""
    while True:
        with isolate_errors("process exit"):
            return await child.wait()
        await asyncio.sleep(_WAIT_AGAIN)
