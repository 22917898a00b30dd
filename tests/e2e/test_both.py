"""Two real engines that each decode and prefill: KV crosses both ways, and the answers are one plain engine's."""

from collections.abc import Iterator

import pytest

from pdserve.ports import free_port
from tests.e2e.cases import Case
from tests.e2e.graph import RealGraph, serving
from tests.e2e.test_identity import all_at_once
from tests.real import GRAPH

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.fixture
def both(tmp_path_factory: pytest.TempPathFactory, reference: dict[str, list[int]]) -> Iterator[RealGraph]:
    del reference  # first, as for the other graph
    yaml = GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2), decode=2, prefill=0)
    yaml = yaml[: yaml.index("PrefillWorker")].replace("VllmWorker:", "VllmWorker:\n  role: both")
    with serving(yaml, tmp_path_factory.mktemp("both")) as graph:
        yield graph


async def test_two_workers_prefill_for_each_other(
    both: RealGraph, cases: list[Case], reference: dict[str, list[int]]
) -> None:
    answers = await all_at_once(both, cases)
    assert [name for name, answer in answers if answer.tokens != reference[name]] == []
    assert {answer.prefill for _, answer in answers} == {"local", "remote"}
    metrics = both.metrics()
    assert metrics("pdserve_warm_ups_total", result="ok") == 2
    slow = {"timeout", "expired"}  # the machine was busy
    assert metrics.values("pdserve_remote_prefill_failures_total", "reason") <= slow
