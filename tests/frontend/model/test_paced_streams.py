"""Streams with a promise: what their clients get, and when."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest

from pdserve.messages import Failed, Promise
from pdserve.slo import Promised
from tests.conditions import holds, until
from tests.frontend.conftest import Graph
from tests.frontend.model.echo import EchoWorker, continuation
from tests.frontend.model.test_aside import REQUESTS, TOOL, told
from tests.frontend.test_generate import PROMPT, chat, completion, delta, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

FOR_EVER = Promised(600.0, 3600.0)
"""outputs leave with others or with the last one"""


class Client:
    """Reads a stream as it comes."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.tokens = 0
        """events with text"""
        self.over = False

    @property
    def text(self) -> str:
        return "".join(map(delta, self.events))

    async def end(self) -> None:
        await until(lambda: self.over)

    async def read(self, answer: httpx.Response) -> None:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                self.events.append(event := json.loads(line.removeprefix("data: ")))
                self.tokens += bool(delta(event))
        self.over = True


@asynccontextmanager
async def streaming(
    graph: Graph, path: str = "/v1/completions", body: dict[str, object] | None = None, **headers: str
) -> AsyncIterator[Client]:
    client, named = Client(), {name.replace("_", "-"): value for name, value in headers.items()}
    asked = {**(body or completion(max_tokens=20)), "stream": True}

    async def ask() -> None:
        with suppress(httpx.HTTPError):
            async with graph.http.stream("POST", path, json=asked, headers=named) as answer:
                await client.read(answer)

    reading = asyncio.create_task(ask())
    try:
        yield client
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def come(graph: Graph, worker: EchoWorker, count: int) -> None:
    """Let so many further outputs come to the frontend, for each request."""
    await worker.until(lambda: worker.jobs)
    for _ in range(count):
        before = tokens_come(graph)
        await worker.step()
        await until(partial(more_come, graph, before))


def tokens_come(graph: Graph) -> int:
    return sum(len(each.tokens) for each in graph.processor().core._generations.values())


def more_come(graph: Graph, before: int) -> bool:
    return tokens_come(graph) > before


@pytest.mark.parametrize("asked", [name for name, (_, body) in REQUESTS.items() if body.get("stream")])
@pytest.mark.parametrize("slo", [FOR_EVER, Promised(600.0, 0.003)], ids=["held to its end", "paced"])
async def test_an_answer_is_the_same_with_and_without_a_promise(
    graph: Graph, asked: str, slo: Promised
) -> None:
    path, body = REQUESTS[asked]
    answers = []
    for promised in (Promised(), slo):
        async with graph.worker(slo=promised, pace=0.001) as worker:
            answers.append(told(await graph.http.post(path, json=body)))
        assert isinstance(worker.seen[0].promise, Promise) == bool(promised)
    assert answers[0] == answers[1]


async def test_the_first_token_waits_for_the_second_and_the_others_for_the_end(graph: Graph) -> None:
    async with graph.worker(slo=FOR_EVER, pace=None) as worker, streaming(graph) as client:
        await come(graph, worker, 1)
        await holds(lambda: not client.tokens)
        await come(graph, worker, 1)
        await until(lambda: client.tokens == 1)
        await come(graph, worker, 5)
        worker.go()
        await client.end()
        assert client.text == await text_of(graph, continuation(PROMPT, 20))


async def test_the_first_token_leaves_alone_when_its_time_is_up(graph: Graph) -> None:
    async with graph.worker(slo=Promised(1.0, 3600.0), pace=None) as worker, streaming(graph) as client:
        await come(graph, worker, 1)
        await until(lambda: client.tokens == 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", completion(n=2, temperature=1.0)),
        ("/v1/completions", completion(stop=["~"])),
        ("/v1/chat/completions", chat(tools=[TOOL], tool_choice="none")),
    ],
    ids=["several", "stop string", "tools"],
)
async def test_what_must_not_wait_does_not(graph: Graph, path: str, body: dict[str, object]) -> None:
    async with graph.worker(slo=FOR_EVER, pace=None) as worker, streaming(graph, path, body) as client:
        await come(graph, worker, 1)
        await until(lambda: client.tokens > 0)


async def test_a_client_that_leaves_leaves_nothing_behind(graph: Graph) -> None:
    async with graph.worker(slo=FOR_EVER, pace=None) as worker:
        async with streaming(graph):
            await come(graph, worker, 5)
            assert graph.processor().core._pacer._streams
        await worker.until(lambda: worker.cancelled)
        assert not graph.processor().core._pacer._streams
        assert graph.processor().core._pacer._timer is None


@pytest.mark.parametrize("body", [completion(), completion(logprobs=2)], ids=["plain", "logprobs"])
async def test_an_error_comes_behind_all_tokens(graph: Graph, body: dict[str, object]) -> None:
    async with (
        graph.worker(slo=FOR_EVER, pace=None) as worker,
        streaming(graph, "/v1/completions", body) as client,
    ):
        await come(graph, worker, 5)
        await worker.send(Failed(worker.seen[0].request_id, "no more", invalid=True))
        await client.end()
        assert client.text == await text_of(graph, continuation(PROMPT, 5))
        assert "no more" in client.events[-1]["error"]["message"]


async def test_a_deadline_comes_behind_all_tokens(graph: Graph) -> None:
    async with (
        graph.worker(slo=FOR_EVER, pace=None) as worker,
        streaming(graph, x_request_timeout="3") as client,
    ):
        await come(graph, worker, 5)
        await client.end()
        assert client.text == await text_of(graph, continuation(PROMPT, 5))
        assert client.events[-1]["error"]["code"] == 504


async def test_the_reserve_goes_on_to_another_worker(graph: Graph) -> None:
    async with graph.worker(slo=FOR_EVER, pace=None) as first, streaming(graph) as client:
        await come(graph, first, 5)
        async with graph.worker(slo=FOR_EVER) as second:
            await first.die()
            await client.end()
        assert client.text == await text_of(graph, continuation(PROMPT, 20))
        promise = second.seen[0].promise
        assert isinstance(promise, Promise)
        assert promise.ttft is not None
        assert 4 * 3600 < promise.ttft <= 5 * 3600, "four are held, and the next follows these"


@pytest.mark.parametrize("body", [completion(), completion(logprobs=2)], ids=["plain", "logprobs"])
async def test_what_is_held_when_a_model_is_replaced_is_not_sent_before_its_successors_answer(
    graph: Graph, body: dict[str, object]
) -> None:
    body = {**body, "model": "rolled"}
    async with AsyncExitStack() as stack:
        served = graph.worker("rolled", slo=FOR_EVER, pace=None, loaded="old", generation=71)
        old = await stack.enter_async_context(served)
        core = graph.processor("rolled").core
        async with streaming(graph, "/v1/completions", body) as client:
            await old.until(lambda: old.jobs)
            begun = list(core._generations.values())
            await old.step()
            await until(lambda: all(each.tokens for each in begun))
            assert client.tokens == 0
            async with graph.worker("rolled", loaded="new", generation=72) as new:
                await stack.aclose()
                await new.until(lambda: new.seen)
                await client.end()
            assert client.text == await text_of(graph, continuation(PROMPT, 8))
