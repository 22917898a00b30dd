"""The last release, replaced by this build while clients ask: `python -m pdserve_bench.upgrade` has the way back, too,
and real engines."""

from pathlib import Path

import pytest
from pdserve_bench.launch import SIM_SPEED
from pdserve_bench.simulated import simulated, write
from pdserve_bench.upgrade import ROOT, build_of, upgrade

from pdserve.errors import Unavailable
from tools import wire


async def test_process_by_process_no_request_is_lost(tmp_path: Path) -> None:
    try:
        released = build_of((wire.released() / wire.COMMIT).read_text().strip(), tmp_path / "released")
    except Unavailable as lacking:
        pytest.skip(str(lacking))
    file = write(simulated(SIM_SPEED["sim"]), tmp_path / "sim.yaml")
    (row,) = await upgrade(file, released, [ROOT], tmp_path, print)
    assert row.good, [*row.traces, *row.amiss, row.held]
    assert row.requests > 20
