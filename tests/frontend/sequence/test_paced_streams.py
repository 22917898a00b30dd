"""Streams with a promise: what clients get and when, and what decode workers are told of the promise."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from msgspec import UNSET

from pdserve.contract.messages import Failed, Promise
from pdserve.contract.slo import FLEX_PREFIX, SloTargets
from pdserve.registry import keys
from tests.conditions import holds, until
from tests.frontend.conftest import Graph
from tests.frontend.edge.test_deltas import Answer
from tests.frontend.model.echo import EchoWorker, continuation
from tests.frontend.test_generate import PROMPT, chat, complete, completion, text_of
from tests.frontend.vllm.test_side_loop import REQUESTS, TOOL, assert_alike
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = SloTargets(0.5, 0.06)
FOR_EVER = SloTargets(600.0, 3600.0)
"""so long that outputs are held until the response ends"""


@asynccontextmanager
async def streaming(graph: Graph, body: dict[str, object] | None = None) -> AsyncIterator[Answer]:
    client = Answer(graph, {**(body or completion(max_tokens=20)), "stream": True})
    try:
        yield client
    finally:
        await client.leave()


async def come(graph: Graph, worker: EchoWorker, count: int) -> None:
    """Make `count` steps, and wait until the frontend has the outputs of each."""
    await worker.until(lambda: worker.jobs)
    for _ in range(count):
        before = tokens_come(graph)
        await worker.step()
        await until(lambda before=before: tokens_come(graph) > before)  # type: ignore[misc]


def tokens_come(graph: Graph) -> int:
    return sum(len(each.tokens) for each in graph.processor().core._generations.values())


@pytest.mark.parametrize("asked", [name for name, (_, body) in REQUESTS.items() if body.get("stream")])
@pytest.mark.parametrize("slo", [FOR_EVER, SloTargets(600.0, 0.003)], ids=["held to its end", "paced"])
async def test_an_answer_is_the_same_with_and_without_a_promise(
    graph: Graph, asked: str, slo: SloTargets
) -> None:
    path, body = REQUESTS[asked]
    answers = []
    for promised in (SloTargets(), slo):
        async with graph.worker(slo=promised, pace=0.001) as worker:
            answers.append(await graph.http.post(path, json=body))
        assert isinstance(worker.seen[0].promise, Promise) == bool(promised)
    assert_alike(*answers)


async def test_the_first_token_waits_for_the_second_and_the_others_for_the_end(graph: Graph) -> None:
    async with graph.worker(slo=FOR_EVER, pace=None) as worker, streaming(graph) as client:
        await come(graph, worker, 1)
        await holds(lambda: not client.texts)
        await come(graph, worker, 1)
        await until(lambda: len(client.texts) == 1)
        await come(graph, worker, 5)
        worker.go()
        await client.whole()
        assert "".join(client.texts) == await text_of(graph, continuation(PROMPT, 20))


@pytest.mark.parametrize(
    "body",
    [
        completion(n=2, temperature=1.0),
        completion(stop=["~"]),
        chat(tools=[TOOL], tool_choice="none"),
    ],
    ids=["two outputs", "stop string", "tools"],
)
async def test_responses_that_cannot_be_paced_are_not_held(graph: Graph, body: dict[str, object]) -> None:
    async with graph.worker(slo=FOR_EVER, pace=None) as worker, streaming(graph, body) as client:
        await come(graph, worker, 1)
        await until(lambda: bool(client.texts))


async def test_nothing_is_held_for_a_client_that_disconnected(graph: Graph) -> None:
    async with graph.worker(slo=FOR_EVER, pace=None) as worker:
        async with streaming(graph):
            await come(graph, worker, 5)
            assert graph.processor().core._pacer._streams
        await worker.until(lambda: worker.cancelled)
        assert not graph.processor().core._pacer._streams
        assert graph.processor().core._pacer._timer is None


@pytest.mark.parametrize("body", [completion(), completion(logprobs=2)], ids=["plain", "logprobs"])
async def test_an_error_follows_all_tokens(graph: Graph, body: dict[str, object]) -> None:
    async with (
        graph.worker(slo=FOR_EVER, pace=None) as worker,
        streaming(graph, body) as client,
    ):
        await come(graph, worker, 5)
        await worker.send(Failed(worker.seen[0].request_id, "no more", invalid=True))
        await client.whole()
        assert "".join(client.texts) == await text_of(graph, continuation(PROMPT, 5))
        assert "no more" in client.events[-1]["error"]["message"]


async def test_held_outputs_stay_held_during_a_migration(graph: Graph) -> None:
    async with graph.worker(slo=FOR_EVER, pace=None) as first, streaming(graph) as client:
        await come(graph, first, 5)
        async with graph.worker(slo=FOR_EVER) as second:
            await first.die()
            await client.whole()
        assert "".join(client.texts) == await text_of(graph, continuation(PROMPT, 20))
        promise = second.seen[0].promise
        assert isinstance(promise, Promise)
        assert promise.ttft is not None
        assert 4 * 3600 < promise.ttft <= 5 * 3600, "four are held, and the next is due after them"


async def test_held_outputs_of_a_replaced_model_are_dropped(
    graph: Graph,
) -> None:
    bodies = [completion(model="rolled"), completion(model="rolled", logprobs=2)]
    async with AsyncExitStack() as stack, AsyncExitStack() as reading:
        served = graph.worker("rolled", slo=FOR_EVER, pace=None, loaded="old", generation=71)
        old = await stack.enter_async_context(served)
        core = graph.processor("rolled").core
        clients = [await reading.enter_async_context(streaming(graph, body)) for body in bodies]
        await old.until(lambda: len(old.jobs) == 2)
        begun = list(core._generations.values())
        await old.step()
        await until(lambda: all(each.tokens for each in begun))
        assert [client.texts for client in clients] == [[], []]
        async with graph.worker("rolled", loaded="new", generation=72):
            await stack.aclose()
            for client in clients:
                await client.whole()
        assert {"".join(client.texts) for client in clients} == {
            await text_of(graph, continuation(PROMPT, 8))
        }


# what a worker is told of the promise


async def test_a_worker_gets_the_rest_of_the_promise(graph: Graph) -> None:
    """A flex request has no promise, and its client's name has `FLEX_PREFIX`. Without an SLO, headers do nothing."""
    async with graph.worker() as unpromised:
        await complete(graph, headers={"x-slo-ttft-ms": "never", "x-slo-tpot-ms": "60"})
    assert unpromised.seen[0].promise is UNSET
    async with graph.worker(slo=SloTargets(300.0, 0.06)) as worker:
        await complete(graph)
        await complete(graph, headers={"x-slo-ttft-ms": "1000000", "x-slo-tpot-ms": "5"})
        await complete(graph, service_tier="flex")
    for submit, ttft in zip(worker.seen, (300.0, 1000.0), strict=False):
        assert isinstance(submit.promise, Promise)
        assert submit.promise.gap == 0.06
        assert ttft - 60 < (submit.promise.ttft or 0.0) < ttft
    assert (worker.seen[2].promise, worker.seen[2].client) == (UNSET, FLEX_PREFIX + worker.seen[0].client)


async def test_the_promise_changes_live(graph: Graph) -> None:
    async with graph.worker(slo=CHAT) as worker, MemoryRegistry(graph.registry) as registry:

        async def becomes(name: str, value: str | None, expected: SloTargets) -> None:
            key = keys.setting(name)
            await (registry.delete(key) if value is None else registry.put(key, value.encode()))
            await until(lambda: graph.models.find("demo").promised == expected)

        await becomes("slo-gap", "100ms", SloTargets(0.5, 0.1))
        await becomes("slo-ttft", "off", SloTargets(None, 0.1))
        await becomes("slo-gap", "soon", SloTargets(None, 0.06))
        await complete(graph)
        assert worker.seen[-1].promise == Promise(None, 0.06)
        await becomes("slo-ttft", None, CHAT)
        await registry.delete(keys.setting("slo-gap"))
