"""Limits of API keys over HTTP, as the official clients see them."""

import asyncio
import logging
import time

import anthropic
import httpx
import openai
import pytest
from prometheus_client import REGISTRY

from pdserve.config.api_keys import ApiKey, KeyLimits
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.keys.limits import KeyQuota
from tests.conditions import until
from tests.frontend.conftest import Graph
from tests.frontend.test_generate import chat, complete, completion

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "sk-0123456789abcdef"
AS_ALICE = {"authorization": f"Bearer {KEY}"}


class Alice:
    """A key of the graph, with the limits that a test gives it."""

    def __init__(self, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
        self._graph = graph
        self._patch = monkeypatch

    def may(self, **limits: int) -> KeyQuota:
        keys = ApiKeys([ApiKey.of(KEY, "alice", KeyLimits(**limits))])
        self._patch.setattr(self._graph.app, "_keys", keys)
        quota = keys.ledger.quota("alice", time.monotonic())
        assert quota
        return quota


@pytest.fixture
def alice(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> Alice:
    return Alice(graph, monkeypatch)


async def post(graph: Graph, path: str = "/v1/completions", **fields: object) -> httpx.Response:
    body = chat(**fields) if path == "/v1/messages" else completion(**fields)
    return await graph.http.post(path, json=body, headers=AS_ALICE)


async def test_the_headers_and_the_error_are_openais(graph: Graph, alice: Alice) -> None:
    alice.may(requests_per_minute=2, tokens_per_minute=6000)
    async with graph.worker():
        for left in (1, 0):
            answer = await post(graph, max_tokens=8)
            assert answer.status_code == 200
            told = {name: value for name, value in answer.headers.items() if "ratelimit" in name}
            assert told.pop("x-ratelimit-reset-requests").startswith(("2", "30s") if left else ("5", "1m0s"))
            assert told.pop("x-ratelimit-reset-tokens").endswith(("ms", "s"))
            assert 5900 < int(told.pop("x-ratelimit-remaining-tokens")) < 6000
            assert told == {
                "x-ratelimit-limit-requests": "2",
                "x-ratelimit-remaining-requests": str(left),
                "x-ratelimit-limit-tokens": "6000",
            }
        refused = await post(graph)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert error.pop("message").startswith("this API key has used its 2 requests a minute; try again in 2")
    assert error == {"type": "requests", "param": None, "code": "rate_limit_exceeded"}
    assert 20 < int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


async def test_the_headers_and_the_error_are_anthropics(graph: Graph, alice: Alice) -> None:
    alice.may(requests_per_minute=1)
    async with graph.worker():
        answer, refused = await post(graph, "/v1/messages"), await post(graph, "/v1/messages")
    assert (answer.status_code, refused.status_code) == (200, 429)
    assert answer.headers["anthropic-ratelimit-requests-limit"] == "1"
    assert answer.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert answer.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    body = refused.json()
    assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")


async def test_a_key_without_limits_has_no_headers(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph.app, "_keys", ApiKeys([ApiKey.of(KEY, "alice")]))
    async with graph.worker():
        answer = await post(graph)
    assert not [name for name in answer.headers if "ratelimit" in name]


async def test_official_clients_wait_and_try_again(graph: Graph, alice: Alice) -> None:
    """As long as Retry-After says: with less the second try would be refused, too."""
    openais = openai.AsyncOpenAI(base_url=f"{graph.url}/v1", api_key=KEY, max_retries=1)
    anthropics = anthropic.AsyncAnthropic(base_url=graph.url, api_key=KEY, max_retries=1)
    async with graph.worker(), openais, anthropics:
        ask = [{"role": "user", "content": "Hi"}]
        for call in (
            lambda: openais.chat.completions.create(model="demo", messages=ask, max_tokens=4),  # type: ignore[arg-type]
            lambda: anthropics.messages.create(model="demo", messages=ask, max_tokens=4),  # type: ignore[arg-type]
        ):
            quota = alice.may(requests_per_minute=60)
            for _ in range(60):
                quota.take("requests", 1, time.monotonic())
            started = time.monotonic()
            await call()
            assert time.monotonic() - started > 0.8


async def test_official_clients_raise_their_own_errors(
    graph: Graph, alice: Alice, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.frontend.watching.log")
    quota = alice.may(tokens_per_minute=100)
    openais = openai.AsyncOpenAI(base_url=f"{graph.url}/v1", api_key=KEY, max_retries=1)
    anthropics = anthropic.AsyncAnthropic(base_url=graph.url, api_key=KEY, max_retries=1)
    async with graph.worker(), openais, anthropics:
        with pytest.raises(openai.RateLimitError, match="make it smaller") as error:
            await openais.completions.create(model="demo", prompt="Hi", max_tokens=1000)
        assert (error.value.code, error.value.type) == ("rate_limit_exceeded", "tokens")
        with pytest.raises(anthropic.RateLimitError, match="make it smaller"):
            await anthropics.messages.create(
                model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=1000
            )
    tries = [record for record in caplog.records if "key=alice" in record.getMessage()]
    assert len(tries) == 2  # it would not help: they do not try again
    assert quota.running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_counted_as_they_were(graph: Graph, alice: Alice, stream: bool) -> None:
    quota = alice.may(tokens_per_minute=60_000, requests_per_minute=60)
    async with graph.worker():
        answer = await post(graph, max_tokens=8, n=2, temperature=1, stream=stream)
    assert answer.status_code == 200
    assert quota.used == {"requests": 1, "tokens": 4 + 2 * 8}
    assert quota.running == 0


async def test_a_stream_that_is_cancelled_gives_back_what_it_did_not_use(graph: Graph, alice: Alice) -> None:
    quota = alice.may(tokens_per_minute=60_000, concurrent_requests=1)
    async with graph.worker(pace=0.01) as worker:
        request = asyncio.create_task(post(graph, max_tokens=3000, stream=True))
        await worker.until(lambda: any(job.generated for job in worker.jobs.values()))
        assert quota.used["tokens"] > 3000
        assert (await post(graph)).json()["error"]["message"] == "this API key may have 1 requests at a time"
        request.cancel()
        await until(lambda: not quota.running)
    assert 4 < quota.used["tokens"] < 1000


async def test_a_request_that_moves_to_another_worker_counts_once(graph: Graph, alice: Alice) -> None:
    quota = alice.may(tokens_per_minute=60_000, requests_per_minute=60)
    async with graph.worker(pace=0.01) as first:
        request = asyncio.create_task(post(graph, max_tokens=50))
        await first.until(lambda: any(job.generated for job in first.jobs.values()))
        async with graph.worker():
            await first.__aexit__(None, None, None)
            assert (await request).status_code == 200
    assert quota.used == {"requests": 1, "tokens": 4 + 50}


@pytest.mark.parametrize(
    ("path", "body", "status", "requests"),
    [
        ("/tokenize", {"prompt": "Hi"}, 200, 1),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}, 200, 1),
        ("/v1/completions", {"prompt": "Hi", "temperature": -1}, 400, 1),
        ("/v1/completions", {"prompt": "Hi", "model": "other"}, 404, 1),
    ],
)
async def test_what_counts_as_a_request_and_not_as_tokens(
    graph: Graph, alice: Alice, path: str, body: dict[str, object], status: int, requests: int
) -> None:
    quota = alice.may(tokens_per_minute=60_000, requests_per_minute=60)
    async with graph.worker():
        answer = await graph.http.post(path, json={"model": "demo"} | body, headers=AS_ALICE)
        assert (await graph.http.get("/v1/models", headers=AS_ALICE)).status_code == 200
    assert (answer.status_code, quota.used) == (status, {"requests": requests, "tokens": 0})
    kind = "anthropic-ratelimit-requests-limit" if "messages" in path else "x-ratelimit-limit-requests"
    assert answer.headers[kind] == "60"


async def test_more_outputs_than_any_limit_are_refused(graph: Graph, alice: Alice) -> None:
    alice.may(tokens_per_minute=1000)
    async with graph.worker():
        answer = await post(graph, n=10**300, prompt=["a"] * 20)
    assert answer.status_code == 429
    assert "make it smaller" in answer.json()["error"]["message"]


async def test_what_the_graph_does_not_serve_does_not_count(graph: Graph, alice: Alice) -> None:
    quota = alice.may(tokens_per_minute=60_000, requests_per_minute=60)
    async with graph.worker() as worker:
        await worker.until(lambda: worker.hello)
    answer = await complete(graph, headers=AS_ALICE | {"x-request-timeout": "0.2"})
    assert answer.status_code == 503
    await until(lambda: quota.used == {"requests": 0, "tokens": 0})  # once the answer has left


async def test_metrics_are_by_the_name_of_the_key(graph: Graph, alice: Alice) -> None:
    alice.may(requests_per_minute=60)

    def counted() -> list[float]:
        """Requests that were answered, tokens of prompts and of outputs."""
        found = [
            ("requests", {"code": "200"}),
            ("tokens", {"kind": "prompt"}),
            ("tokens", {"kind": "output"}),
        ]
        names = [(f"pdserve_key_{what}_total", {"key": "alice", **labels}) for what, labels in found]
        return [REGISTRY.get_sample_value(*name) or 0.0 for name in names]

    before = counted()
    async with graph.worker():
        await post(graph, max_tokens=8)
        await complete(graph)
    assert [after - early for after, early in zip(counted(), before, strict=True)] == [1, 4, 8]
    ApiKeys([ApiKey.of(KEY, "alice")]).replace([])
    assert counted()[0] == 0
