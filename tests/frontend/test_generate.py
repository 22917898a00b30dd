"""Every route that generates, against an echoing worker: vLLM's own app does the talking."""

import json
from typing import Any

import httpx
import pytest

from pdserve.frontend.app import GENERATING, TOKENIZING
from tests.frontend.conftest import Graph
from tests.frontend.model.echo import continuation

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


async def test_completion_streams_and_does_not(graph: Graph) -> None:
    async with graph.worker():
        whole = await graph.http.post("/v1/completions", json=completion())
        stream = await graph.http.post("/v1/completions", json=completion(stream=True))
        expected = await text_of(graph, continuation(PROMPT, 8))
    assert whole.status_code == 200, whole.text
    assert whole.json()["choices"][0]["text"] == expected
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert whole.json()["usage"]["completion_tokens"] == 8
    assert "".join(event["choices"][0]["text"] for event in events(stream)) == expected
    assert stream.text.rstrip().endswith("data: [DONE]")


async def test_chat_streams_and_does_not(graph: Graph) -> None:
    async with graph.worker() as worker:
        whole = await graph.http.post("/v1/chat/completions", json=chat())
        stream = await graph.http.post("/v1/chat/completions", json=chat(stream=True))
        expected = await text_of(graph, continuation(worker.seen[0].prompt, 8))
    assert whole.json()["choices"][0]["message"]["content"] == expected
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events(stream) if event["choices"]]
    assert "".join(deltas) == expected


async def test_several_outputs_and_several_prompts(graph: Graph) -> None:
    async with graph.worker():
        body = completion(n=2, temperature=1.0, prompt=[PROMPT, [400, 401]])
        answer = await graph.http.post("/v1/completions", json=body)
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert answer.json()["usage"] == {
        **answer.json()["usage"],
        "prompt_tokens": len(PROMPT) + 2,
        "completion_tokens": 32,
    }


async def test_logprobs(graph: Graph) -> None:
    async with graph.worker():
        answer = await graph.http.post("/v1/completions", json=completion(logprobs=2, max_tokens=3))
        chats = await graph.http.post("/v1/chat/completions", json=chat(logprobs=True, top_logprobs=1))
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert len(logprobs["top_logprobs"]) == 3
    assert len(chats.json()["choices"][0]["logprobs"]["content"]) == 8


async def test_stop_string_ends_it_at_the_worker_too(graph: Graph) -> None:
    async with graph.worker() as worker:
        words = (await text_of(graph, continuation(PROMPT, 8))).split()
        answer = await graph.http.post("/v1/completions", json=completion(stop=[words[2]], max_tokens=3000))
        await worker.until(lambda: worker.cancelled)
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == words[2]
    assert words[2] not in choice["text"]
    assert worker.cancelled == [worker.seen[0].request_id]


async def test_responses(graph: Graph) -> None:
    async with graph.worker() as worker:
        body = {"model": "demo", "input": "hello", "max_output_tokens": 6, "temperature": 0}
        whole = await graph.http.post("/v1/responses", json=body)
        stream = await graph.http.post("/v1/responses", json={**body, "stream": True})
        expected = await text_of(graph, continuation(worker.seen[0].prompt, 6))
    assert whole.json()["output"][0]["content"][0]["text"] == expected
    assert stream.headers["x-pdserve-instance"] == worker.id
    assert stream.text.startswith("event: response.created")
    assert "event: response.completed" in stream.text or "event: response.incomplete" in stream.text


async def test_anthropic_messages(graph: Graph) -> None:
    async with graph.worker() as worker:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
        whole = await graph.http.post("/v1/messages", json={**body, "temperature": 0})
        stream = await graph.http.post("/v1/messages", json={**body, "stream": True})
        counted = await graph.http.post("/v1/messages/count_tokens", json=body)
        expected = await text_of(graph, continuation(worker.seen[0].prompt, 6))
    assert whole.json()["content"][0]["text"] == expected
    assert stream.headers["x-pdserve-instance"] == worker.id
    assert stream.text.startswith("event: message_start")
    assert "event: message_stop" in stream.text
    assert whole.json()["usage"]["input_tokens"] == counted.json()["input_tokens"]


async def test_tokenize_and_detokenize(graph: Graph) -> None:
    async with graph.worker():
        there = await graph.http.post("/tokenize", json={"model": "demo", "prompt": "hello there"})
        back = await graph.http.post("/detokenize", json={"model": "demo", "tokens": there.json()["tokens"]})
    assert there.json()["count"] == len(there.json()["tokens"]) > 0
    assert back.json()["prompt"] == "hello there"


async def test_the_request_as_the_worker_gets_it(graph: Graph) -> None:
    async with graph.worker() as worker:
        await graph.http.post(
            "/v1/completions",
            json=completion(vllm_xargs={"colour": "red"}, seed=7),
            headers={"x-request-timeout": "9"},
        )
    submit, request = worker.seen[0], worker.requests[0]
    assert submit.prompt == PROMPT
    assert request.sampling_params.max_tokens == 8
    assert request.prompt_token_ids is None, "the prompt travels once"
    assert request.request_id == submit.request_id
    assert request.sampling_params.extra_args == {"colour": "red"}
    assert request.sampling_params.seed == 7


async def test_model_need_not_be_named_where_there_is_one(graph: Graph) -> None:
    async with graph.worker():
        body = completion()
        del body["model"]
        answer = await graph.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["model"] == "demo"


async def test_docs_and_schema(graph: Graph) -> None:
    async with graph.worker():
        paths = (await graph.http.get("/openapi.json")).json()["paths"]
        docs = await graph.http.get("/docs")
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


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -2}, "temperature"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**9]}, "vocab"),
        ({"prompt": [300] * 5000}, "4096"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"prompt_embeds": "AAAA"}, "prompt"),
    ],
)
async def test_bad_values_are_the_clients_fault(graph: Graph, changes: dict[str, object], part: str) -> None:
    async with graph.worker():
        answer = await graph.http.post("/v1/completions", json=completion(**changes))
        fine = await graph.http.post("/v1/completions", json=completion())
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]
    assert fine.status_code == 200


async def test_images_are_refused(graph: Graph) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with graph.worker():
        body = chat(messages=[{"role": "user", "content": [picture]}])
        answer = await graph.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
