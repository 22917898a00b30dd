"""`/v1/responses` without a store, as vLLM has it by default: each response belongs to its own request alone."""

import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.frontend.conftest import Graph

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK = {"model": "demo", "input": "hello", "max_output_tokens": 4, "temperature": 0}


@pytest.mark.parametrize("models", [["demo"], ["demo", "another"]])
async def test_a_response_to_be_stored_is_answered_and_cannot_be_retrieved(
    graph: Graph, models: list[str]
) -> None:
    async with AsyncExitStack() as stack:
        for model in models:
            await stack.enter_async_context(graph.worker(model))
        made = await graph.http.post("/v1/responses", json={**ASK, "store": True})
        missing = await graph.http.get(f"/v1/responses/{made.json()['id']}")
    assert made.status_code == 200
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == f"Response with id '{made.json()['id']}' not found."


@pytest.mark.parametrize(
    "more", [{}, {"stream": True}, {"store": True}, {"store": False}, {"store": "false"}]
)
async def test_nothing_is_made_in_the_background(graph: Graph, more: dict[str, Any]) -> None:
    """vLLM starts it for `store: "false"`, and keeps the response for ever."""
    async with graph.worker() as worker:
        answer = await graph.http.post("/v1/responses", json={**ASK, "background": True, **more})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "background"
        assert not worker.seen


async def test_no_response_is_continued(graph: Graph) -> None:
    async with graph.worker() as worker:
        made = await graph.http.post("/v1/responses", json=ASK)
        for previous in (made.json()["id"], "", "../../x"):
            answer = await graph.http.post("/v1/responses", json={**ASK, "previous_response_id": previous})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"Response with id '{previous}' not found."
        assert len(worker.seen) == 1


async def test_a_previous_response_that_is_no_text(graph: Graph) -> None:
    async with graph.worker():
        body = json.dumps({**ASK, "previous_response_id": "\ud800"})
        answer = await graph.http.post("/v1/responses", content=body)
    assert answer.status_code == 400


async def test_the_official_client_gets_its_own_error(graph: Graph) -> None:
    async with graph.worker(), AsyncOpenAI(base_url=f"{graph.url}/v1", api_key="none") as client:
        made = await client.responses.create(model="demo", input="hello", max_output_tokens=4)
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(NotFoundError):
            await client.responses.cancel(made.id)
