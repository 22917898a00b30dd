"""What cannot travel to a worker is the fault of one request, and nobody else's."""

import asyncio
import json
from typing import Any

import pytest

from pdserve.errors import ProtocolError
from pdserve.messages import Submit
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from tests.conditions import until
from tests.frontend.conftest import Graph
from tests.frontend.model.sims import sim_engines
from tests.frontend.model.test_moving import post, steps
from tests.frontend.test_generate import PROMPT, complete, completion

pytestmark = pytest.mark.asyncio(loop_scope="session")

HUGE = 1 << 70
NESTED = {"type": "object", "properties": {"a": {"anyOf": [{"const": 1}, {"const": -HUGE}]}}}
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"repetition_detection": {"max_pattern_size": HUGE, "min_count": 2}},
        "repetition_detection.max_pattern_size",
    ),
    ({"structured_outputs": {"json": {"enum": [1, HUGE]}}}, "structured_outputs.json.enum[1]"),
    ({"structured_outputs": {"json": NESTED}}, "structured_outputs.json.properties.a.anyOf[1].const"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("changes", "field"), BAD)
async def test_a_value_that_cannot_be_encoded_is_a_400_that_names_the_field(
    graph: Graph, changes: dict[str, Any], field: str, stream: bool
) -> None:
    async with graph.worker() as worker:
        answer = await complete(graph, **changes, stream=stream)
        assert answer.status_code == 400
        assert field in answer.json()["error"]["message"]
        assert not worker.seen


async def test_many_take_nothing_from_others(graph: Graph) -> None:
    """Neither a place nor tokens of a worker, and when a link is lost the others go on elsewhere."""
    async with graph.worker(pace=None, at_once=8) as first:
        before = graph.processor().workers.capacity
        for _ in range(8):  # as many at once as there are places: 429 would be right for more
            bad = [post(graph, **BAD[number % len(BAD)][0], n=2) for number in range(5)]
            assert {answer.status_code for answer in await asyncio.gather(*bad)} == {400}
        await graph.processor().core.idle()
        assert graph.processor().workers.capacity == before
        good = post(graph)
        await steps(first, 2)
        async with graph.worker() as second:
            await first.die()
            assert (await good).status_code == 200
    assert second.seen[0].prompt[: len(PROMPT)] == PROMPT


async def test_one_that_waits_for_a_worker_does_not_keep_the_others_from_it(graph: Graph) -> None:
    """It is found out when the link comes up; the link holds, and the request behind it is served."""
    async with graph.worker(pace=None) as first:
        waiting = [post(graph, presence_penalty=0.5, request_id="a"), post(graph, request_id="b")]
        await first.until(lambda: len(first.jobs) == 2)
        core = graph.processor().core
        generation = next(found for found in core._generations.values() if found.replays)
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


async def test_a_stream_holds_when_a_message_cannot_be_encoded() -> None:
    async with TcpStreamServer("127.0.0.1") as server, TcpStreamClient(server.address, "f") as client:
        with pytest.raises(ProtocolError):
            await client.send(Submit("r", [HUGE], 0.0, []))
        await client.send(Submit("s", [1], 0.0, []))
        async with asyncio.timeout(5):
            _, message = await anext(aiter(server.received()))
        assert isinstance(message, Submit)
        assert message.request_id == "s"


@pytest.mark.parametrize(
    ("path", "changes", "status", "quoted"),
    [
        ("/v1/completions", {"cache_salt": "\ud800"}, 400, ""),
        ("/v1/completions", {"bad_words": ["\ud800"]}, 400, "bad_words"),
        ("/v1/completions", {"model": "a\udc00b"}, 404, "a\\\\udc00b"),
        ("/v1/responses", {"input": "hello", "previous_response_id": "\ud800"}, 400, ""),
    ],
)
async def test_half_of_a_surrogate_pair_is_refused_and_may_be_quoted(
    graph: Graph, path: str, changes: dict[str, Any], status: int, quoted: str
) -> None:
    async with graph.worker():
        body, headers = json.dumps(completion(**changes)), {"content-type": "application/json"}
        answer = await graph.http.post(path, content=body, headers=headers)
    assert (answer.status_code, quoted in answer.text) == (status, True)


async def test_a_stream_that_is_refused_when_it_has_begun_is_a_400(graph: Graph) -> None:
    async with graph.worker():
        body = {"model": "demo", "input": "hello", "stream": True, "stop_token_ids": [1 << 40]}
        answer = await graph.http.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert "stop_token_ids" in answer.json()["error"]["message"]


RANGE = {"type": "integer", "minimum": -(1 << 64), "maximum": -(1 << 64)}


@pytest.mark.parametrize(
    "changes",
    [
        {"structured_outputs": {"json": RANGE}},
        {"structured_outputs": {"json": json.dumps({"items": {"anyOf": [RANGE]}})}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": RANGE}}},
        {"structured_outputs": {"grammar": "start: %json " + json.dumps(RANGE).replace("max", "m\\u0061x")}},
    ],
)
async def test_a_grammar_that_ends_its_compiler_is_not_compiled(
    graph: Graph, changes: dict[str, Any]
) -> None:
    """Found by `pdserve_bench.fuzz`: llguidance ends the frontend with SIGSEGV."""
    async with graph.worker() as worker:
        answer = await complete(graph, **changes)
        assert answer.status_code == 400
        assert "must not be below" in answer.json()["error"]["message"]
        assert not worker.seen


async def test_a_grammar_at_which_its_compiler_panics_is_a_400(graph: Graph) -> None:
    smiles = "\N{SLIGHTLY SMILING FACE}" * 300
    schema = {"type": "string", "maxLength": smiles, "minLength": smiles}
    async with graph.worker():
        answer = await complete(graph, structured_outputs={"json": schema})
        assert answer.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_without_finite_text_is_a_400_after_one_try(graph: Graph, stream: bool) -> None:
    async with sim_engines(graph, 2) as both:
        for engine in both:
            engine.faults.no_grammars = True
        before = sum(len(engine._seen) for engine in both)  # the self-tests'
        asked = completion(structured_outputs={"regex": "[a-z]+"}, stream=stream)
        answer = await graph.http.post("/v1/completions", json=asked)
        tries = sum(len(engine._seen) for engine in both) - before
        well = await complete(graph)
    assert answer.status_code == 400, answer.text
    assert "cannot be compiled" in answer.json()["error"]["message"]
    assert tries == 1
    assert well.status_code == 200
