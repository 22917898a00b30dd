"""The life cycle of a service, and the signals that end it."""

import asyncio
import inspect
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress

import pytest

from pdserve.config.schema import Config
from pdserve.contract.records import Role
from pdserve.plan.slots import Slot
from pdserve.process import life, signals
from pdserve.process.life import Service
from pdserve.process.signals import SERVES, STOPPERS, SUPERVISOR_DIED
from pdserve.runtime.tasks import TaskOwner, Work
from pdserve.util.errors import EngineDead, PdserveError
from tests.conditions import until
from tests.decode.graph import config


class Idle(Service):
    """Records the phases that run."""

    def __init__(self, work: Work | None = None) -> None:
        super().__init__(config(), Slot(Role.PREFILL, 0), "idle-0", "")
        self.noted: list[str] = []
        self._work = work
        self._left_behind = TaskOwner()

    async def start(self, stack: AsyncExitStack) -> None:
        self.left_behind = self._left_behind.start(asyncio.sleep(60), "left behind")
        stack.callback(self.noted.append, "left")
        self.noted.append("start")

    def permanent(self) -> Mapping[str, Work]:
        return {"work": self._work} if self._work else {}

    async def warm_up(self) -> None:
        assert not self.ready.is_set()
        self.noted.append("warm up")

    async def announce(self) -> None:
        assert self.ready.is_set(), "from now on requests may arrive, which a drain finishes"
        self.noted.append("announce")

    async def drain(self) -> None:
        self.noted.append("drain")

    async def engine_died(self, death: EngineDead) -> None:
        self.noted.append(str(death))


class Stuck(Idle):
    """Never gets to serve, and cannot be cancelled."""

    over = False

    async def start(self, stack: AsyncExitStack) -> None:
        self.noted.append("start")
        while not self.over:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.noted.append("cancelled")


class Draining(Idle):
    """Takes its time to drain."""

    async def drain(self) -> None:
        await super().drain()
        await asyncio.sleep(60)
        self.noted.append("drained")


class Endless(Idle):
    """A service whose work fails while one of its tasks does not end."""

    def __init__(self) -> None:
        super().__init__(self._fail_once_it_serves)

    async def _fail_once_it_serves(self) -> None:
        await self.ready.wait()
        raise EngineDead("it crashed")

    async def announce(self) -> None:
        await super().announce()
        self.endless = self.tasks.create_task(self._go_on())

    async def _go_on(self) -> None:
        while "left" not in self.noted:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


class Reporting(Idle):
    """Takes its time to report that its engine is dead."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.reports, self.goes_on = asyncio.Event(), asyncio.Event()

    async def engine_died(self, death: EngineDead) -> None:
        self.reports.set()
        await self.goes_on.wait()
        await super().engine_died(death)


class Failing(Idle):
    """Fails while one of its threads sleeps."""

    @classmethod
    def connect(cls, _config: Config, _slot: Slot, _metrics_url: str) -> "Failing":
        return cls()

    async def start(self, stack: AsyncExitStack) -> None:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        raise EngineDead("boom")


async def test_the_phases_of_a_service_run_in_order() -> None:
    service = Idle()
    assert service.unready() == "it is starting"
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(service.ready.wait(), 30)
    assert service.noted == ["start", "warm up", "announce"]
    await until(lambda: not service.unready())
    service.stop()
    await asyncio.wait_for(running, 30)
    assert service.unready() == "it is draining"
    assert service.noted == ["start", "warm up", "announce", "drain", "left"]
    assert service.draining
    assert not service.ready.is_set()
    assert service.left_behind.cancelled(), "no task outlives the service"


async def test_a_dead_engine_is_reported_while_connections_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the report is done, probes show the fault, a standalone role sends no heartbeats to its parent process, and
    no task starts."""
    monkeypatch.setattr(life, "BEAT", 0.001)
    dies, beats = asyncio.Event(), list[bytes]()

    async def die() -> None:
        await dies.wait()
        raise EngineDead("it hangs")

    service = Reporting(die)
    running = asyncio.create_task(service.run())
    beating = asyncio.create_task(life.send_heartbeats(service, beats.append))
    await until(lambda: SERVES in beats)
    assert (service.fault, service.unready()) == ("", "")
    dies.set()
    await asyncio.wait_for(service.reports.wait(), 30)
    assert (service.fault, service.unready()) == ("it hangs", "it hangs")
    beats.clear()
    await asyncio.sleep(0.01)
    assert beats == []
    with pytest.raises(RuntimeError, match="is finished"):
        service.start_task(late := asyncio.sleep(0))
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
    service.goes_on.set()
    with pytest.raises(EngineDead, match="it hangs"):
        await asyncio.wait_for(running, 30)
    assert service.noted[-2:] == ["it hangs", "left"]
    beating.cancel()


