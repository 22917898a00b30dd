"""What is said of a prompt's prefill is what happened, as far as it is known then: in the header, in the metric, and
in the usage."""

import pytest
from prometheus_client import REGISTRY

from tests.frontend.conftest import Graph
from tests.frontend.model.sims import sim_engines
from tests.frontend.test_generate import complete

pytestmark = pytest.mark.asyncio(loop_scope="session")


def count(mode: str, reason: str) -> float:
    return (
        REGISTRY.get_sample_value("pdserve_prefill_total", {"model": "demo", "mode": mode, "reason": reason})
        or 0.0
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_transfer_that_failed_was_local(graph: Graph, stream: bool) -> None:
    async with sim_engines(graph, 1, 1) as (_, prefill):
        before = count("remote", "long"), count("local", "transfer")
        prefill.faults.drop_transfers = True
        prompt = [350 + stream, *range(400, 600)]
        answer = await complete(graph, prompt=prompt, stream=stream)
        after = count("remote", "long"), count("local", "transfer")
    assert answer.status_code == 200
    # a stream has its headers with its first token, which came from the prefill worker
    assert answer.headers["x-pdserve-prefill"] == ("remote" if stream else "local")
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)


async def test_cached_tokens_of_the_usage_leave_out_a_transfer(graph: Graph) -> None:
    """But what either worker had in its prefix cache before is."""
    async with sim_engines(graph, 2, 1):
        prompt = list(range(400, 600))
        usages = []
        for number in range(3):
            answer = await graph.http.post(
                "/v1/responses",
                json={"model": "demo", "input": "The code of the box is 1234. " * 30, "max_output_tokens": 4},
            )
            usages.append(answer.json()["usage"]["input_tokens_details"]["cached_tokens"])
            assert answer.headers["x-pdserve-prefill"] == ("remote" if number < 2 else "local"), prompt
    assert usages[0] == 0
    assert usages[1] > 100  # at the prefill worker, which had it from the first time
    assert usages[2] > 100  # at the decode worker of the first time
