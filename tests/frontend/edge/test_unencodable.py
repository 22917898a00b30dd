"""A request that cannot be encoded for a worker, or whose grammar cannot be compiled, fails without harm to others."""

import asyncio
import json
from typing import Any

import pytest

from tests.conditions import until
from tests.frontend.conftest import Graph
from tests.frontend.model.sims import sim_engines
from tests.frontend.sequence.test_moving import post, steps
from tests.frontend.test_generate import PROMPT, complete, completion

pytestmark = pytest.mark.asyncio(loop_scope="session")

HUGE = 1 << 70
NESTED = {"type": "object", "properties": {"a": {"anyOf": [{"const": 1}, {"const": -HUGE}]}}}
UNENCODABLE: list[tuple[dict[str, Any], str]] = [
    ({"repetition_detection": {"max_pattern_size": HUGE, "min_count": 2}}, "repetition_detection.max_pattern_size"),
    ({"structured_outputs": {"json": {"enum": [1, HUGE]}}}, "structured_outputs.json.enum[1]"),
    ({"structured_outputs": {"json": NESTED}}, "structured_outputs.json.properties.a.anyOf[1].const"),
]  # fmt: skip
FATAL_INT = {"type": "integer", "minimum": -(1 << 64), "maximum": -(1 << 64)}
FATAL_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": FATAL_INT}}
SMILES = "\N{SLIGHTLY SMILING FACE}" * 300
FATAL_GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": FATAL_INT}}, "must not be below"),
    ({"structured_outputs": {"json": json.dumps({"items": {"anyOf": [FATAL_INT]}})}}, "must not be below"),
    ({"response_format": FATAL_FORMAT}, "must not be below"),
    ({"structured_outputs": {"grammar": "start: %json " + json.dumps(FATAL_INT).replace("max", "m\\u0061x")}}, "below"),
    ({"structured_outputs": {"json": {"type": "string", "maxLength": SMILES, "minLength": SMILES}}}, ""),
]  # fmt: skip
"""Grammars found by `pdserve_bench.fuzz`, at which llguidance panics or ends the frontend with SIGSEGV."""
SURROGATES: list[tuple[dict[str, Any], str]] = [
    ({"cache_salt": "\ud800"}, ""),
    ({"bad_words": ["\ud800"]}, "bad_words"),
]
REFUSED_AS_STREAMS = [
    *(("/v1/completions", changes, 400, said) for changes, said in UNENCODABLE),
    ("/v1/completions", {"model": "a\udc00b"}, 404, "a\\udc00b"),
    ("/v1/responses", {"previous_response_id": "\ud800"}, 400, ""),
    ("/v1/responses", {"stop_token_ids": [1 << 40]}, 400, "stop_token_ids"),
]
REFUSED = [
    *REFUSED_AS_STREAMS,
    *(("/v1/completions", changes, 400, said) for changes, said in FATAL_GRAMMARS + SURROGATES),
]
"""FATAL_GRAMMARS and SURROGATES are sent without `stream` only."""
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_requests_reach_no_worker(graph: Graph, stream: bool) -> None:
    """A stream gets the same status, because the start of its response waits for the first part of its body."""
    async with graph.worker() as worker:
        for path, changes, status, said in REFUSED_AS_STREAMS if stream else REFUSED:
            body = completion() if path == "/v1/completions" else {"model": "demo", "input": "hello"}
            # httpx cannot encode half of a surrogate pair
            content = json.dumps({**body, "stream": stream, **changes})
            answer = await graph.http.post(path, content=content, headers=JSON)
            assert answer.status_code == status, (changes, answer.text)
            assert said in answer.json()["error"]["message"]
        assert not worker.seen


async def test_refused_requests_hold_no_capacity(graph: Graph) -> None:
    """A request after them still migrates when its worker is lost."""
    async with graph.worker(pace=None, at_once=8) as first:
        before = graph.processor().workers.capacity
        for _ in range(3):  # fewer sequences than slots: a request that has to wait may get a 429
            bad = [post(graph, **changes, n=2) for changes, _ in UNENCODABLE]
            assert {answer.status_code for answer in await asyncio.gather(*bad)} == {400}
        await graph.processor().core.idle()
        assert graph.processor().workers.capacity == before
        good = post(graph)
        await steps(first, 2)
        async with graph.worker() as second:
            await first.die()
            assert (await good).status_code == 200
    assert second.seen[0].prompt[: len(PROMPT)] == PROMPT


async def test_only_the_waiting_request_that_cannot_be_encoded_fails(graph: Graph) -> None:
    """Request `a` fails when the second worker's stream opens. The stream stays open and serves request `b`."""
    async with graph.worker(pace=None) as first:
        waiting = [post(graph, presence_penalty=0.5, request_id="a"), post(graph, request_id="b")]
        await first.until(lambda: len(first.jobs) == 2)
        core = graph.processor().core
        generation = next(found for found in core._generations.values() if found.must_replay)
        generation.request.sampling_params.extra_args = {"late": HUGE}
        await first.die()
        await until(lambda: not core.running)
        async with graph.worker() as second:
            answers = await asyncio.gather(*waiting)
            assert [answer.status_code for answer in answers] == [400, 200]
            assert len(second.seen) == 1
            again = await complete(graph)
            assert again.status_code == 200
    await core.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_no_engine_can_compile_is_a_400_after_one_try(
    graph: Graph, stream: bool
) -> None:
    async with sim_engines(graph, 2) as both:
        for engine in both:
            engine.faults.no_grammars = True
        before = sum(len(engine._seen) for engine in both)  # prompts of the self-tests
        asked = completion(structured_outputs={"regex": "[a-z]+"}, stream=stream)
        answer = await graph.http.post("/v1/completions", json=asked)
        tries = sum(len(engine._seen) for engine in both) - before
        well = await complete(graph)
    assert answer.status_code == 400, answer.text
    assert "cannot be compiled" in answer.json()["error"]["message"]
    assert tries == 1
    assert well.status_code == 200
