"""Two real engines that each decode and prefill: KV crosses both ways, and the answers are one plain engine's."""

import asyncio
from collections.abc import Iterator

import pytest

from pdserve.ports import free_port
from tests.e2e.cases import Case
from tests.e2e.graph import Graph, serving
from tests.e2e.test_identity import complete
from tests.real import GRAPH

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.fixture
def both(tmp_path_factory: pytest.TempPathFactory, reference: dict[str, list[int]]) -> Iterator[Graph]:
    del reference  # first, as for the other graph
    yaml = GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2), decode=2, prefill=0)
    yaml = yaml[: yaml.index("PrefillWorker")].replace("VllmWorker:", "VllmWorker:\n  role: both")
    with serving(yaml, tmp_path_factory.mktemp("both")) as graph:
        yield graph


async def test_two_workers_prefill_for_each_other(
    both: Graph, cases: list[Case], reference: dict[str, list[int]]
) -> None:
    jobs = [(case, stream) for case in cases for stream in (False, True)]
    answers = await asyncio.gather(
        *(complete(both, case, stream=stream, salt=f"{i}") for i, (case, stream) in enumerate(jobs))
    )
    wrong = [
        case.name for (case, _), got in zip(jobs, answers, strict=True) if got.tokens != reference[case.name]
    ]
    assert wrong == []
    assert {answer.prefill for answer in answers} == {"local", "remote"}
    metrics = both.metrics()
    assert metrics("pdserve_warm_ups_total", result="ok") == 2
    assert metrics("pdserve_remote_prefill_failures_total") == 0
