"""What the frontend decides without vLLM's app: headers, refusals, limits, deadlines, disconnects."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.routing import Route

from pdserve.config.schema import AdmissionLimits
from pdserve.contract.messages import Failed
from pdserve.frontend.edge.body import BodyReader, max_body
from pdserve.frontend.plugins import FrontendPages
from tests.conditions import until
from tests.frontend.conftest import Graph, address_of
from tests.frontend.model.echo import EchoWorker
from tests.frontend.test_generate import chat, complete, completion

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_headers_name_the_workers_of_both_sequences(graph: Graph) -> None:
    async with graph.worker(prefill="remote") as first, graph.worker(prefill="local") as second:
        answer = await complete(graph, n=2, temperature=1.0)
    assert answer.headers["x-pdserve-prefill"] == "local,remote"
    assert set(answer.headers["x-pdserve-instance"].split(",")) == {first.id, second.id}


@pytest.mark.parametrize("given", ["abc", "", "with space", "x" * 200, "a/b"])
async def test_errors_have_the_request_id_too_and_an_invalid_one_is_replaced(
    graph: Graph, given: str
) -> None:
    answer = await graph.http.get("/nowhere", headers={"x-request-id": given})
    assert answer.status_code == 404
    told = answer.headers["x-request-id"]
    assert told == given if given == "abc" else len(told) == 32
    assert "/nowhere" in answer.json()["error"]["message"]


@pytest.mark.parametrize("tokenizing", [False, True])
async def test_an_oversize_body_is_413(graph: Graph, tokenizing: bool) -> None:
    most = max_body(4096, tokenizing=tokenizing)
    async with graph.worker():
        await until(lambda: bool(graph.models.listed()))
        path = "/tokenize" if tokenizing else "/v1/completions"
        answer = await graph.http.post(path, content=b" " * (most + 1))
        fine = await graph.http.post("/tokenize", json={"prompt": "a b c d " * 5000})
    assert answer.status_code == 413
    assert str(most) in answer.json()["error"]["message"]
    assert fine.json()["count"] > 4096  # vLLM tokenizes texts beyond the context too


async def test_a_refused_body_is_read_so_that_the_answer_arrives(graph: Graph) -> None:
    """Closing a socket with unread data resets it, so a client that reads only after writing would miss the 413."""
    body = b" " * (20 << 20)

    async def send() -> bytes:
        reader, writer = await asyncio.open_connection(*address_of(graph.url))
        writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer

    for answer in await asyncio.gather(*(send() for _ in range(5))):
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"PayloadTooLarge" in answer


async def test_long_texts_to_tokenize_do_not_delay_prompts(graph: Graph) -> None:
    async with graph.worker():
        body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 4000}
        long = [asyncio.create_task(graph.http.post("/tokenize", json=body)) for _ in range(6)]
        await until(lambda: graph.models.find("demo").admission.tokenizing.locked())
        answer = await complete(graph, prompt="a b c")
        waiting = sum(not request.done() for request in long)
        assert answer.status_code == 200
        assert waiting >= 3
        assert {answer.status_code for answer in await asyncio.gather(*long)} == {200}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "extra",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"ec_transfer_params": {"a": 1}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ],
)
async def test_transfer_params_are_refused(graph: Graph, path: str, extra: dict[str, object]) -> None:
    async with graph.worker() as worker:
        answer = await graph.http.post(path, json={**completion(), **chat(), **extra})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "transfer_params" in error["message"]
    assert path == "/v1/messages" or "transfer_params" in error["param"]
    assert not worker.seen


async def test_pages_that_probes_ask_for(graph: Graph) -> None:
    async with graph.worker(pace=None) as worker:
        await until(lambda: bool(graph.models.usable_workers().get("demo")))
        for method in ("GET", "POST"):
            assert (await graph.http.request(method, "/ping")).status_code == 200
        assert (await graph.http.get("/load")).json() == {"server_load": 0}
        running = asyncio.create_task(complete(graph))
        await worker.until(lambda: worker.jobs)
        assert (await graph.http.get("/load")).json() == {"server_load": 1}
        await finish(worker)
        await running


@pytest.mark.parametrize("pace", [None, 0.02], ids=["silent", "a stream that has begun"])
async def test_a_deadline_ends_a_request_everywhere(graph: Graph, pace: float | None) -> None:
    async with graph.worker(pace=pace) as worker:
        body = completion(max_tokens=3000, stream=pace is not None)
        answer = await graph.http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.3"})
        await worker.until(lambda: worker.cancelled)
    assert answer.status_code == (200 if pace else 504)
    assert "deadline" in (answer.text.splitlines()[-2] if pace else answer.json()["error"]["message"])
    assert 0 < worker.seen[0].timeout <= 10


@asynccontextmanager
async def full(
    graph: Graph, limits: AdmissionLimits
) -> AsyncIterator[tuple[EchoWorker, "asyncio.Task[httpx.Response]"]]:
    """Yield a worker with two slots, and the request that uses both slots. `finish` ends the request."""
    async with graph.worker(pace=None, at_once=2) as worker:
        await until(lambda: bool(graph.models.usable_workers().get("demo")))
        running = asyncio.create_task(complete(graph, n=2, temperature=1.0))
        await worker.until(lambda: len(worker.jobs) == 2)
        admission = graph.models.find("demo").admission
        usual, admission.limits = admission.limits, limits
        try:
            yield worker, running
        finally:
            admission.limits = usual
            running.cancel()


async def finish(worker: EchoWorker) -> None:
    while worker.jobs:
        await worker.step()


async def test_a_request_beyond_the_queue_is_429_and_has_a_receipt(graph: Graph) -> None:
    async with full(graph, AdmissionLimits(max_waiting=1)) as (worker, running):
        admission = graph.models.find("demo").admission
        waiting = asyncio.create_task(complete(graph, stream=True, headers={"x-request-id": "waits"}))
        await until(lambda: len(admission) == 1)
        (receipt,) = graph.plugins.receipts(1)
        assert [hop.name for hop in receipt.hops] == ["admission"]
        refused = await complete(graph, stream=True)
        (receipt,) = graph.plugins.receipts(1)
        assert (receipt.status, "queue is full" in receipt.error) == (429, True)
        counted = await graph.http.post("/tokenize", json={"model": "demo", "prompt": "a b"})
        assert len(worker.seen) == 2
        await finish(worker)
        assert (await running).status_code == 200
        await worker.until(lambda: len(worker.seen) == 3)
        await finish(worker)
        assert (await waiting).status_code == 200
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "RateLimitError"
    assert counted.status_code == 200  # tokenizing needs no engine
    (receipt,) = graph.plugins.receipts(1, None, "waits")
    assert (receipt.hops[0].name, receipt.hops[0].why) == ("admission", "")
    assert receipt.hops[0].seconds > 0


async def test_a_request_that_ends_while_it_waits_reaches_no_worker(graph: Graph) -> None:
    async with full(graph, AdmissionLimits()) as (worker, running):
        admission = graph.models.find("demo").admission
        waiting = asyncio.create_task(complete(graph))
        await until(lambda: len(admission) == 1)
        waiting.cancel()
        await until(lambda: not len(admission))
        late = await complete(graph, headers={"x-request-timeout": "0.2"})
        await finish(worker)
        assert (await running).status_code == 200
    assert late.status_code == 504
    assert "deadline" in late.json()["error"]["message"]
    assert len(worker.seen) == 2


async def test_an_unfinished_body_is_408_at_the_deadline(graph: Graph) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await asyncio.sleep(1)

    answer = await graph.http.post("/v1/completions", content=slow(), headers={"x-request-timeout": "0.2"})
    assert answer.status_code == 408


async def test_bodies_are_bounded_together_until_they_are_answered(
    monkeypatch: pytest.MonkeyPatch, graph: Graph
) -> None:
    reader = BodyReader(bound=4000)
    monkeypatch.setattr(graph.app, "_bodies", reader)
    other = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with (
        graph.worker(pace=None, at_once=8) as worker,
        httpx.AsyncClient(base_url=graph.url, transport=other, timeout=30) as neighbour,
    ):
        body = completion(prompt="a " * 700)
        first = asyncio.create_task(graph.http.post("/v1/completions", json=body))
        await worker.until(lambda: worker.jobs)
        refused = await graph.http.post("/v1/completions", json=body)  # a client gets half of the bound
        second = asyncio.create_task(neighbour.post("/v1/completions", json=completion(prompt="a " * 500)))
        await worker.until(lambda: len(worker.jobs) == 2)
        await finish(worker)
        assert [(await request).status_code for request in (first, second)] == [200, 200]
        third = asyncio.create_task(graph.http.post("/v1/completions", json=body))
        await worker.until(lambda: worker.jobs)
        await finish(worker)
        assert (await third).status_code == 200
    assert refused.status_code == 429
    assert (reader.budget.used, dict(reader.budget.of_client)) == (0, {})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_error_is_in_the_response(graph: Graph, stream: bool) -> None:
    async with graph.worker() as worker:
        worker.fail = Failed("", "this prompt does not fit the KV cache")
        answer = await complete(graph, stream=stream)
        worker.fail = None
        fine = await complete(graph)
    assert [each.status_code for each in (answer, fine)] == [500, 200]
    assert "KV cache" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "InternalServerError"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/models", "/health"])
async def test_a_trailing_slash_is_redirected(graph: Graph, path: str) -> None:
    answer = await graph.http.post(f"{path}/?a=b", content=b"x" * 100_000)
    assert (answer.status_code, answer.headers["location"]) == (307, f"{graph.url}{path}?a=b")


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/v1/completions", "POST"), ("/v1/models", "GET, HEAD"), ("/ping", "GET, HEAD, POST")],
)
async def test_a_wrong_method_is_answered_with_the_right_ones(graph: Graph, path: str, methods: str) -> None:
    answer = await graph.http.delete(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)
    assert answer.json()["error"]["message"] == f"{path} takes {methods}"


async def test_the_methods_of_all_routes_of_a_path_are_allowed(graph: Graph) -> None:
    routes = [Route("/things", graph.app, methods=[method]) for method in ("POST", "GET")]
    pages = FrontendPages(graph.models, routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(pages), base_url="http://x") as http:
        answer = await http.delete("/things")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")
