"""The time of day, and its offset in tests."""

import time

import pytest

from pdserve.util import clock


def test_one_role_may_have_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{clock.VARIABLE}_PREFILL", "-40")
    monkeypatch.setenv(clock.VARIABLE, "")
    clock.skew_role("decode")
    assert clock.unix() - time.time() == pytest.approx(0, abs=1)
    clock.skew_role("prefill")
    assert clock.unix() - time.time() == pytest.approx(-40, abs=1)
