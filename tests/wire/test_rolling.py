"""Under load, this build replaces the last release, and the release then replaces this build."""

from pathlib import Path

import pytest
from pdserve_bench.graphs.launch import SIM_SPEED
from pdserve_bench.graphs.simulated import simulated, write

from pdserve.util.errors import Unavailable
from tests.wire.rolling import ROOT, build_of, upgrade
from tools import wire


async def test_replacing_processes_one_by_one_loses_no_request(tmp_path: Path) -> None:
    try:
        released = build_of((wire.released() / wire.COMMIT).read_text().strip(), tmp_path / "released")
    except Unavailable as lacking:
        pytest.skip(str(lacking))
    speed = SIM_SPEED["sim"].copy()
    del speed["stop-signal"]  # the last release does not know this key
    file = write(simulated(speed), tmp_path / "sim.yaml")
    rows = await upgrade(file, released, [ROOT, released], tmp_path, print)
    assert len(rows) == 2
    for row in rows:
        assert row.good, [*row.traces, *row.amiss, row.held]
        assert row.requests > 20
