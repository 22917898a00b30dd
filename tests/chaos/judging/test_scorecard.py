"""The scorecard: rows of judged requests, the verdict, and how both are printed."""

import json
from dataclasses import replace

import msgspec
import pytest
from pdserve_bench.chaos.judge import AttemptTrace, Judgement, Seen, trace
from pdserve_bench.chaos.questions import Attempt, Case
from pdserve_bench.chaos.scorecard import COLUMNS, Row, as_json, cells, line, passed, score, verdict
from pdserve_bench.graphs.watch import GraphWatch, Leftovers

from pdserve.contract.messages import Load
from pdserve.contract.records import Instance, Role
from pdserve.contract.reports import ProcessReport
from pdserve.observe.process_pages import serve_pages
from pdserve.registry import keys
from tests.memory.registry import MemoryRegistry, MemoryServer


def _trace(result: Judgement, error: str = "") -> AttemptTrace:
    attempt = Attempt(case=Case((1, 2), 3, True, (5, 6, 7)), tokens=[5, 9], error=error)
    return trace(attempt, result, "decode-kill", 0.0)


def test_a_row_counts_judgements_and_leftovers() -> None:
    seen = [
        Seen(Judgement.OK, 0.1),
        Seen(Judgement.OK, None),
        Seen(Judgement.FAILED, 0.4, _trace(Judgement.FAILED, "HTTP 503")),
        Seen(Judgement.FAILED, 0.3, _trace(Judgement.FAILED, "HTTP 503")),
        Seen(Judgement.HUNG, 60.0, _trace(Judgement.HUNG, "no end"), "chaos-slow"),
        Seen(Judgement.WRONG, 0.1, _trace(Judgement.WRONG)),
        Seen(Judgement.APART, 0.2),
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
        traces=tuple(request.trace for request in seen if request.trace),
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
def test_a_row_is_good_or_not(row: Row, good: bool) -> None:
    assert row.good is good
    assert passed([GOOD, row]) is good
    assert json.loads(as_json([GOOD, row], complete=True))["good"] is good
    assert json.loads(as_json([GOOD, row], complete=False))["good"] is False


def test_a_run_without_faults_has_not_passed() -> None:
    assert not passed([])
    assert not passed([Row("none", requests=10, recovered=0.0), Row("etcd-cut", skipped="needs root")])


async def test_remaining_requests_and_missing_workers_are_reported() -> None:
    watch = GraphWatch()
    with serve_pages("127.0.0.1") as page:
        page.watched = lambda: ProcessReport(Load(running=2, waiting=5))
        async with MemoryRegistry(MemoryServer()) as watch.registry:
            workers = [Instance(f"decode-{n}", Role.DECODE, metrics=page.metrics) for n in range(2)]
            for worker in workers:
                await watch.registry.put(keys.instance(worker), msgspec.json.encode(worker))
            await watch.learn()
            await watch.registry.delete(keys.instance(workers[1]))
            left = await watch.leftovers(0.0)
            await watch.registry.delete(keys.instance(workers[0]))
            nothing = await watch.leftovers(0.0)
    assert left.amiss == ("decode-0 has 2 running and 5 waiting requests", "missing: 1 decode")
    assert nothing.amiss == ("missing: 2 decode",)
    assert not score("etcd-kill", "etcd", [Seen(Judgement.OK)], 1.0, nothing).good


# how rows are shown

NO_FAULT = Row("none", requests=10, recovered=0.0)
ETCD = Row("etcd-kill", "etcd", requests=20, p99_pause=0.5, slowest="chaos-a", recovered=1.0, freed=0.3)
BAD = replace(ETCD, fault="nats-cut", failed=2, wrong=1, leaked=7, recovered=None)
SKIPPED = Row("decode-cut", skipped="needs root")


def test_a_line_has_the_figures_above_zero() -> None:
    assert line(SKIPPED) == "decode-cut: skipped"
    assert line(BAD) == (
        "nats-cut: requests 20, failed 2, wrong 1, p99 pause 0.50 s, recovered never, freed 0.3 s, leaked 7, BAD "
        "(longest: chaos-a)"
    )
    assert cells(BAD)[:4] == ("nats-cut", "20", "2", "0")
    assert len(cells(SKIPPED)) == len(cells(BAD)) == len(COLUMNS)


@pytest.mark.parametrize(
    ("rows", "complete", "told"),
    [
        ([NO_FAULT, ETCD], True, "1 faults, 30 requests: nothing dropped."),
        ([NO_FAULT, ETCD, BAD], True, "2 faults, 50 requests: NOT GOOD: nats-cut."),
        ([NO_FAULT, SKIPPED], True, "decode-cut skipped: needs root\nNo fault was tried."),
        ([NO_FAULT], False, "No fault was tried.\nBroken off: not all faults were tried."),
    ],
)
def test_the_verdict(rows: list[Row], complete: bool, told: str) -> None:
    assert verdict(rows, complete) == told
