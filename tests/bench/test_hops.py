"""Each hop's benchmark once, small, on the real parts; and what its figures are made of."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from pdserve_bench.hops import frontend, stream
from pdserve_bench.hops.command import HOPS, choose
from pdserve_bench.hops.frontend_load import RAMP, step_seconds, tokens_needed
from pdserve_bench.hops.section import HopOptions, Pair, spread
from pdserve_bench.hops.stream_ends import SIZES
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Report, Rows

from pdserve.cli import main
from pdserve.errors import ConfigError


async def last(sections: AsyncIterator[Report]) -> Report:
    found = [section async for section in sections]
    assert found, "a section after each round"
    return found[-1]


def column(rows: Rows, name: str) -> list[float]:
    place = [column.name for column in rows.columns].index(name)
    cells = [row[place] for row in rows.rows]
    assert all(isinstance(cell, int | float) for cell in cells), f"{name}: {cells}"
    return [float(cell) for cell in cells if cell is not None and not isinstance(cell, str)]


def figures(table: Rows) -> list[float]:
    """All numbers of a table, but for spreads, of which a single round has none."""
    names = [each.name for each in table.columns if each.numeric and "±" not in each.name]
    return [cell for name in names for cell in column(table, name)]


# ── each hop ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_stream(tmp_path: Path) -> None:
    options = HopOptions(tmp_path, seconds=0.6, rounds=2)
    with Schedule(stream.phases(options)) as schedule:
        section = await last(stream.measure(options, schedule))
        assert schedule.seconds_left == 0, "every phase that was announced was gone through"
    round_trips, _ = section.tables
    assert [row[0] for row in round_trips.rows] == list(SIZES)
    assert all(figure > 0 for table in section.tables for figure in figures(table))
    turns = section.data["turns"]
    assert len(turns) == 2 * 2 * 2 * len(SIZES), "both, both ways, in each round"
    assert all(turn["messages"] % turn["burst"] == 0 and turn["messages"] > 0 for turn in turns)
    assert all(turn["p50"] <= turn["p99"] <= turn["seconds"] for turn in turns)
    assert all(turn["frontend_cpu"] + turn["worker_cpu"] <= 2 * turn["seconds"] + 0.5 for turn in turns)
    sent_first = [turn["system"] for turn in turns[:: 2 * 2 * len(SIZES)]]
    assert sent_first == [stream.OURS, stream.BASELINE], "the order alternates"


async def test_frontend(tmp_path: Path) -> None:
    options = HopOptions(tmp_path, seconds=0.8, rounds=1)
    loads = {"levels": (1, 4), "clients": (2,)}
    with Schedule(frontend.phases(options, **loads)) as schedule:
        section = await last(frontend.measure(options, schedule, **loads))
        assert schedule.seconds_left == 0
    streams, requests = section.data["streams"], section.data["requests"]
    both = [frontend.OURS, frontend.BASELINE]
    assert [(turn["load"], turn["system"]) for turn in streams] == [
        (load, name) for load in (1, 4) for name in both
    ]
    for turn in streams:
        assert turn["failed"] == 0, turn["error"]
        assert 0 < turn["tokens"] < turn["load"] * tokens_needed(turn["load"], options.seconds), (
            "no stream ended"
        )
        assert turn["chunks"] <= turn["tokens"]
    for turn in requests:
        assert turn["failed"] == 0, turn["error"]
        assert turn["tokens"] == turn["requests"] > 0
    assert {"frontend", "decode", "nats-server", "etcd", "supervisor"} <= streams[0]["cpu"].keys()
    per_token, processes, per_request = section.tables
    assert all(figure > 0 for table in (per_token, per_request) for figure in figures(table))
    assert column(processes, "frontend, us") == column(per_token, "pdserve, us")


# ── what figures are made of ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("streams", [1, 32, 128, 1000])
@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_no_stream_ends_within_its_window(streams: int, seconds: float) -> None:
    """Step by step: the first stream has the engine to itself until the others have begun."""
    now, tokens = 0.0, 0
    while now < streams / RAMP + seconds + 3:
        now += step_seconds(min(streams, 1 + int(now * RAMP)))
        tokens += 1
    assert tokens < tokens_needed(streams, seconds) < 3 * tokens + 500


def test_a_pair_that_was_broken_off() -> None:
    """Ratios are of the rounds that have both."""
    assert Pair([2.0, 3.0, 9.0], [1.0, 2.0]).cells() == [3.0, pytest.approx(50 * 7 / 3), 1.5, 1.75]
    assert Pair([2.0], []).cells() == [2.0, None, None, None]


def test_spread_is_half_of_the_range() -> None:
    assert spread([90.0, 100.0, 110.0]) == pytest.approx(10)
    assert math.isnan(spread([5.0])), "one round says nothing of the noise"
    assert spread([0.0, 0.0]) == 0


# ── the command ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("only", "expected"),
    [("", list(HOPS)), ("stream, frontend", ["frontend", "stream"]), ("stream,stream", ["stream"])],
)
def test_only(only: str, expected: list[str]) -> None:
    assert choose(only) == expected


def test_an_unknown_hop_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ConfigError, match="--only streem: the hops are frontend, stream"):
        choose("frontend,streem")


def test_all_of_it_takes_some_minutes(tmp_path: Path) -> None:
    modules = [import_module(path) for path in HOPS.values()]
    assert sum(sum(hop.phases(HopOptions(tmp_path)).values()) for hop in modules) < 6 * 60


def test_wrong_options_end_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hops", "--only", "nothing"]) == 2
    assert main(["bench", "hops", "--json", "/nowhere/x.json"]) == 2
    assert main(["bench", "hops", "--rounds", "0"]) == 2
    assert "there is no folder /nowhere" in capsys.readouterr().err


def test_broken_off_it_shows_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "hops.json"
    command = [sys.executable, "-m", "pdserve", "bench", "hops", "--only", "stream", "--seconds", "2"]
    with subprocess.Popen(
        [*command, "--rounds", "99", "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stderr is not None
        while "128 requests, round 1" not in (line := process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stream: round trip" in output
    assert "Broken off" in output
    assert '"complete": false' in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["hops.json"], "nothing is left behind"
    assert not [
        left
        for left in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(left.info["cmdline"] or ())
    ]
