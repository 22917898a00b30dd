"""The benchmark of many workers, with few of them; and its options and tables."""

import json
from pathlib import Path

import pytest
from pdserve_bench.options import rates_of
from pdserve_bench.runs import LoadRun
from pdserve_bench.scale.graph import GraphSize
from pdserve_bench.scale.rates import PARTS, RatedLoad, ScaleRun, report_of
from pdserve_bench.slo import Tally

from pdserve.errors import ConfigError


async def test_a_small_graph_costs_what_its_requests_take(tmp_path: Path) -> None:
    found = ScaleRun(GraphSize(2, 3, servers=3), [6.0], 4.0)
    await found.measure(tmp_path)
    (load,) = found.loads
    assert load.tally.requests == load.seen["finished"] > 0
    assert load.each["frontend"] > 0 < load.each["workers"]
    assert load.each["nats messages"] > 3, "all prompts are prefilled remotely"
    assert found.idle["etcd puts"] == load.each["etcd puts"] == 0, "load goes another way"
    assert set(load.memory) == set(PARTS)
    assert load.memory["frontend"] > 200, "MiB of the processes that serve, not of those that watch them"
    report = report_of(found, True)
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    assert "1,000 requests/s take as many cores: " in report.lead


def _load(rate: float, kept: int, cpu: float) -> RatedLoad:
    """100 requests, each of which took so much CPU of each part."""
    each = {**dict.fromkeys(PARTS, cpu), "nats messages": 5.0}
    tally, none = Tally(kept, ttft=100 - kept), dict.fromkeys(PARTS, 0.0)
    return RatedLoad(rate, tally, LoadRun().summary(), each, none, 0.5, 0.1)


def test_the_plan_is_the_idle_graph_and_what_requests_cost_at_the_highest_rate_that_is_carried() -> None:
    loads = [_load(10, 100, 0.002), _load(20, 95, 0.003), _load(40, 0, 0.009)]
    counts = dict.fromkeys((*PARTS, "nats messages", "etcd events"), 0.5)
    report = report_of(ScaleRun(GraphSize(1, 1), [10, 20, 40], 1.0, 5.0, counts, counts, loads), True)
    assert "40 requests/s were too much (TTFT 100)" in report.lead
    assert "as many cores: 3.50 of frontend, " in report.lead, "0.5 idle, 3 s for 1,000 requests"
    assert [row[0] for row in report.tables[0].rows] == [10, 20, 40]
    assert json.loads(report.as_json())["data"]["loads"][2]["tally"]["ttft"] == 100


@pytest.mark.parametrize("text", ["ten", "10,", "0", "10,-2"])
def test_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="--rates"):
        rates_of("--rates", text)
    assert rates_of("--rates", "20, 10") == [10, 20]
