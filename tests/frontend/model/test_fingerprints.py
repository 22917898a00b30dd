"""A rolling update of a model's weights or settings, as the frontend sees it."""

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from pdserve.contract.messages import Failed
from pdserve.contract.records import encode_record
from pdserve.registry import keys
from tests.conditions import until
from tests.frontend.conftest import Graph, card
from tests.frontend.test_generate import chat, completion, delta, events
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")


BODIES = {
    "/v1/completions": completion(model="rolled", max_tokens=6),
    "/v1/chat/completions": chat(model="rolled", max_tokens=6),
    "/v1/responses": {"model": "rolled", "input": "hello", "max_output_tokens": 6},
}


def post(graph: Graph, path: str = "/v1/completions", **changes: Any) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(graph.http.post(path, json={**BODIES[path], **changes}))


async def test_new_requests_go_to_the_newest_weights_and_old_ones_stay(graph: Graph) -> None:
    async with graph.worker("rolled", pace=None, loaded="old", generation=1) as old:
        running = post(graph)
        await old.until(lambda: len(old.jobs) == 1)
        async with graph.worker("rolled", loaded="new", generation=2) as new:
            assert [(await post(graph)).status_code for _ in range(4)] == [200] * 4
            assert len(new.seen) == 4
            assert len(old.seen) == 1
            assert graph.models._mixed["rolled"] == {"old", "new"}, "mixed weights were logged"
            await old.step()
            await old.die()  # a new worker is available, and another old one will come
            await asyncio.sleep(0)
            assert len(new.seen) == 4, "the old request does not continue with other weights"
            async with graph.worker("rolled", loaded="old", generation=1, connected=False) as another:
                await another.until(lambda: another.seen)
                assert (await running).status_code == 200
                assert (await post(graph)).status_code == 200
            assert (len(new.seen), len(another.seen)) == (5, 1), "an older card changes nothing"
    await until(lambda: "rolled" not in graph.models._mixed)


@pytest.mark.parametrize("theirs", ["0.31.0", "0.99.0"])
async def test_a_frontend_uses_only_workers_of_its_vllm_version(
    graph: Graph, caplog: pytest.LogCaptureFixture, theirs: str
) -> None:
    """The other version's model card is newer."""
    other = card("upgraded", fingerprint="new", vllm_version=theirs, generation=99)
    async with MemoryRegistry(graph.registry) as registry:
        await registry.put(keys.card("upgraded", "decode-9-up"), encode_record(other))
        await until(lambda: theirs in graph.models.why_unserved("upgraded"))
        assert "upgraded" not in [listed.name for listed in graph.models.listed()]
        refused = await post(graph, model="upgraded")
        async with graph.worker("upgraded", loaded="old", generation=9):
            answer = await post(graph, model="upgraded")
    assert (refused.status_code, answer.status_code) == (503, 200)
    assert theirs in refused.json()["error"]["message"]
    assert any("upgraded is not served" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("path", "stream"),
    [("/v1/completions", False), ("/v1/chat/completions", True), ("/v1/responses", True)],
)
async def test_waiting_requests_go_to_the_newest_model_when_no_old_worker_is_left(
    graph: Graph, path: str, stream: bool
) -> None:
    """Two requests are at the old worker without a token, two wait in admission."""
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(
            graph.worker("rolled", pace=None, at_once=2, loaded="old", generation=11)
        )
        asked = [post(graph, path, stream=stream) for _ in range(4)]
        served = graph.models.find("rolled")
        await old.until(lambda: len(old.seen) == 2)
        await until(lambda: len(served.admission) == 2)
        async with graph.worker("rolled", loaded="new", generation=12) as new:
            assert graph.models.load() >= 4, "requests of a retiring model count too"
            assert not new.seen
            await stack.aclose()
            answers = await asyncio.wait_for(asyncio.gather(*asked), 8)
            assert [answer.status_code for answer in answers] == [200] * 4
            assert len(new.seen) == 4
            assert {answer.headers["x-pdserve-instance"] for answer in answers} == {new.id}
            assert not stream or "".join(map(delta, events(answers[0])))
        await until(lambda: served not in graph.models._retiring)


async def test_all_outputs_of_a_request_restart_with_the_new_weights(graph: Graph) -> None:
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(
            graph.worker("rolled", pace=None, at_once=2, loaded="old", generation=13)
        )
        asked = post(graph, prompt=[[300, 301], [302]], n=2, temperature=1.0)
        await old.until(lambda: len(old.seen) == 2)
        async with graph.worker("rolled", loaded="new", generation=14) as new:
            await stack.aclose()
            answer = await asyncio.wait_for(asked, 8)
    assert answer.status_code == 200, answer.text
    assert len(new.seen) == len(answer.json()["choices"]) == 4
    (receipt,) = graph.plugins.receipts(1)
    assert receipt.instances == [new.id]
    assert [hop.name for hop in receipt.hops] == ["admission", "migration", "admission", "decode"]


async def test_a_suspect_is_not_tried_with_other_weights(graph: Graph) -> None:
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(graph.worker("rolled", loaded="old", generation=15))
        old.fail = Failed("", "its engine died", retry=True, engines_died=1)
        asked = post(graph)
        await old.until(lambda: old.seen)
        async with graph.worker("rolled", loaded="new", generation=16) as new:
            await stack.aclose()
            answer = await asyncio.wait_for(asked, 8)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "was replaced by another model of this name" in answer.json()["error"]["message"]
    assert not new.seen


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_request_for_a_broken_model_goes_to_its_replacement(graph: Graph, path: str) -> None:
    bad = {"chat-template": "nowhere.jinja"}
    broken = card("rolled", engine_args=bad, fingerprint=f"broken {path}", generation=17)
    async with MemoryRegistry(graph.registry) as registry:
        async with graph.models._context.building:
            await registry.put(keys.card("rolled", "decode-9-broken"), encode_record(broken))
            await until(lambda: graph.models._models["rolled"].card == broken)
            asked = asyncio.create_task(graph.http.post(path, json={"model": "rolled", "prompt": "hello"}))
            admission = graph.models._models["rolled"].admission
            await until(lambda: len(admission) + len(admission._inside) == 1)
            worker = graph.worker("rolled", loaded="new", generation=18, connected=False)
            stack = AsyncExitStack()
            await stack.enter_async_context(worker)
            await until(lambda: graph.models._models["rolled"].card != broken)
        async with stack:
            answer = await asyncio.wait_for(asked, 8)
    assert answer.status_code == 200, answer.text


async def test_a_long_request_stays_with_the_weights_that_began_it(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's header may allow more than `request-timeout`, so the old model stays longer than that."""
    context = dataclasses.replace(graph.models._context, request_timeout=0.1)
    monkeypatch.setattr(graph.models, "_context", context)
    async with graph.worker("rolled", pace=None, loaded="old", generation=19) as old:
        asked = post(graph)
        await old.until(lambda: len(old.jobs) == 1)
        async with graph.worker("rolled", loaded="new", generation=20):
            await asyncio.wait({asked}, timeout=0.5)
            for _ in range(6):
                await old.step()
            assert (await asked).status_code == 200
