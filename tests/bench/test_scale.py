"""The benchmark of many workers, with few of them; and its options and tables."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pdserve_bench.options import numbers
from pdserve_bench.scale.choice import choice_seconds
from pdserve_bench.scale.command import ScaleTurn, _window, make_report
from pdserve_bench.scale.graph import ScaleGraph

from pdserve.errors import ConfigError


async def test_a_small_graph(tmp_path: Path) -> None:
    turn = ScaleTurn(4)
    graph = ScaleGraph(tmp_path, turn.workers)
    async with AsyncExitStack() as stack:
        await graph.start(stack, warm_ups=True)
        assert await graph.live() == 2
        turn.idle = await _window(graph, 0.3)
        async with graph.streams():
            turn.busy = await _window(graph, 1.0)
        turn.memory = graph.memory()
    assert turn.busy["etcd puts"] == 0, "load goes another way"
    assert turn.busy["nats messages"] >= 0
    assert min(turn.busy["frontend"], turn.busy["workers"]) > 0
    assert all(
        len(row) == len(table.columns) for table in make_report([turn], True, []).tables for row in table.rows
    )


def test_a_choice_among_many_workers() -> None:
    p50, p99 = choice_seconds(50)
    assert 0 < p50 <= p99


def test_a_turn_that_failed_has_its_row() -> None:
    report = make_report([ScaleTurn(10)], False, ["10 workers: no"])
    for table in report.tables:
        (row,) = table.rows
        cells = [column.shown(cell) for column, cell in zip(table.columns, row, strict=True)]
        assert (cells[0], set(cells[1:])) == ("10", {""})
    assert report.notes == ["10 workers: no"]


@pytest.mark.parametrize("text", ["ten", "10,", "1", "10,-2"])
def test_numbers_of_workers(text: str) -> None:
    with pytest.raises(ConfigError, match="--workers"):
        numbers("--workers", text, least=2)
    assert numbers("--workers", "10, 20", least=2) == [10, 20]
