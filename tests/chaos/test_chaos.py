"""Simulated engines, two of each: every fault there is."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pdserve_bench.chaos.catalog import FAULTS
from pdserve_bench.simulated import simulated, write

from tests.chaos.command import Run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

SHARES = (
    (4, "kill,garbage,nats-cut,etcd-cut,mixed,state,keys"),
    (4, "prefill-hang,decode-hang,nats-hang,etcd-hang,lose,drain,all-prefill-hang,poison,disk,unread,batch"),
    (30, "frontend-hang,prefill-cut,prefill-without-nats,decode-cut,frontend-cut,clock,start,serve"),
)
"""of graphs that are broken side by side, because each row is mostly waiting: `write-timeout`, to be longer than
a frontend is away, and the faults. 200 unread streams take all of a small machine: they come when the other graphs are
nearly through"""


APART = {
    "adapter-unload",
    "picture-kill",
    "draft-kill",
    "offload-decode-kill",
    "offload-prefill-kill",
    "rank-kill",
}
"""need adapters (tests/frontend/model/test_adapters.py unloads them under load), a model for pictures, real engines"""
BETWEEN_HOSTS = (
    "servers-link-cut-10s",
    "decode-link-cut-10s",
    "loss-1%",
    "delay-50ms",
    "clock",
    "decode-host-restart",
)
"""the short form of `pdserve chaos --hosts`; what vanishes or is cut for longer is tried by that command"""


def _file(folder: Path, write_timeout: int) -> Path:
    sections = simulated(
        decode={"max-prefill-queue-size": 4},
        frontend={"write-timeout": write_timeout},
        graph={"drain-timeout": 5},
        common={"num-gpu-blocks-override": 3000},
    )
    return write(sections, folder / f"sim-{write_timeout}.yaml")


def test_no_fault_drops_anything(tmp_path: Path, chaos: Callable[..., Run], may_have_hosts: bool) -> None:
    """Nor does one between hosts, where this machine can have them (tests/bench/test_hosts.py says why not)."""
    options = ("--hosts", "--only", ",".join(BETWEEN_HOSTS), "--seconds", "3", "--hold", "5")
    between = [chaos(_file(tmp_path, 10), *options)] if may_have_hosts else []
    runs = [
        chaos(_file(tmp_path, write_timeout), "--only", share, "--seconds", "3", "--hold", "11")
        for write_timeout, share in SHARES
    ]
    rows = [row for run in runs for row in run.good()]
    assert sorted(row["fault"] for row in rows) == sorted({fault.name for fault in FAULTS} - APART)
    assert [[row["fault"] for row in run.good()] for run in between] in ([], [list(BETWEEN_HOSTS)])
