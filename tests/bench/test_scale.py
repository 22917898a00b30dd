"""The benchmark of many workers, with few of them; and its options and tables."""

import json
from pathlib import Path

import pytest
from pdserve_bench.options import rates_of
from pdserve_bench.runs import LoadRun
from pdserve_bench.scale.graph import GraphSize
from pdserve_bench.scale.measure import PARTS, ScaleRun, report_of
from pdserve_bench.slo import Tally

from pdserve.errors import ConfigError


async def test_a_small_graph_costs_what_its_requests_take(tmp_path: Path) -> None:
    found = ScaleRun(GraphSize(2, 3, servers=3), 6.0, 4.0)
    await found.measure(tmp_path)
    assert found.tally.requests == found.seen["finished"] > 0
    assert found.each["frontend"] > 0 < found.each["workers"]
    assert found.each["nats messages"] > 3, "all prompts are prefilled remotely"
    assert found.idle["etcd puts"] == found.each["etcd puts"] == 0, "load goes another way"
    assert set(found.memory) == set(PARTS)
    assert min(found.memory["frontend"]) > 200, (
        "MiB of the processes that serve, not of those that watch them"
    )
    report = report_of(found)
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    assert "1,000 requests/s take as many cores: " in report.lead


def test_the_plan_is_the_idle_graph_and_what_requests_cost() -> None:
    """100 requests, each of which took 3 ms of CPU of each part."""
    idle = dict.fromkeys((*PARTS, "nats messages", "etcd events"), 0.5)
    each, memory = {**dict.fromkeys(PARTS, 0.003), "nats messages": 5.0}, dict.fromkeys(PARTS, (1.0, 2.0))
    found = ScaleRun(
        GraphSize(1, 1), 40.0, 1.0, 5.0, idle, each, memory, Tally(ttft=100), LoadRun().summary()
    )
    report = report_of(found)
    assert "40 requests/s were too much (TTFT 100)" in report.lead
    assert "as many cores: 3.50 of frontend, " in report.lead, "0.5 idle, 3 s for 1,000 requests"
    assert json.loads(report.as_json())["data"]["tally"]["ttft"] == 100


@pytest.mark.parametrize("text", ["ten", "10,", "0", "10,-2"])
def test_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="--rates"):
        rates_of("--rates", text)
    assert rates_of("--rates", "20, 10") == [10, 20]
