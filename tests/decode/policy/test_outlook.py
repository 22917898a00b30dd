"""A decode worker's report of its backlog, in virtual time. (Its use in routing: frontend/workers/test_router.)"""

import pytest

from pdserve.contract.slo import is_flex
from tests.decode.virtual import ADAPTIVE, VirtualGraph, VirtualRequest


def test_waiting_prompts_are_a_backlog_until_they_are_computed() -> None:
    """Flex prompts do not count."""
    graph = VirtualGraph(ADAPTIVE, decode=2)
    assert [each.estimator.outlook().backlog for each in graph.decode] == [0.0, 0.0]
    for client in ["", "~flex"] * 20:
        for worker in graph.decode:
            worker.submit(VirtualRequest(1300, 64, 0.0, worker, client))
    backlogs = [each.estimator.outlook().backlog for each in graph.decode]
    tokens = sum(
        each.prompt
        for worker in graph.decode
        for each in worker.live
        if not (each.prefiller or each.since or is_flex(each.client))
    )
    assert sum(backlogs) == pytest.approx(tokens / 5000), "each prompt counts once, at its own worker"
    graph.run(60.0)
    assert len(graph.done) == 80
    assert [each.estimator.outlook().backlog for each in graph.decode] == [0.0, 0.0]
