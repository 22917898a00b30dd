"""Some faults of `pdserve chaos --clusters`: three NATS, three etcd, simulated engines."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pdserve_bench.graphs.simulated import simulated, write

from tests.chaos.command import Run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SHORT = "etcd-leader-cut,nats-majority"


def test_lost_members_of_clusters_drop_nothing(tmp_path: Path, chaos: Callable[..., Run]) -> None:
    file = write(simulated(common={"num-gpu-blocks-override": 3000}), tmp_path / "sim.yaml")
    run = chaos(file, "--clusters", "--only", SHORT, "--workers", "1", "--seconds", "1", "--hold", "3")
    assert [row["fault"] for row in run.good()] == SHORT.split(",")
