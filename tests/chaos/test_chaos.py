"""Simulated engines, two of each: every fault there is."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.chaos.faults import FAULTS
from tests.chaos.command import Run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

YAML = """
Common: {model: demo, block-size: 32, max-model-len: 4096, num-gpu-blocks-override: 600}
Graph: {drain-timeout: 5}
Frontend: {served_model_name: demo}
VllmWorker:
  engine: sim
  remote-prefill: true
  max-local-prefill-length: 64
  max-prefill-queue-size: 4
  common-configs: [model, block-size, max-model-len, num-gpu-blocks-override]
PrefillWorker:
  engine: sim
  common-configs: [model, block-size, max-model-len, num-gpu-blocks-override]
"""
SHARES = ("kill,lose,drain,nats-cut,etcd-cut", "hang,prefill-cut,decode-cut,frontend-cut")
"""of two graphs that are broken side by side, because each row is mostly waiting"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sim.yaml"
    path.write_text(YAML)
    return path


def test_whatever_breaks_nothing_is_dropped(file: Path, chaos: Callable[..., Run]) -> None:
    runs = [chaos(file, "--only", share, "--seconds", "3", "--hold", "11") for share in SHARES]
    rows = [row for run in runs for row in run.good()]
    assert sorted(row["fault"] for row in rows) == sorted(fault.name for fault in FAULTS)


def test_told_to_stop_in_the_middle_it_leaves_nothing(file: Path, chaos: Callable[..., Run]) -> None:
    """And shows the rows that it has, keeps the logs, and says that this is not all."""
    run = chaos(file, "--only", "decode-hang", "--hold", "200", "--seconds", "3")
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
