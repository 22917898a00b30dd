"""Large requests get the same responses from a second event loop, and do not block the frontend's own loop."""

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from pdserve.frontend.vllm.refusals import MAX_PROMPT_LOGPROBS
from tests.conditions import until
from tests.conformance.answers import answer_of, differences
from tests.frontend.conftest import Graph
from tests.frontend.test_generate import chat, complete, completion

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CRASHING_SCHEMA = {"type": "integer", "maximum": -(2**63)}
"""Would crash the process in llguidance; refused (`refusals.fatal_grammar`)."""
REQUESTS: dict[str, tuple[str, dict[str, object]]] = {
    "a completion": ("/v1/completions", completion()),
    "several prompts and outputs": ("/v1/completions", completion(prompt=["a", "b"], n=2, temperature=0.5)),
    "logprobs": ("/v1/completions", completion(logprobs=3, n=2, temperature=0.5)),
    "logprobs of the prompt": ("/v1/completions", completion(prompt_logprobs=3, n=2, temperature=0.5)),
    "an echo with logprobs": ("/v1/completions", completion(echo=True, logprobs=2)),
    "an echo with logprobs, streamed": ("/v1/completions", completion(echo=True, logprobs=2, stream=True)),
    "a plain stream": ("/v1/completions", completion(stream=True)),
    "a stream of one token": ("/v1/completions", completion(stream=True, max_tokens=1)),
    "logprobs streamed": ("/v1/completions", completion(stream=True, logprobs=2)),
    "a chat": ("/v1/chat/completions", chat()),
    "a chat streamed": ("/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True})),
    "a chat with logprobs": ("/v1/chat/completions", chat(logprobs=True, top_logprobs=2, prompt_logprobs=1)),
    "a chat with tools": ("/v1/chat/completions", chat(tools=[TOOL], tool_choice="none")),
    "a chat with tools streamed": ("/v1/chat/completions", chat(tools=[TOOL], tool_choice="none", stream=True)),
    "a chat streamed with logprobs": ("/v1/chat/completions", chat(stream=True, logprobs=True, top_logprobs=2)),
    "a grammar": ("/v1/completions", completion(structured_outputs={"json": SCHEMA})),
    "a response": ("/v1/responses", {"model": "demo", "input": HELLO, "max_output_tokens": 8}),
    "a response streamed": ("/v1/responses", {"model": "demo", "input": HELLO, "max_output_tokens": 8, "stream": True}),
    "a message": ("/v1/messages", {"model": "demo", "messages": HELLO, "max_tokens": 8}),
    "a message streamed": ("/v1/messages", {"model": "demo", "messages": HELLO, "max_tokens": 8, "stream": True}),
    "scores": ("/generative_scoring",
               {"model": "demo", "query": "a", "items": ["b", "c"], "label_token_ids": [300, 301]}),
    "tokens": ("/tokenize", {"model": "demo", "prompt": "hello"}),
    "a wrong type": ("/v1/completions", completion(temperature="warm")),
    "a wrong value": ("/v1/completions", completion(temperature=-1)),
    "a refused grammar": ("/v1/completions", completion(structured_outputs={"json": CRASHING_SCHEMA})),
    "too long": ("/v1/chat/completions", chat(messages=[{"role": "user", "content": "a " * 9000}])),
}  # fmt: skip


def assert_alike(ours: httpx.Response, theirs: httpx.Response) -> None:
    """Compare all but ids, times, and which tokens share a chunk of a stream."""
    one, other = answer_of(ours), answer_of(theirs)
    assert one.status == other.status
    assert not list(differences(one.body, other.body))
    assert ours.headers.keys() == theirs.headers.keys()


@pytest.mark.parametrize("name", REQUESTS)
async def test_both_event_loops_give_the_same_answer(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, body = REQUESTS[name]
    async with graph.worker():
        main = await graph.http.post(path, json=body)
        monkeypatch.setattr("pdserve.frontend.edge.body.LARGE", 0)
        side = await graph.http.post(path, json=body)
    assert_alike(side, main)


async def test_a_large_request_whose_client_disconnects_is_cancelled(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.frontend.edge.body.LARGE", 0)
    for stream in (True, False):
        async with graph.worker(pace=None) as worker:
            asking = asyncio.create_task(complete(graph, stream=stream))
            await worker.until(lambda worker=worker: worker.seen)
            asking.cancel()
            await worker.until(lambda worker=worker: worker.cancelled)
            assert worker.cancelled == [worker.seen[0].request_id]
    await until(lambda: graph.models.find("demo").running == 0)


async def test_the_event_loop_is_not_blocked_while_prompt_logprobs_are_written(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blocked loop shows as CPU seconds of the loop's thread between two turns."""
    body = completion(prompt=[300] * 2000, prompt_logprobs=20, n=3, temperature=0.5)
    done = False
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while not done:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    async with graph.worker():
        await complete(graph)
        watching = asyncio.create_task(watch())
        before = time.process_time()
        async with graph.http.stream("POST", "/v1/completions", json=body) as answer:
            size = sum([len(part) async for part in answer.aiter_raw()])
        used = time.process_time() - before
        done = True
        await watching
    assert size > 5_000_000
    assert longest < used / 4


LONG = [300] * 3990
TOO_MANY = f"one request may have {MAX_PROMPT_LOGPROBS}"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"prompt": LONG, "n": 7, "prompt_logprobs": 20}, TOO_MANY),
        ({"prompt": [LONG] * 7, "prompt_logprobs": 20}, TOO_MANY),
        ({"prompt": [LONG] * 4, "n": 4, "echo": True, "logprobs": 9}, TOO_MANY),
        ({"n": 64, "vllm_xargs": {"a": "x" * 1_000_000}}, "bytes; they may have 33554432"),
    ],
)
async def test_the_data_that_each_sequence_repeats_is_bounded(
    graph: Graph, asked: dict[str, Any], why: str
) -> None:
    """Each sequence has its own copy of the prompt logprobs, and of the parameters sent to a worker."""
    async with graph.worker() as worker:
        answer = await complete(graph, temperature=0.5, max_tokens=1, **asked)
        assert answer.status_code == 400, answer.text[:300]
        assert why in answer.json()["error"]["message"]
        await until(lambda: not worker.jobs)
        assert (await complete(graph)).status_code == 200


async def test_a_removed_model_leaves_no_thread(graph: Graph) -> None:
    before = set(threading.enumerate())
    async with graph.worker("other"):
        await until(lambda: any(card.name == "other" for card in graph.models.listed()))
        started = [each for each in set(threading.enumerate()) - before if "(run)" in each.name]
        assert len(started) == 1, "the side loop of this model"
        graph.models._remove("other")
        await until(lambda: not graph.models._retiring)
    await until(lambda: not started[0].is_alive())
