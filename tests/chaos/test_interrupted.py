"""Ctrl-C in the middle of a fault."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pdserve_bench.graphs.simulated import simulated, write

from tests.chaos.command import Run

pytestmark = pytest.mark.chaos


def test_an_interrupted_run_leaves_no_process(tmp_path: Path, chaos: Callable[..., Run]) -> None:
    """The run shows its rows so far, keeps its logs, and reports that it is incomplete."""
    file = write(simulated(), tmp_path / "sim.yaml")
    run = chaos(file, "--only", "decode-hang", "--hold", "200", "--seconds", "3", "--workers", "1")
    deadline = time.monotonic() + 180
    while "decode-hang: decode-" not in run.log:
        assert run.process.poll() is None, run.log
        assert time.monotonic() < deadline, run.log
        time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130, run.log
    assert "Broken off" in run.out
    assert [row["fault"] for row in run.rows] == ["none"]
    assert not json.loads((run.folder / "card.json").read_text())["good"]
    (kept,) = run.folder.glob("pdserve-chaos-*")
    assert str(kept) in run.log
    assert run.processes() == []
