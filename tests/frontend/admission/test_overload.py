"""Many requests at once, for a simulated engine or for decode workers without engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pdserve.config.schema import AdmissionLimits
from pdserve.engine.sim.engine import SimEngine
from tests.conditions import until
from tests.frontend.conftest import Graph
from tests.frontend.model.sims import sim_engines
from tests.frontend.test_app import finish
from tests.frontend.test_generate import complete, completion

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAME = "flooded"
SLOTS = 4


@asynccontextmanager
async def worker(graph: Graph) -> AsyncIterator[SimEngine]:
    async with sim_engines(graph, 1, model=NAME, slots=SLOTS, step=0.01) as (engine,):
        yield engine


def flood(graph: Graph, count: int, **changes: Any) -> "list[asyncio.Task[httpx.Response]]":
    """Send `count` requests at once from one address."""
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 30, "stream": True, **changes}
    return [asyncio.create_task(complete(graph, **asked)) for _ in range(count)]


async def test_a_polite_client_does_not_wait_for_a_flood(graph: Graph) -> None:
    other = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with (
        worker(graph) as engine,
        httpx.AsyncClient(base_url=graph.url, transport=other, timeout=30) as polite,
    ):
        admission = graph.models.find(NAME).admission
        admission.limits = AdmissionLimits(max_waiting=40)
        crowd = flood(graph, 60, max_tokens=20)
        await until(lambda: len(admission) == 40)
        for _ in range(3):
            answer = await polite.post("/v1/completions", json=completion(model=NAME, max_tokens=2))
            assert answer.status_code == 200
            assert engine.usage.running + engine.usage.waiting <= SLOTS
        assert len(admission) > 10
        answers = await asyncio.gather(*crowd)
        assert not len(admission)
        assert await engine.all_blocks_free()
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) + codes.count(429) == 60
    assert codes.count(200) >= 40
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "RateLimitError"
        else:
            assert answer.text.endswith("data: [DONE]\n\n")


async def test_flex_requests_pause_for_others_and_continue(graph: Graph) -> None:
    async with worker(graph) as engine:
        admission = graph.models.find(NAME).admission
        crowd = flood(graph, 8, service_tier="flex", max_tokens=60)
        await until(lambda: engine.usage.running == SLOTS)
        answers = await asyncio.gather(*(complete(graph, model=NAME, max_tokens=2) for _ in range(SLOTS)))
        assert [answer.status_code for answer in answers] == [200] * SLOTS
        assert not any(task.done() for task in crowd)
        assert {answer.text.count('"text"') for answer in await asyncio.gather(*crowd)} == {60}
        assert not len(admission.flex_queue)
        assert admission._estimate().output_tokens <= 30, "flex requests do not count"
        assert await engine.all_blocks_free()


async def test_a_flex_request_in_remote_prefill_yields_its_slot(graph: Graph) -> None:
    async with graph.worker(pace=None, at_once=1, asks=True) as decode:
        flexible = asyncio.create_task(complete(graph, service_tier="flex"))
        await decode.until(lambda: decode.jobs)
        other = asyncio.create_task(complete(graph))
        await decode.until(lambda: len(decode.seen) == 2)
        assert decode.cancelled == [decode.seen[0].request_id]
        decode.go()
        assert [(await answer).status_code for answer in (flexible, other)] == [200, 200]


async def test_the_worker_with_capacity_is_chosen(graph: Graph) -> None:
    async with graph.worker(pace=None, at_once=2) as first, graph.worker(pace=None, at_once=2) as second:
        await until(lambda: graph.models.usable_workers().get("demo") == 2)
        admission = graph.models.find("demo").admission
        answers = [asyncio.create_task(complete(graph)) for _ in range(5)]
        await until(lambda: (len(first.jobs), len(second.jobs), len(admission)) == (2, 2, 1))
        full, free = sorted((first, second), key=lambda worker: worker.id)  # round-robin would choose `full`
        await finish(free)
        await free.until(lambda: len(free.seen) == 3)
        await finish(free)
        await finish(full)
        assert [(await answer).status_code for answer in answers] == [200] * 5
    assert (len(full.seen), len(free.seen)) == (2, 3)


async def test_a_request_with_many_outputs_leaves_other_requests_their_turns(graph: Graph) -> None:
    async with worker(graph) as engine:
        admission = graph.models.find(NAME).admission
        prompts = [[310, 320, number] for number in range(10)]
        (crowd,) = flood(graph, 1, stream=False, prompt=prompts, n=3, temperature=1.0, max_tokens=20)
        await until(lambda: engine.usage.running + engine.usage.waiting == SLOTS)
        assert len(admission) == 1
        for _ in range(3):  # requests of the same client: each gets a turn before `crowd` ends
            answer = await complete(graph, model=NAME, max_tokens=2)
            assert answer.status_code == 200
            assert engine.usage.running + engine.usage.waiting <= SLOTS
        assert not crowd.done()
        answer = await crowd
        assert len(answer.json()["choices"]) == 30
        assert answer.json()["usage"]["completion_tokens"] == 30 * 20
        assert not len(admission)
        assert not admission.queue.running
        assert await engine.all_blocks_free()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_its_waiting_sequences(graph: Graph, stream: bool) -> None:
    async with worker(graph) as engine:
        admission = graph.models.find(NAME).admission
        (crowd,) = flood(graph, 1, max_tokens=300, n=60, temperature=1.0, stream=stream)
        await until(lambda: engine.usage.running == SLOTS)
        crowd.cancel()
        await until(lambda: not len(admission) and not engine.usage.running)
        assert not admission.queue.running
        assert await engine.all_blocks_free()


async def test_a_prompt_beyond_the_context_counts_as_no_more_tokens_than_the_context(graph: Graph) -> None:
    """The prompt is refused once it is tokenized. If all its tokens counted, requests behind it
    would be refused, although they need not wait for it."""
    async with worker(graph):
        model = graph.models.find(NAME)
        crowd = flood(graph, SLOTS + 1, max_tokens=200)
        await until(lambda: len(model.admission) == 1)
        (too_long,) = flood(graph, 1, prompt=[1] * 100_000)
        await until(lambda: len(model.admission) == 2)
        assert model.admission.queue.tokens < 2 * model.card.max_model_len
        assert (await too_long).status_code == 400
        assert {answer.status_code for answer in await asyncio.gather(*crowd)} == {200}
