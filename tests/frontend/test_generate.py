"""The generating routes with an `EchoWorker`, whole and streamed."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from pdserve.frontend.edge.paths import GENERATING, TOKENIZING
from tests.frontend.conftest import Graph
from tests.frontend.model.echo import continuation
from tests.frontend.model.sims import sim_engines

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [310, 320, 330, 340]


async def text_of(graph: Graph, tokens: list[int]) -> str:
    answer = await graph.http.post("/detokenize", json={"model": "demo", "tokens": tokens})
    return str(answer.json()["prompt"])


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def completion(**changes: object) -> dict[str, object]:
    return {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **changes}


def chat(**changes: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0, **changes}


async def complete(
    graph: Graph, *, headers: Mapping[str, str] | None = None, **changes: Any
) -> httpx.Response:
    return await graph.http.post("/v1/completions", json=completion(**changes), headers=headers)


TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "/v1/completions": lambda answer: answer["choices"][0]["text"],
    "/v1/chat/completions": lambda answer: answer["choices"][0]["message"]["content"],
    "/v1/responses": lambda answer: answer["output"][0]["content"][0]["text"],
    "/v1/messages": lambda answer: answer["content"][0]["text"],
}


def delta(event: dict[str, Any]) -> str:
    """The text in one event of a stream, of any route."""
    if event.get("choices"):
        (choice,) = event["choices"]
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    found = event.get("delta", "") if "delta" in event.get("type", "") else ""
    return str(found if isinstance(found, str) else found.get("text", ""))


@pytest.mark.parametrize("path", TEXTS)
async def test_each_route_answers_whole_and_as_a_stream(graph: Graph, path: str) -> None:
    asked = completion() if path == "/v1/completions" else chat(input="hello", max_output_tokens=8)
    async with graph.worker() as worker:
        whole = await graph.http.post(path, json=asked)
        stream = await graph.http.post(path, json={**asked, "stream": True})
        expected = await text_of(graph, continuation(worker.seen[0].prompt, 8))
    assert whole.status_code == stream.status_code == 200, whole.text
    assert TEXTS[path](whole.json()) == expected
    assert "".join(delta(event) for event in events(stream)) == expected
    assert {answer.headers["x-pdserve-instance"] for answer in (whole, stream)} == {worker.id}


async def test_the_request_as_the_worker_gets_it(graph: Graph) -> None:
    async with graph.worker() as worker:
        given = {"x-request-timeout": "9"}
        await complete(graph, vllm_xargs={"colour": "red"}, kv_transfer_params=None, seed=7, headers=given)
    submit, request = worker.seen[0], worker.requests[0]
    assert submit.prompt == PROMPT
    assert request.sampling_params.max_tokens == 8
    assert request.prompt_token_ids is None, "the prompt is sent once"
    assert request.request_id == submit.request_id
    assert request.sampling_params.extra_args == {"colour": "red"}
    assert request.sampling_params.seed == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_and_header_agree_on_cached_tokens(graph: Graph, stream: bool) -> None:
    """The second output's hit on the first one's KV does not count."""
    given = {"enable-prompt-tokens-details": True, "max-num-seqs": 1}
    prompt = [300 + number % 600 + stream for number in range(600)]
    asked = completion(prompt=prompt, n=2, temperature=1, stream=stream)
    if stream:
        asked["stream_options"] = {"include_usage": True}
    async with sim_engines(graph, 1, slots=1, args=given):
        for cached in (0, 592):
            answer = await graph.http.post("/v1/completions", json=asked)
            usage = (events(answer)[-1] if stream else answer.json())["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
            assert int(answer.headers["x-pdserve-cached-tokens"]) == cached


async def test_docs_and_schema_have_existing_routes(graph: Graph) -> None:
    async with graph.worker():
        paths = (await graph.http.get("/openapi.json")).json()["paths"]
        docs = await graph.http.get("/docs")
        assert (await graph.http.get("/openapi.json?model=de%6Do")).status_code == 200
        missing = await graph.http.get("/openapi.json?a=b&model=a%2Fb+c")
        assert "`a/b c`" in missing.json()["error"]["message"]
        absent = [
            f"{method} {path}"
            for path, operations in paths.items()
            for method in operations
            if (await graph.http.request(method, path)).status_code in (404, 405) and "{" not in path
        ]
    assert docs.status_code == 200
    assert absent == []
    assert (
        GENERATING | TOKENIZING | {"/v1/models/{name}", "/requests/{id}", "/health", "/metrics"}
        <= paths.keys()
    )
