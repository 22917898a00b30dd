"""Limits of API keys over HTTP, as the official clients see them."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

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


Limit = Callable[..., KeyQuota]


@pytest.fixture
def limit(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Return a function that sets limits of alice's key, the graph's only one."""

    def limit(**limits: int) -> KeyQuota:
        keys = ApiKeys([ApiKey.of(KEY, "alice", KeyLimits(**limits))])
        monkeypatch.setattr(graph.app, "_keys", keys)
        quota = keys.ledger.quota("alice", time.monotonic())
        assert quota
        return quota

    return limit


async def post(graph: Graph, path: str = "/v1/completions", **fields: object) -> httpx.Response:
    body = chat(**fields) if path == "/v1/messages" else completion(**fields)
    return await graph.http.post(path, json=body, headers=AS_ALICE)


async def test_the_headers_and_the_error_are_openais(graph: Graph, limit: Limit) -> None:
    limit(requests_per_minute=2, tokens_per_minute=6000)
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


async def test_the_headers_and_the_error_are_anthropics(graph: Graph, limit: Limit) -> None:
    limit(requests_per_minute=1)
    async with graph.worker():
        answer, refused = await post(graph, "/v1/messages"), await post(graph, "/v1/messages")
    assert (answer.status_code, refused.status_code) == (200, 429)
    assert answer.headers["anthropic-ratelimit-requests-limit"] == "1"
    assert answer.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert answer.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    body = refused.json()
    assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")


async def test_official_clients_retry_where_it_helps(
    graph: Graph, limit: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients wait as Retry-After says. For a request over the minute's tokens, they raise an error at once."""
    caplog.set_level(logging.INFO, "pdserve.frontend.observability.request_log")
    openais = openai.AsyncOpenAI(base_url=f"{graph.url}/v1", api_key=KEY, max_retries=1)
    anthropics = anthropic.AsyncAnthropic(base_url=graph.url, api_key=KEY, max_retries=1)
    hello: Any = [{"role": "user", "content": "Hi"}]
    named = {"x-request-id": "large"}
    async with graph.worker(), openais, anthropics:
        limit(requests_per_minute=120).take("requests", 120, started := time.monotonic())
        await asyncio.gather(
            openais.chat.completions.create(model="demo", messages=hello, max_tokens=4),
            anthropics.messages.create(model="demo", messages=hello, max_tokens=4),
        )
        assert time.monotonic() - started > 0.8
        quota = limit(tokens_per_minute=100)
        with pytest.raises(openai.RateLimitError, match="make it smaller") as error:
            await openais.completions.create(model="demo", prompt="Hi", max_tokens=1000, extra_headers=named)
        assert (error.value.code, error.value.type) == ("rate_limit_exceeded", "tokens")
        with pytest.raises(anthropic.RateLimitError, match="make it smaller"):
            await anthropics.messages.create(
                model="demo", messages=hello, max_tokens=1000, extra_headers=named
            )
    tries = [record for record in caplog.records if record.getMessage().startswith("large ")]
    assert len(tries) == 2  # one try for each client
    assert quota.running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_used_tokens_are_counted(graph: Graph, limit: Limit, stream: bool) -> None:
    quota = limit(tokens_per_minute=60_000, requests_per_minute=60)
    async with graph.worker():
        answer = await post(graph, max_tokens=8, n=2, temperature=1, stream=stream)
    assert answer.status_code == 200
    assert quota.used == {"requests": 1, "tokens": 4 + 2 * 8}
    assert quota.running == 0


async def test_a_cancelled_stream_gives_back_unused_tokens(graph: Graph, limit: Limit) -> None:
    quota = limit(tokens_per_minute=60_000, concurrent_requests=1)
    async with graph.worker(pace=0.01) as worker:
        request = asyncio.create_task(post(graph, max_tokens=3000, stream=True))
        await worker.until(lambda: any(job.generated for job in worker.jobs.values()))
        assert quota.used["tokens"] > 3000
        assert (await post(graph)).json()["error"]["message"] == "this API key may have 1 requests at a time"
        request.cancel()
        await until(lambda: not quota.running)
    assert 4 < quota.used["tokens"] < 1000


@pytest.mark.parametrize(
    ("path", "body", "status", "requests"),
    [
        ("/tokenize", {"prompt": "Hi"}, 200, 1),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}, 200, 1),
        ("/v1/completions", {"prompt": "Hi", "temperature": -1}, 400, 1),
        ("/v1/completions", {"prompt": "Hi", "model": "other"}, 404, 1),
        ("/v1/completions", {"prompt": ["Hi"] * 20, "n": 10**300}, 429, 0),
    ],
)
async def test_requests_without_output_use_no_tokens(
    graph: Graph, limit: Limit, path: str, body: dict[str, object], status: int, requests: int
) -> None:
    quota = limit(tokens_per_minute=60_000, requests_per_minute=60)
    async with graph.worker():
        answer = await graph.http.post(path, json={"model": "demo"} | body, headers=AS_ALICE)
        assert (await graph.http.get("/v1/models", headers=AS_ALICE)).status_code == 200
    assert (answer.status_code, quota.used) == (status, {"requests": requests, "tokens": 0})
    kind = "anthropic-ratelimit-requests-limit" if "messages" in path else "x-ratelimit-limit-requests"
    assert answer.headers[kind] == "60"


async def test_a_request_with_a_503_does_not_count(graph: Graph, limit: Limit) -> None:
    quota = limit(tokens_per_minute=60_000, requests_per_minute=60)
    async with graph.worker():
        pass
    answer = await complete(graph, headers=AS_ALICE | {"x-request-timeout": "0.2"})
    assert answer.status_code == 503
    # the request is given back once the answer has left
    await until(lambda: quota.used == {"requests": 0, "tokens": 0})


async def test_log_line_and_metrics_have_the_name_of_the_key(
    graph: Graph, limit: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve")

    def counted() -> list[float]:
        """Return requests with status 200, prompt tokens and output tokens."""
        found = [("requests", "code", "200"), ("tokens", "kind", "prompt"), ("tokens", "kind", "output")]
        names = [
            (f"pdserve_key_{what}_total", {"key": "alice", label: value}) for what, label, value in found
        ]
        return [REGISTRY.get_sample_value(*name) or 0.0 for name in names]

    before = counted()
    async with graph.worker() as worker:
        await complete(graph, headers={"x-request-id": "line-1"})
        limit(requests_per_minute=60)
        await post(graph, max_tokens=8)
        await complete(graph)
    lines = [
        each.getMessage()
        for each in caplog.records
        if each.name == "pdserve.frontend.observability.request_log"
    ]
    without, with_key, refused = lines
    assert without.startswith("line-1 /v1/completions model=demo code=200 tokens=4+8 ttft=0.")
    assert f"prefill=local instance={worker.id}" in without
    assert " /v1/completions key=alice model=demo code=200 " in with_key
    assert " code=401 " in refused
    assert KEY not in caplog.text
    assert [after - early for after, early in zip(counted(), before, strict=True)] == [1, 4, 8]
    ApiKeys([ApiKey.of(KEY, "alice")]).replace([])
    assert counted()[0] == 0
