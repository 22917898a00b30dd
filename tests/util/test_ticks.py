"""Periodic tasks of a process wake it together."""

import time

import pytest

from pdserve.util import ticks


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(ticks, "_PHASE", 0.3)
    return monkeypatch


@pytest.mark.parametrize(
    ("now", "interval", "seconds"),
    [
        (10.3, 1.0, 1.0),
        (10.4, 1.0, 0.9),
        (10.4, 0.5, 0.4),
        (10.4, 2.0, 1.9),
        (10.25, 1.0, 1.05),  # the timer was early: the tick at 10.3 is skipped
    ],
)
def test_all_intervals_share_their_ticks(
    at: pytest.MonkeyPatch, now: float, interval: float, seconds: float
) -> None:
    at.setattr(time, "monotonic", lambda: now)
    assert ticks.until_tick(interval) == pytest.approx(seconds)
