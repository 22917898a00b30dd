"""The life of a service, and how signals end it."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import pytest

from pdserve.config.schema import Config
from pdserve.errors import EngineDead
from pdserve.plan.slots import Slot
from pdserve.process import life
from pdserve.process.life import Service
from pdserve.process.signals import SERVES, STOPPERS, SUPERVISOR_DIED
from pdserve.records import Role
from pdserve.tasks import Owner, Work
from tests.conditions import until
from tests.decode.graph import config


class Idle(Service):
    """Notes what happens to it."""

    def __init__(self, work: Work | None = None) -> None:
        super().__init__(config(), Slot(Role.PREFILL, 0), "idle-0", "")
        self.noted: list[str] = []
        self._work = work
        self._left_behind = Owner()

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
        assert self.ready.is_set(), "there may be requests from here on, which a drain lets finish"
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


class Reporting(Idle):
    """Takes its time to report that its engine is dead."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.reports, self.goes_on = asyncio.Event(), asyncio.Event()

    async def engine_died(self, death: EngineDead) -> None:
        self.reports.set()
        await self.goes_on.wait()


class Failing(Idle):
    """Fails while a thread of it hangs."""

    @classmethod
    def connect(cls, _config: Config, _slot: Slot, _metrics_url: str) -> "Failing":
        return cls()

    async def start(self, stack: AsyncExitStack) -> None:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        raise EngineDead("boom")


async def test_a_life_in_its_order() -> None:
    service = Idle()
    assert service.unready() == "it starts"
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(service.ready.wait(), 30)
    assert service.noted == ["start", "warm up", "announce"]
    await until(lambda: not service.unready())
    service.stop()
    await asyncio.wait_for(running, 30)
    assert service.unready() == "it drains"
    assert service.noted == ["start", "warm up", "announce", "drain", "left"]
    assert service.draining
    assert not service.ready.is_set()
    assert service.left_behind.cancelled(), "no task outlives the service"


async def test_a_dead_engine_is_reported_before_the_seams_are_left() -> None:
    async def die() -> None:
        raise EngineDead("boom")

    service = Idle(die)
    with pytest.raises(EngineDead, match="boom"):
        await asyncio.wait_for(service.run(), 30)
    assert service.noted[-2:] == ["boom", "left"]


async def test_a_dead_engine_shows_at_once_however_long_the_end_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What probes and the process above a lone role go by."""
    monkeypatch.setattr(life, "BEAT", 0.001)
    dies, beats = asyncio.Event(), list[bytes]()

    async def die() -> None:
        await dies.wait()
        raise EngineDead("it hangs")

    service = Reporting(die)
    running = asyncio.create_task(service.run())
    beating = asyncio.create_task(life.show_life(service, beats.append))
    await until(lambda: SERVES in beats)
    assert (service.fault, service.unready()) == ("", "")
    dies.set()
    await asyncio.wait_for(service.reports.wait(), 30)
    assert (service.fault, service.unready()) == ("it hangs", "it hangs")
    beats.clear()
    await asyncio.sleep(0.01)
    assert beats == []
    service.goes_on.set()
    with pytest.raises(EngineDead):
        await asyncio.wait_for(running, 30)
    beating.cancel()


async def test_a_service_whose_supervisor_and_guardian_are_gone_stops_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(life, "LAST_RESORT", 0.3)
    service = Idle()
    living = asyncio.create_task(life.live_until_signalled(service, drain_timeout=0.1))
    await service.ready.wait()
    os.kill(os.getpid(), SUPERVISOR_DIED)
    started = time.monotonic()
    await asyncio.wait_for(living, 30)
    assert time.monotonic() - started > 0.5, "the guardian gets its time"
    assert "drain" in service.noted


async def test_a_start_that_ignores_its_cancellation_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
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


FAIL = """
from dataclasses import replace
from pdserve.graph import GRAPH
from pdserve.plan.slots import Slot
from pdserve.process import life
from pdserve.records import Role
from tests.decode.graph import config

GRAPH[Role.DECODE] = replace(GRAPH[Role.DECODE], service="tests.process.test_life:Failing")
raise SystemExit(life.run(config(), Slot(Role.DECODE, 0)))
"""


@pytest.mark.parametrize("late", [(), STOPPERS])
def test_a_process_that_failed_waits_for_no_thread_and_keeps_its_exit_code(
    late: Sequence[signal.Signals],
) -> None:
    process = subprocess.Popen([sys.executable, "-c", FAIL], stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "boom" in line)
        for number in late:
            process.send_signal(number)
        assert process.wait(30) == 1, said


async def test_a_drain_goes_on_when_the_guardian_takes_over_from_a_supervisor_that_died_in_its_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(life, "SAME_SIGNAL", 0.0)
    service = Draining()
    living = asyncio.create_task(life.live_until_signalled(service, drain_timeout=60))
    await service.ready.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: "drain" in service.noted)
    for number in (SUPERVISOR_DIED, signal.SIGTERM):
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)
    assert not living.done()
    assert not living.cancelling()
    assert service.noted[-1] == "drain", "it may go on draining"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(living, 30)
    assert "drained" not in service.noted


async def test_a_signal_that_is_delivered_twice_at_once_counts_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uvloop does now and then; requests would break off."""
    monkeypatch.setattr(life, "SAME_SIGNAL", 60.0)
    caplog.set_level(logging.INFO)
    service = Draining()
    living = asyncio.create_task(life.live_until_signalled(service, drain_timeout=60))
    await service.ready.wait()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
    await until(lambda: not service.ready.is_set())
    assert "drain" in service.noted
    assert not living.done(), "it may drain"
    monkeypatch.setattr(life, "SAME_SIGNAL", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(living, 30)
    assert "drained" not in service.noted, "the next one ended it at once"
    assert "second signal" in caplog.text