async def test_a_service_without_supervisor_and_guardian_stops_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(life, "LAST_RESORT", 0.3)
    service = Idle()
    living = asyncio.create_task(life.live_until_signalled(service, drain_timeout=0.1))
    await service.ready.wait()
    os.kill(os.getpid(), SUPERVISOR_DIED)
    started = time.monotonic()
    await asyncio.wait_for(living, 30)
    assert time.monotonic() - started > 0.5, "the guardian has time to stop the graph"
    assert "drain" in service.noted


async def test_a_start_that_ignores_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "AT_ONCE", 0.2)
    service = Stuck()
    living = asyncio.create_task(life.live_until_signalled(service, drain_timeout=60))
    await until(lambda: "start" in service.noted)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(living, 30)
    assert "cancelled" in service.noted
    service.over = True
    service.stop()
    await until(lambda: "drain" in service.noted)


@pytest.mark.parametrize("signalled", [False, True])
async def test_a_failed_service_ends_whatever_its_tasks_do(
    signalled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "FAILED_WITHIN", 60.0 if signalled else 0.2)
    monkeypatch.setattr(life, "AT_ONCE", 0.2)
    service = Endless()
    living = asyncio.create_task(life.live_until_signalled(service, drain_timeout=60))
    await until(lambda: bool(service.fault))
    if signalled:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(living, 30)
    else:
        with pytest.raises(PdserveError, match="it crashed; it did not end within"):
            await asyncio.wait_for(living, 30)
    service.noted.append("left")
    await service.endless


FAIL = """
from dataclasses import replace
from pdserve.plan.graph import GRAPH
from pdserve.plan.slots import Slot
from pdserve.process import life, signals
from pdserve.contract.records import Role
from tests.decode.graph import config

GRAPH[Role.DECODE] = replace(GRAPH[Role.DECODE], service="tests.process.test_life:Failing")
raise SystemExit(life.run(config(), Slot(Role.DECODE, 0)))
"""


def test_signals_do_not_change_the_exit_code_of_a_failed_process() -> None:
    """Nor does the process wait for its threads."""
    process = subprocess.Popen([sys.executable, "-c", FAIL], stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "boom" in line)
        for number in STOPPERS:
            process.send_signal(number)
        assert process.wait(30) == 1, said


def test_a_closed_terminal_does_not_stop_a_process_under_nohup() -> None:
    code = "import os; from pdserve.process import signals; signals.end_while_starting(); os.kill(os.getpid(), 1)"
    for before, goes_on in ((), False), (("nohup",), True):
        command = [*before, sys.executable, "-c", f"{code}; print('goes on')"]
        result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=True)
        assert (b"goes on" in result.stdout) == goes_on


async def test_only_another_signal_of_the_same_sender_ends_a_drain(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop sometimes delivers a signal twice, and the guardian signals again if the supervisor dies while stopping
    the graph. Neither may end running requests."""
    monkeypatch.setattr(signals, "SAME_STOP", 60.0)
    caplog.set_level(logging.INFO)
    service = Draining()
    living = asyncio.create_task(life.live_until_signalled(service, drain_timeout=60))
    await service.ready.wait()

    async def get(*numbers: signal.Signals) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)

    await get(signal.SIGTERM, signal.SIGTERM)
    await until(lambda: "drain" in service.noted)
    monkeypatch.setattr(signals, "SAME_STOP", 0.0)
    await get(SUPERVISOR_DIED, signal.SIGTERM)
    assert not living.done()
    assert not living.cancelling()
    assert service.noted[-1] == "drain", "the drain continues"
    await get(signal.SIGTERM)
    await asyncio.wait_for(living, 30)
    assert "drained" not in service.noted
    assert "second signal" in caplog.text
