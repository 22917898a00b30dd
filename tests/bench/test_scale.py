"""The benchmark of many workers, with few of them; and its options and tables."""

from pathlib import Path

import pytest
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.goodput.measure import Probe
from pdserve_bench.options import rates_of
from pdserve_bench.progress import Schedule
from pdserve_bench.runs import LoadRun
from pdserve_bench.scale.graph import GraphSize
from pdserve_bench.scale.rates import PARTS, SLO, RatedLoad, ScaleRun, report_of
from pdserve_bench.slo import Tally

from pdserve.errors import ConfigError


async def test_a_small_graph_costs_what_its_requests_take(tmp_path: Path) -> None:
    found = ScaleRun(GraphSize(2, 3, frontends=2, servers=3), [6.0], 2.0)
    with Schedule() as schedule:
        await found.measure(tmp_path, schedule)
    (load,) = found.loads
    exchanges = load.probe.run.exchanges
    assert exchanges
    assert all(each.outcome is Outcome.FINISHED for each in exchanges)
    assert {each.prefill for each in exchanges} == {"remote"}
    assert load.spent["nats messages"] > len(exchanges)
    assert load.each("frontend") > 0 < load.each("workers")
    assert found.idle["etcd puts"] == load.spent["etcd puts"] / 2 == 0, "load goes another way"
    assert set(load.memory) == set(PARTS)
    assert load.memory["frontend"] > 200, "MiB of the processes that serve, not of those that watch them"
    report = report_of(found, True)
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    assert "1,000 requests/s take as many cores: " in report.lead


def _load(rate: float, ttft: float, cpu: float) -> RatedLoad:
    """100 requests, which took so much CPU of each part."""
    run = LoadRun([Exchange(started=1.0, arrivals=[1.0 + ttft], ended=2.0) for _ in range(100)])
    probe = Probe(rate, 1.0, 1, run, Tally.of(SLO, run.exchanges, 2.0))
    counts = {**dict.fromkeys(PARTS, cpu), "nats messages": 500.0}
    return RatedLoad(probe, counts, dict.fromkeys(PARTS, 10.0), 0.5)


def test_the_plan_is_the_idle_graph_and_what_requests_cost_at_the_highest_rate_that_is_carried() -> None:
    loads = [_load(10, 0.1, cpu=0.2), _load(20, 0.2, cpu=0.3), _load(40, 2.0, cpu=0.9)]
    idle, memory = dict.fromkeys(PARTS, 0.5), dict.fromkeys(PARTS, 1.0)
    found = ScaleRun(GraphSize(1, 1), [10, 20, 40], 1.0, 5.0, idle, memory, loads)
    report = report_of(found, True)
    assert "40 requests/s were too much (TTFT 100)" in report.lead
    assert "as many cores: 3.50 of frontend, " in report.lead, "0.5 idle, 3 s for 1,000 requests"
    assert [row[0] for row in report.tables[0].rows] == [10, 20, 40]


@pytest.mark.parametrize("text", ["ten", "10,", "0", "10,-2"])
def test_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="--rates"):
        rates_of("--rates", text)
    assert rates_of("--rates", "20, 10") == [10, 20]
