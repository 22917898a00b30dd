"""From what clients saw to the verdict, by tables."""

import json
from dataclasses import replace

import pytest
from pdserve_bench.chaos.cases import Case
from pdserve_bench.chaos.client import Exchange
from pdserve_bench.chaos.score import Leftovers, Row, as_json, passed, percentile, score
from pdserve_bench.chaos.verdict import Result, Seen, Trace, trace


@pytest.mark.parametrize(
    ("values", "share", "value"),
    [
        ([], 0.99, 0.0),
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0], 0.5, 1.0),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 1001)), 0.99, 990),
        ([9.0, 1.0, 5.0], 1.0, 9.0),
    ],
)
def test_percentile(values: list[float], share: float, value: float) -> None:
    assert percentile(values, share) == value


def _trace(result: Result, error: str = "") -> Trace:
    one = Exchange(Case((1, 2), 3, True, (5, 6, 7)), tokens=[5, 9], error=error)
    return trace(one, result, "decode-kill", 0.0)


def test_a_row_counts() -> None:
    seen = [
        Seen(Result.OK, 0.1),
        Seen(Result.OK, None),
        Seen(Result.FAILED, 0.4, _trace(Result.FAILED, "HTTP 503")),
        Seen(Result.FAILED, 0.3, _trace(Result.FAILED, "HTTP 503")),
        Seen(Result.HUNG, 60.0, _trace(Result.HUNG, "no end"), "chaos-slow"),
        Seen(Result.WRONG, 0.1, _trace(Result.WRONG)),
        Seen(Result.APART, 0.2),
    ]
    row = score("decode-kill", "decode-0-ab", seen, 2.5, Leftovers({"prefill-0": 3, "decode-1": 1}, 2, 40.0))
    assert row == Row(
        "decode-kill",
        "decode-0-ab",
        requests=7,
        failed=2,
        hung=1,
        wrong=1,
        apart=1,
        p99_pause=60.0,
        slowest="chaos-slow",
        recovered=2.5,
        leaked=4,
        queued=2,
        freed=40.0,
        errors=("2 x HTTP 503", "1 x no end"),
        held={"prefill-0": 3, "decode-1": 1},
        traces=tuple(one.trace for one in seen if one.trace),
    )
    card = json.loads(as_json([row], complete=True))
    assert not card["good"]
    assert card["complete"]
    assert card["rows"][0]["traces"][-1]["got"] == [5, 9]
    assert len(card["rows"][0]["traces"]) == 4


GOOD = Row("etcd-kill", "etcd", requests=10, recovered=1.0)


@pytest.mark.parametrize(
    ("row", "good"),
    [
        (GOOD, True),
        (replace(GOOD, apart=3), True),
        (replace(GOOD, p99_pause=30.0, freed=31.0), True),
        (replace(GOOD, failed=1), False),
        (replace(GOOD, hung=1), False),
        (replace(GOOD, wrong=1), False),
        (replace(GOOD, leaked=1), False),
        (replace(GOOD, queued=1), False),
        (replace(GOOD, recovered=None), False),
        (replace(GOOD, amiss=("2 processes outlived serve",)), False),
        (replace(GOOD, requests=0), False),  # nothing was tested
        (Row("prefill-cut", skipped="needs root"), True),
    ],
)
def test_verdict(row: Row, good: bool) -> None:
    assert row.good is good
    assert passed([GOOD, row]) is good
    assert json.loads(as_json([GOOD, row], complete=True))["good"] is good
    assert json.loads(as_json([GOOD, row], complete=False))["good"] is False


def test_nothing_tried_is_nothing_passed() -> None:
    assert not passed([])
    assert not passed([Row("none", requests=10, recovered=0.0), Row("etcd-cut", skipped="needs root")])
