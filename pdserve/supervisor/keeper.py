"""Keeps one job alive: starts it, waits until it is ready, and starts it again when it ends unasked."""

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace
from enum import StrEnum

from pdserve.errors import PdserveError
from pdserve.graph import BOOT_VARIABLE, ProcessSpec
from pdserve.messages import Instance, Role, SlotState
from pdserve.observe import logs
from pdserve.observe.logs import LogLine
from pdserve.process.identity import instance_id, new_boot
from pdserve.supervisor.backoff import GiveUp, Life, Policy, decide, failed_starts
from pdserve.supervisor.guardian import Guardian
from pdserve.supervisor.process import CONFIG_ERROR, Ended, Process
from pdserve.supervisor.rollcall import Roll
from pdserve.tasks import forever

log = logging.getLogger(__name__)

LOADING_PATIENCE = 2.0
"""seconds for what has nothing to drain"""
CAUSE_LIMIT = 300
LIVES = 50
"""remembered for the back-off"""


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to restart"
    STOPPED = "stopped"


class GaveUp(PdserveError):
    """A job ended for good, and the graph with it; the text has the cause."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Watcher(ABC):
    """Who is told what becomes of the jobs. Calls come from the event loop and must not wait."""

    @abstractmethod
    def line(self, name: str, raw: str) -> None:
        """A line of output."""

    @abstractmethod
    def changed(self, name: str, state: State) -> None:
        """The keeper's `state_of_slot` has the rest."""

    @abstractmethod
    def was_ready(self, role: Role) -> bool:
        """Whether any process of this role was, ever."""


class Keeper:
    """One job's life. `run` is to be awaited by whoever owns the keeper; `stop` may be called at any time."""

    def __init__(
        self, job: ProcessSpec, roll: Roll, watcher: Watcher, guardian: Guardian, policy: Policy
    ) -> None:
        self.job = job
        self.ready = asyncio.Event()
        self.settled = asyncio.Event()
        """it has been ready, or does not start while others of its role are: nobody needs to wait for it"""
        self.instance: Instance | None = None
        self._roll = roll
        self._watcher = watcher
        self._guardian = guardian
        self._policy = policy
        self._process: Process | None = None
        self._state = State.STARTING
        self._lives: deque[Life] = deque(maxlen=LIVES)
        self._was_ready = False
        self._restarts = 0
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Returns when stopped. Raises GaveUp when starting it again would not help."""
        try:
            while not self._stopping.is_set():
                self._lives.append(await self._live())
                if not self._stopping.is_set():
                    await self._pause()
                    self._restarts += 1
        finally:
            self._stopped.set()
            self._become(State.STOPPED)

    @property
    def state_of_slot(self) -> SlotState:
        """For everybody to see."""
        end = self._lives[-1].end if self._lives else None
        return SlotState(
            self.job.name,
            self.job.role,
            state=self._state,
            restarts=self._restarts,
            failed_starts=0 if self._state is State.READY else failed_starts(self._lives),
            end=str(end) if end else "",
            cause=_cause(end) if end else "",
        )

    async def stop(self, patience: float) -> None:
        """SIGTERM, `patience` seconds to drain, then the end; returns when nothing of the job is left. One
        that is still loading has nothing to drain and gets two seconds only."""
        self._stopping.set()
        if not self.ready.is_set():
            patience = min(patience, LOADING_PATIENCE)
        if self._process:
            self._process.ask_to_stop()
        try:
            async with asyncio.timeout(patience):
                await self._stopped.wait()
        except TimeoutError:
            log.warning("%s did not stop within %g s and is killed", self.job.name, patience)
            self.kill()
            await self._stopped.wait()

    def kill(self) -> None:
        self._stopping.set()
        if self._process:
            self._process.kill()

    async def _live(self) -> Life:
        started = time.monotonic()
        self._become(State.STARTING)
        self.instance = None
        boot = new_boot()
        job = replace(self.job, env={**self.job.env, BOOT_VARIABLE: boot})
        try:
            process = Process.start(job, lambda raw: self._watcher.line(self.job.name, raw))
        except OSError as error:  # no memory for another process, too many of them, a full disk
            return Life(started, time.monotonic(), False, Ended(1, (f"it could not be started: {error}",)))
        self._process = process
        self._guardian.watch(process.pid, self.job.node.stops)
        mine = instance_id(self.job.name, boot)
        watching = asyncio.create_task(
            forever(lambda: self._watch(process, mine), "role watch", until_done=True)
        )
        try:
            if self._stopping.is_set():
                process.ask_to_stop()
            end = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        finally:
            was_ready = self.ready.is_set()
            self.ready.clear()
            self._process = None
            self._guardian.forget(process.pid)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if self.instance and end.code:
            await self._roll.strike_off(self.instance)
        return Life(started, time.monotonic(), was_ready, end)

    async def _watch(self, process: Process, instance_id: str) -> None:
        """See it become ready, and kill it when it hangs. Draining is none of this: who stops a process sees to its
        end."""
        self.instance = await self._roll.until(instance_id, process.pid)
        process.note_memory()
        self._was_ready = True
        self.ready.set()
        self.settled.set()
        self._become(State.READY)
        seconds = await self._roll.vanished(self.instance)
        if not self._stopping.is_set():
            log.error(
                "%s hangs: its process %d lives, but its lease in etcd ended %g s ago; killing it",
                self.job.name,
                process.pid,
                seconds,
            )
            process.kill()

    def _become(self, state: State) -> None:
        self._state = state
        self._watcher.changed(self.job.name, state)

    async def _pause(self) -> None:
        end, role_was_ready = self._lives[-1].end, self._watcher.was_ready(self.job.role)
        match decide(self._lives, self._policy, was_ready=self._was_ready, role_was_ready=role_was_ready):
            case GiveUp(reason):
                text = f"{self.job.name} ended ({end}); not started again, for {reason}.{_last_lines(end)}"
                raise GaveUp(text, CONFIG_ERROR if end.code == CONFIG_ERROR else 1)
            case decision:
                log.error(
                    "%s ended (%s), starts again in %g s%s",
                    self.job.name,
                    end,
                    decision.delay,
                    _last_lines(end, 5),
                )
                if role_was_ready and failed_starts(self._lives) >= self._policy.failed_starts:
                    self.settled.set()
                self._become(State.WAITING)
                try:
                    async with asyncio.timeout(decision.delay):
                        await self._stopping.wait()
                except TimeoutError:
                    pass


def _last_lines(end: Ended, count: int = 15) -> str:
    """None for one that was killed: what it said before has nothing to do with it."""
    lines = [text for line in _said(end) for text in line.message.splitlines()][-count:]
    return "\nIts last lines:\n  " + "\n  ".join(lines) if lines else ""


def _cause(end: Ended) -> str:
    """Its last error, or whatever it said last; a line."""
    said = _said(end)
    errors = [line for line in said if line.level in "EC"] or said
    return errors[-1].message.strip().splitlines()[-1][:CAUSE_LIMIT] if errors else ""


def _said(end: Ended) -> list[LogLine]:
    if end.code == -signal.SIGKILL:
        return []
    said = [logs.parse(raw, "") for raw in end.last_lines]
    return [line for line in said if not line.noise and line.message.strip()]
