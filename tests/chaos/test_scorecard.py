"""What a user reads."""

from dataclasses import replace
from io import StringIO

import pytest
from pdserve_bench.chaos.score import Row
from pdserve_bench.chaos.scorecard import line, scorecard, verdict
from rich.console import Console

CALM = Row("none", requests=10, recovered=0.0)
GOOD = Row("etcd-kill", "etcd", requests=20, p99_pause=0.5, slowest="chaos-a", recovered=1.0, freed=0.3)
BAD = replace(GOOD, fault="nats-cut", failed=2, wrong=1, leaked=7, recovered=None)
SKIPPED = Row("decode-cut", skipped="needs root")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (GOOD, "etcd-kill: ok: 20 requests, p99 pause 0.50 s (longest: chaos-a), KV free after 0.3 s"),
        (
            BAD,
            "nats-cut: NOT GOOD: 20 requests, 2 failed, 1 wrong, 7 blocks leaked, p99 pause 0.50 s "
            "(longest: chaos-a), KV free after 0.3 s",
        ),
        (SKIPPED, "decode-cut: skipped"),
    ],
)
def test_a_line(row: Row, told: str) -> None:
    assert line(row) == told


@pytest.mark.parametrize(
    ("rows", "complete", "told"),
    [
        ([CALM, GOOD], True, "1 faults, 30 requests: nothing dropped."),
        ([CALM, GOOD, BAD], True, "2 faults, 50 requests: NOT GOOD: nats-cut."),
        ([CALM, SKIPPED], True, "decode-cut skipped: needs root\nNo fault was tried."),
        (
            [CALM],
            False,
            "No fault was tried.\nBroken off: not all faults were tried.",
        ),
    ],
)
def test_the_verdict(rows: list[Row], complete: bool, told: str) -> None:
    assert verdict(rows, complete) == told


def test_the_table() -> None:
    console = Console(width=110, record=True, file=StringIO())
    console.print(scorecard([CALM, GOOD, BAD, SKIPPED]))
    rows = {words[0]: words[1:] for text in console.export_text().splitlines() if (words := text.split())}
    assert rows["etcd-kill"] == ["20", "0", "0", "0", "0.50", "s", "1.0", "s", "0.3", "s", "0"]
    assert rows["nats-cut"] == ["20", "2", "0", "1", "0.50", "s", "never", "0.3", "s", "7", "BAD"]
    assert rows["decode-cut"] == ["skipped"]
