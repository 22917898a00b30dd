"""Each hop's benchmark once, small, on the real parts; and what its figures are made of."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from pdserve_bench.hops import frontend, stream
from pdserve_bench.hops.frontend import RAMP, step_seconds, tokens_needed
from pdserve_bench.hops.turns import HopOptions, HopTurn, section, spread
from pdserve_bench.report import Report


async def _last(sections: AsyncIterator[Report]) -> Report:
    *_, last = [section async for section in sections]
    assert all(isinstance(cell, int | float) and cell > 0 for row in last.tables[0].rows for cell in row)
    return last


async def test_the_stream_is_measured_beside_bare_tcp(tmp_path: Path) -> None:
    options = HopOptions(tmp_path, seconds=0.6, rounds=2)
    report = await _last(stream.measure(options))
    assert [row[0] for row in report.tables[0].rows] == list(stream.SIZES)
    systems = [turn["system"] for turn in report.data["turns"]]
    assert systems == [*stream.NAMES, *stream.NAMES[::-1]] * len(stream.SIZES), "the order alternates"
    assert "Stream: the outputs of 128 requests cost both sides" in report.lead


async def test_the_frontend_is_measured_beside_vllms_app(tmp_path: Path) -> None:
    options = HopOptions(tmp_path, seconds=0.8, rounds=2)
    report = await _last(frontend.measure(options, (4,)))
    turns = report.data["turns"]
    assert [turn["system"] for turn in turns] == [*frontend.NAMES, *frontend.NAMES[::-1]]
    for turn in turns:
        assert 0 < turn["figures"]["tokens"] < 4 * tokens_needed(4, options.seconds), "no stream ended"


@pytest.mark.parametrize("streams", [1, 32, 1000])
@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_no_stream_ends_within_its_window(streams: int, seconds: float) -> None:
    """Step by step: the first stream has the engine to itself until the others have begun."""
    now, tokens = 0.0, 0
    while now < streams / RAMP + seconds + 3:
        now += step_seconds(min(streams, 1 + int(now * RAMP)))
        tokens += 1
    assert tokens < tokens_needed(streams, seconds) < 3 * tokens + 500


def test_ratios_are_of_the_rounds_that_have_both() -> None:
    figures = {"ours": [2.0, 3.0, 9.0], "theirs": [1.0, 2.0]}
    turns = [HopTurn(name, 8, {"cost": figure}) for name, each in figures.items() for figure in each]
    alone = HopTurn("ours", 16, {"cost": 1.0})
    report = section([*turns, alone], ("ours", "theirs"), "title", "streams", "cost")
    assert report.tables[0].rows == [[8, 3.0, pytest.approx(50 * 7 / 3), 1.5, 1.75]]


def test_spread_is_half_of_the_range() -> None:
    assert spread([90.0, 100.0, 110.0]) == pytest.approx(10)
    assert math.isnan(spread([5.0])), "one round says nothing of the noise"


def test_broken_off_it_shows_what_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdserve", "bench", "hops", "--only", "stream", "--rounds", "99"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stderr is not None
        while "1 request, round 3" not in (line := process.stderr.readline()):
            assert line, "it ended"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stream: CPU for each message" in output
    assert "Broken off" in output
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert len(children) >= 2
    assert psutil.wait_procs(children, 10)[1] == []
