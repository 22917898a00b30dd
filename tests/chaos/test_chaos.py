"""Simulated engines, two of each: every fault there is."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pdserve_bench.chaos.catalog import FAULTS
from pdserve_bench.simulated import simulated, write

from tests.chaos.command import Run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SHARES = (
    (4, "kill,garbage,nats-cut,etcd-cut,mixed,state,keys"),
    (4, "prefill-hang,decode-hang,nats-hang,etcd-hang,lose,drain,all-prefill-hang,poison,disk,unread"),
    (30, "frontend-hang,prefill-cut,prefill-without-nats,decode-cut,frontend-cut,clock,start,serve"),
)
"""of graphs that are broken side by side, because each row is mostly waiting: `write-timeout`, to be longer than
a frontend is away, and the faults. 200 unread streams take all of a small machine: they come when the other graphs are
nearly through"""


def _file(folder: Path, write_timeout: int) -> Path:
    sections = simulated(
        decode={"max-prefill-queue-size": 4},
        frontend={"write-timeout": write_timeout},
        graph={"drain-timeout": 5},
        common={"num-gpu-blocks-override": 3000},
    )
    return write(sections, folder / f"sim-{write_timeout}.yaml")


def test_no_fault_drops_anything(tmp_path: Path, chaos: Callable[..., Run]) -> None:
    runs = [
        chaos(_file(tmp_path, write_timeout), "--only", share, "--seconds", "3", "--hold", "11")
        for write_timeout, share in SHARES
    ]
    rows = [row for run in runs for row in run.good()]
    assert sorted(row["fault"] for row in rows) == sorted(fault.name for fault in FAULTS)
