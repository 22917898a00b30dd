"""The time of day, and how tests make it wrong."""

import os
import time

import pytest

from pdserve import clock


def test_a_process_whose_clock_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(clock.VARIABLE, "-40")
    assert clock.unix() - time.time() == pytest.approx(-40, abs=1)


def test_an_offset_for_one_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(clock.VARIABLE, raising=False)
    monkeypatch.setenv(f"{clock.VARIABLE}_PREFILL", "5")
    monkeypatch.setenv(clock.VARIABLE, "")
    clock.skew_role("decode")
    assert not os.environ[clock.VARIABLE]
    clock.skew_role("prefill")
    assert os.environ[clock.VARIABLE] == "5"
