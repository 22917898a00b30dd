"""Simulated engines, two of each: every fault there is."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pdserve_bench.chaos.catalog import FAULTS

from tests.chaos.command import Run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

YAML = """
Common: {model: demo, block-size: 32, max-model-len: 4096, num-gpu-blocks-override: 3000}
Graph: {drain-timeout: 5}
Frontend: {served_model_name: demo, write-timeout: %s}
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
SHARES = (
    (
        4,
        "prefill-kill,decode-kill,nats-kill,etcd-kill,all-prefill-kill,all-decode-kill,nats-cut,etcd-cut,mixed",
    ),
    (4, "prefill-hang,decode-hang,nats-hang,etcd-hang,lose,rolling,all-prefill-hang,unread,disk"),
    (30, "frontend-hang,frontend-cut,frontend-kill,frontend-drain,clock-prefill,clock-decode,garbage"),
    (30, "prefill-cut,decode-cut,poison,start,clock-frontend,serve"),
)
"""of graphs that are broken side by side, because each row is mostly waiting: `write-timeout`, to be longer than
a frontend is away, and the faults"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return _file(tmp_path, 30)


def _file(folder: Path, write_timeout: int) -> Path:
    path = folder / f"sim-{write_timeout}.yaml"
    path.write_text(YAML % write_timeout)
    return path


def test_whatever_breaks_nothing_is_dropped(tmp_path: Path, chaos: Callable[..., Run]) -> None:
    runs = [
        chaos(_file(tmp_path, write_timeout), "--only", share, "--seconds", "3", "--hold", "11")
        for write_timeout, share in SHARES
    ]
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
