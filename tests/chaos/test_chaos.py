"""Every fault except those in `APART`, on two simulated workers of each role."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pdserve_bench.chaos.catalog import FAULTS
from pdserve_bench.graphs.simulated import simulated, write

from tests.chaos.command import Run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

SHARES = (
    (4, "kill,garbage,nats-cut,etcd-cut,mixed,state,keys"),
    (
        4,
        "core-hang,prefill-hang,decode-hang,nats-hang,etcd-hang,damage,drain,all-prefill-hang,poison,disk,unread,batch",
    ),
    (30, "frontend-hang,prefill-cut,prefill-without-nats,decode-cut,frontend-cut,clock,start,serve"),
    (30, "pause"),
)
"""For each graph: its `write-timeout` in seconds, and its faults. `unread` comes late, when the graph beside it is
nearly done, because its 200 streams fill a small machine."""
AT_A_TIME = 2
"""Number of graphs tested at the same time. More would starve each other on slow machines."""

APART = {
    "adapter-unload",
    "image-kill",
    "draft-kill",
    "offload-decode-kill",
    "offload-prefill-kill",
    "rank-kill",
    "prefill-core-kill",
    "decode-core-kill",
    "all-decode-core-kill",
}
"""Faults not tested here, because they need adapters (test_lora_adapters.py unloads them under load), a model for
images, or real engines."""
ALONE = ["prefill-kill", "decode-kill", "nats-kill", "etcd-kill", "decode-hang", "etcd-hang", "rolling"]
BETWEEN_HOSTS = (
    "servers-link-cut-10s",
    "decode-link-cut-10s",
    "loss-1%",
    "delay-50ms",
    "clock",
    "decode-host-restart",
)
"""Short faults of `pdserve chaos --hosts`; the long ones are left to runs by hand."""


def _file(folder: Path, write_timeout: int) -> Path:
    sections = simulated(
        decode={"max-prefill-queue-size": 4},
        frontend={"write-timeout": write_timeout},
        graph={"drain-timeout": 5},
        common={"num-gpu-blocks-override": 3000},
    )
    return write(sections, folder / f"sim-{write_timeout}.yaml")


def test_no_fault_drops_anything(tmp_path: Path, chaos: Callable[..., Run], may_have_hosts: bool) -> None:
    """Faults between hosts are included where simulated hosts are permitted."""
    between = (10, ("--hosts", "--only", ",".join(BETWEEN_HOSTS), "--hold", "5"))
    shares = [(write_timeout, ("--only", share, "--hold", "11")) for write_timeout, share in SHARES]
    asked, found = [*shares, between] if may_have_hosts else shares, list[list[str]]()
    for first in range(0, len(asked), AT_A_TIME):
        runs = [
            chaos(_file(tmp_path, write_timeout), "--seconds", "3", *options)
            for write_timeout, options in asked[first : first + AT_A_TIME]
        ]
        found += [[row["fault"] for row in run.good()] for run in runs]
    everywhere = [fault for faults in found[: len(SHARES)] for fault in faults]
    assert sorted(everywhere) == sorted({fault.name for fault in FAULTS} - APART)
    assert found[len(SHARES) :] in ([], [list(BETWEEN_HOSTS)])


def test_no_fault_drops_anything_of_roles_without_serve(tmp_path: Path, chaos: Callable[..., Run]) -> None:
    """The chaos command restarts each role, as systemd would."""
    run = chaos(_file(tmp_path, 4), "--alone", "--only", ",".join(ALONE), "--seconds", "3", "--hold", "11")
    assert [row["fault"] for row in run.good()] == ALONE
