"""How signals end a role."""

import asyncio
import os
import signal
import time

import pytest

from pdserve.process import run
from pdserve.process.lifecycle import SUPERVISOR_DIED


class Role:
    """Serves until it is told to stop; or never gets that far, and cannot be cancelled."""

    def __init__(self, *, stuck: bool = False) -> None:
        self.ready = asyncio.Event()
        self.running = asyncio.Event()
        self.over = asyncio.Event()
        self._stuck = stuck

    def stop(self) -> None:
        self.over.set()

    async def run(self) -> None:
        self.running.set()
        if not self._stuck:
            self.ready.set()
        while not self.over.is_set():
            try:
                await self.over.wait()
            except asyncio.CancelledError:
                if not self._stuck:
                    raise


class Draining(Role):
    """Is told to stop, and takes its time."""

    def stop(self) -> None:
        self.ready.clear()


async def test_a_role_whose_supervisor_and_guardian_are_gone_stops_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "LAST_RESORT", 0.3)
    role = Role()
    life = asyncio.create_task(run.run_until_signalled(role, drain_timeout=0.1))
    await role.running.wait()
    os.kill(os.getpid(), SUPERVISOR_DIED)
    started = time.monotonic()
    await asyncio.wait_for(life, 10)
    assert time.monotonic() - started > 0.5, "the guardian gets its time"
    assert role.over.is_set(), "it drained"


async def test_what_cannot_be_cancelled_while_it_starts_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "AT_ONCE", 0.2)
    role = Role(stuck=True)
    life = asyncio.create_task(run.run_until_signalled(role, drain_timeout=60))
    await role.running.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(life, 10)
    role.stop()


async def test_a_signal_that_is_told_twice_at_once_is_one() -> None:
    """As uvloop tells it now and then; requests would break off."""
    role = Draining()
    life = asyncio.create_task(run.run_until_signalled(role, drain_timeout=60))
    await role.running.wait()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
    assert not role.ready.is_set(), "it was told to stop"
    assert not life.done(), "it may drain"
    await asyncio.sleep(run.SAME)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(life, 10)
    assert not role.over.is_set(), "the next one ended it at once"
