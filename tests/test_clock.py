"""The time of day, and how tests make it wrong."""

import asyncio
import time

import pytest

from pdserve import clock


def test_the_clock_of_a_process_and_that_of_one_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{clock.VARIABLE}_PREFILL", "-40")
    monkeypatch.setenv(clock.VARIABLE, "")
    clock.skew_role("decode")
    assert clock.unix() - time.time() == pytest.approx(0, abs=1)
    clock.skew_role("prefill")
    assert clock.unix() - time.time() == pytest.approx(-40, abs=1)


async def test_tasks_keep_the_clock_in_which_they_were_started() -> None:
    go = asyncio.Event()

    async def look() -> float:
        await go.wait()
        return clock.unix() - time.time()

    with clock.skewed(3600):
        ahead = asyncio.create_task(look())
    right = asyncio.create_task(look())
    go.set()
    assert await ahead == pytest.approx(3600, abs=1)
    assert await right == pytest.approx(0, abs=1)
