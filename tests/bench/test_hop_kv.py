"""The KV hop: figures that agree with each other, bytes that are compared, a link that limits, nothing left behind."""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from pdserve_bench.hops import kv
from pdserve_bench.hops.kv_ends import Connect, Lent, PullBlocks
from pdserve_bench.hops.kv_pair import kv_pair
from pdserve_bench.hops.link import bits_per_second
from pdserve_bench.hops.section import HopOptions
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Cell, Report, Rows

from pdserve.errors import ConfigError
from pdserve.kv.pool import PoolShape
from tests.conditions import until

TINY = kv.KvLayout("tiny", 2, 16 << 10)
PLAN = kv.KvPlan((TINY,), (1e5, 1e6), (4,), 1e5, TINY, (1e6,), 2.5e5)
SHAPE = TINY.pool(122)
LINK = "200mbit"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Report:
    options = HopOptions(tmp_path_factory.mktemp("kv"), seconds=1.2, rounds=2, link=LINK)
    schedule = Schedule(dict(kv.phases(options, PLAN)))

    async def measure() -> list[Report]:
        return [each async for each in kv.measure(options, schedule, PLAN)]

    found = asyncio.run(measure())
    assert [len(each.tables) for each in found][:2] == [3, 3]
    assert schedule.seconds_left == 0
    assert _children() == []
    return found[-1]


def _column(rows: Rows, name: str) -> list[Cell]:
    place = [column.name for column in rows.columns].index(name)
    return [row[place] for row in rows.rows]


def _children(of: int | None = None) -> list[psutil.Process]:
    """Those that hold namespaces, and those that move KV."""
    found = psutil.Process(of).children(recursive=True)
    return [each for each in found if {"cat", "pdserve_bench.hops.kv_ends"} & set(each.cmdline())]


def _others(processes: list[psutil.Process]) -> set[str]:
    """Network namespaces of theirs that are not ours."""
    assert len(processes) == 4
    return {_namespace(process) for process in processes} - {_namespace(psutil.Process())}


def _namespace(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/ns/net").readlink().name


def _inhabited() -> set[str]:
    """Network namespaces in which there is a process: the others are gone, but for those that have a name."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            found.add(_namespace(process))
    return found


async def test_figures_agree_with_each_other(measured: Report) -> None:
    speed, smallest, crowd = measured.tables[:3]
    assert _column(speed, "pieces") == [6, 62]
    assert _column(smallest, "kB each")[0] == pytest.approx(32.8, abs=0.1)
    assert all(isinstance(cell, float) and 0 < cell <= 1 for cell in _column(crowd, "slowest/fastest"))
    rounds = {
        (each["size"], each["kind"]): each["rounds"]
        for each in measured.data["figures"]
        if not each["over_link"] and each["in_flight"] == 1 and not each["smallest"]
    }
    assert all(len(figures) == 2 for figures in rounds.values())
    for (size, _), figures in rounds.items():
        assert all(each["rate"] * each["median"] == pytest.approx(size) for each in figures)
        assert all(each["transfers"] >= 1 and each["p99"] >= each["median"] for each in figures)
        assert all(0 < each["rate"] < 200e9 and each["reader_cpu"] > 0 for each in figures)
    for size, rate, milliseconds in zip(
        (98304, 1015808), _column(speed, "GB/s"), _column(speed, "ms p50"), strict=True
    ):
        assert rate == pytest.approx(statistics.median(each["rate"] for each in rounds[size, "KV"]) / 1e9)
        medians = [each["median"] for each in rounds[size, "KV"]]
        assert milliseconds == pytest.approx(statistics.median(medians) * 1e3)
    ratio = statistics.median(
        ours["rate"] / copy["rate"]
        for ours, copy in zip(rounds[1015808, "KV"], rounds[1015808, "copy"], strict=True)
    )
    assert _column(speed, "of copy")[1] == pytest.approx(ratio)
    assert f"{ratio:.2g} of the speed of a copy" in measured.lead
    json.dumps(measured.data)


async def test_the_link_limits(measured: Report) -> None:
    if len(measured.tables) == 3:
        pytest.skip(measured.notes[-1])
    for each in measured.data["figures"]:
        if each["over_link"] and not each["smallest"]:
            rates = [figure["rate"] * 8 for figure in each["rounds"]]
            assert 100e6 < max(rates) < 200e6, each
    share = _column(measured.tables[-1], "% of line")[0]
    assert f"over {LINK} at {share:.0f} % of the line" in measured.lead


async def test_a_load_may_be_longer_than_any_other_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each of many in flight has blocks of its own in a pool for as many."""
    async with kv_pair(TINY.pool(64), 1) as pair:
        monkeypatch.setattr("pdserve_bench.hops.ends.PATIENCE", 3.0)
        assert (await pair.measure(PullBlocks(1, 4.0, 64))).taken.wall > 4.0


async def test_wrong_bytes_are_noticed() -> None:
    """Told that the lender's pool is another one than it is, the borrower expects other words than arrive."""

    def end(part: str, shape: PoolShape) -> subprocess.Popen[bytes]:
        argv = (sys.executable, "-m", "pdserve_bench.hops.kv_ends", part)
        rest = (msgspec.json.encode(shape).decode(), "127.0.0.1", "1")
        pipe = subprocess.PIPE
        return subprocess.Popen((*argv, *rest), stdin=pipe, stdout=pipe, stderr=pipe)

    lender = end("lend", SHAPE)
    borrower = end("borrow", PoolShape(SHAPE.layers, SHAPE.blocks + 1, SHAPE.block_bytes))
    try:
        assert lender.stdout is not None
        lent = msgspec.json.decode(await asyncio.to_thread(lender.stdout.readline), type=Lent)
        command = msgspec.json.encode(Connect(lent, "127.0.0.1")) + b"\n"
        _, said = await asyncio.to_thread(borrower.communicate, command, 60)
    finally:
        for process in (lender, borrower):
            process.kill()
            process.communicate()
    assert borrower.returncode == 1
    assert b"are not those that were read" in said


HELD = f"""
import asyncio
from pdserve.kv.pool import PoolShape
from pdserve_bench.hops.kv_pair import kv_pair
from pdserve_bench.hops.link import NoNamespaces, shaped_link

async def work():
    try:
        async with shaped_link(1e9) as link, kv_pair({SHAPE!r}, 1, link):
            print("held", flush=True)
            await asyncio.sleep(60)
    except NoNamespaces as error:
        print(error, flush=True)

asyncio.run(work())
"""


async def test_nothing_is_left_after_a_kill() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HELD, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if (said := await process.stdout.readline()) != b"held\n":
            pytest.skip(said.decode())
        made = _others(_children(process.pid))
        assert len(made) == 2
    finally:
        process.kill()
        await process.wait()
    await until(lambda: not made & _inhabited(), within=20.0)


@pytest.mark.parametrize(("text", "rate"), [("200mbit", 200e6), ("1gbit", 1e9), ("2.5Gbit", 2.5e9)])
def test_rates(text: str, rate: float) -> None:
    assert bits_per_second(text) == rate


@pytest.mark.parametrize("text", ["", "0mbit", "fast", "100", "1gb", "-1gbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError, match="--link"):
        bits_per_second(text)
