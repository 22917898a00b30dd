"""A wrong request has the same status with and without `stream`. Log, metrics and receipt say if a stream failed."""

import asyncio
import logging
import time
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from starlette.types import Message

from pdserve.contract.messages import Failed
from pdserve.frontend.edge.request_record import receipt_of
from pdserve.frontend.edge.request_state import RequestState
from pdserve.frontend.edge.response import ResponseWriter
from tests.conditions import until
from tests.frontend.conftest import Graph, in_session
from tests.frontend.test_generate import chat, completion, events

pytestmark = in_session
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
NO_SCHEMA = {"type": "nonsense"}
WRONG: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 50},
    "regex": {"structured_outputs": {"regex": "("}},
    "grammar": {"structured_outputs": {"grammar": "root ::= nothing"}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NO_SCHEMA}}},
    "logit_bias": {"logit_bias": {"999999": 1}},
    "allowed_token_ids": {"allowed_token_ids": [10**9]},
    "empty allowed_token_ids": {"allowed_token_ids": []},
    "stop_token_ids": {"stop_token_ids": [-1]},
    "thinking_token_budget": {"thinking_token_budget": 5},
}
RANK = "a wrong rank in a header"
CASES = [
    *((path, name) for path in (CHAT, COMPLETIONS) for name in WRONG),
    *((RESPONSES, name) for name in ("regex", "logit_bias", "stop_token_ids")),
    *((path, RANK) for path in (CHAT, COMPLETIONS, MESSAGES)),
]
"""Each route with RANK or a key of WRONG. For /v1/responses, vLLM reads no rank."""


def asked(path: str, name: str = "", **more: Any) -> tuple[dict[str, Any], dict[str, str]]:
    body = completion() if path == COMPLETIONS else chat(input="hello", max_output_tokens=8)
    fields = {"logprobs": 50} if (path, name) == (COMPLETIONS, "logprobs") else WRONG.get(name, {})
    return {**body, **fields, **more}, {"x-data-parallel-rank": "7"} if name == RANK else {}


async def post(graph: Graph, path: str, name: str = "", **more: Any) -> httpx.Response:
    body, headers = asked(path, name, **more)
    return await graph.http.post(path, json=body, headers=headers)


def counted(code: int) -> float:
    return REGISTRY.get_sample_value("pdserve_requests_total", {"model": "demo", "code": str(code)}) or 0.0


@pytest.mark.parametrize(("path", "name"), CASES)
async def test_a_wrong_request_is_answered_as_without_stream(
    graph: Graph, path: str, name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with graph.worker():
        whole = await post(graph, path, name)
        before = counted(400), counted(200)
        caplog.set_level(logging.INFO, "pdserve")
        stream = await post(graph, path, name, stream=True)
    await until(lambda: counted(400) > before[0])
    assert (whole.status_code, counted(200)) == (400, before[1])
    assert (stream.status_code, stream.json()) == (whole.status_code, whole.json())
    assert graph.plugins.receipts(1)[0].status == 400
    assert [line for line in caplog.messages if " code=400 " in line]
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_an_error_within_a_stream_is_recorded_as_a_failure(
    graph: Graph, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = counted(200), counted(500)
    caplog.set_level(logging.INFO, "pdserve.frontend.observability.request_log")
    async with graph.worker(pace=None) as worker:
        asking = asyncio.create_task(post(graph, path, stream=True))
        await worker.until(lambda: worker.jobs)
        await worker.step()
        await until(lambda: graph.plugins.receipts(1)[0].output_tokens == 1)
        await worker.send(Failed(worker.seen[0].request_id, "its weights melted"))
        answer = await asking
    assert answer.status_code == 200
    assert "its weights melted" in str(events(answer)[-1]["error"]), answer.text
    await until(lambda: (counted(200), counted(500)) == (before[0], before[1] + 1))
    receipt = graph.plugins.receipts(1)[0]
    assert (receipt.status, receipt.error) == (500, "its weights melted")
    assert [line for line in caplog.messages if " code=500 " in line]


@pytest.mark.parametrize(
    ("event", "status", "message"),
    [
        (b'data: {"error": {"message": "no", "code": 422, "param": "n"}}\n\n', 422, "no"),
        (b'event: error\ndata: {"type": "error", "error": {"message": "oh"}}\n\n', 500, "oh"),
        (b"event: error\ndata: nothing\n\n", 500, "internal error"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
async def test_an_error_event_is_a_failure_and_sets_the_status_if_first(
    event: bytes, status: int, message: str, begun: bool
) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    response = ResponseWriter(send, RequestState("r-1", CHAT, 0.0))
    headers = [(b"content-type", b"text/event-stream")]
    parts = [b"data: {}\n\n"] * begun + [event]
    await response({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await response({"type": "http.response.body", "body": part, "more_body": True})
    assert sent[0]["status"] == (200 if begun else status)
    assert message in sent[-1]["body"].decode() or begun
    receipt = receipt_of(response, "frontend-0", time.monotonic(), running=False)
    assert (receipt.status, response.failure and response.failure.message) == (status, message)
