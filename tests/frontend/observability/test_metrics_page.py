"""The graph's metrics page, and the names that monitoring relies on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import REGISTRY

from pdserve.config.api_keys import ApiKey
from pdserve.contract.records import Instance, Role, encode_record
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.observability import metrics_page
from pdserve.frontend.observability.metrics_page import MetricsPage
from pdserve.registry import keys
from tests.conditions import until
from tests.decode.graph import counted
from tests.frontend.conftest import Graph
from tests.frontend.model.sims import sim_engines
from tests.frontend.test_generate import complete
from tests.memory.registry import MemoryRegistry
from tests.tcp import tcp_server

pytestmark = pytest.mark.asyncio(loop_scope="session")


PAGE = (
    b"# HELP pdserve_prefill_total Where\n# TYPE pdserve_prefill_total counter\npdserve_prefill_total 7.0\n"
)


@asynccontextmanager
async def page_server(fetched: list[str], answers: bool = True) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fetched.append(str(await reader.readuntil(b"\r\n\r\n")))
        if answers:
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(PAGE)}\r\nContent-Type: text/plain\r\n\r\n"
            writer.write(head.encode() + PAGE)
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    async with tcp_server(serve) as port:
        yield f"http://127.0.0.1:{port}/metrics"


async def test_the_page_includes_other_processes(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> None:
    monkeypatch.setattr(metrics_page, "KEPT", 0.0)  # an earlier test's page may be cached
    async with (
        graph.worker() as worker,
        page_server([]) as good,
        page_server([], answers=False) as silent,
        MemoryRegistry(graph.registry) as registry,
    ):
        for name, url in [("p-0", good), ("p-1", silent), ("p-2", "http://127.0.0.1:1/metrics")]:
            record = encode_record(Instance(name, Role.PREFILL, metrics=url))
            await registry.put(keys.instance(Instance(name, Role.PREFILL)), record)
        await complete(graph)
        await until(lambda: REGISTRY.get_sample_value("pdserve_instances", {"role": "prefill"}) == 3)
        page = (await graph.http.get("/metrics")).text
    assert 'pdserve_prefill_total{instance="p-0"} 7.0' in page
    own = 'instance="frontend-0-test"'
    assert f'pdserve_instances{{{own},role="prefill"}} 3.0' in page
    assert f'source="frontend-0-test",instance="{worker.id}",policy="round-robin"}}' in page
    for name in ("requests_total", "ttft_seconds_count", "itl_seconds_count", "e2e_seconds_count"):
        assert any(line.startswith(f"pdserve_{name}{{") and own in line for line in page.splitlines()), name
    assert f'vllm:generation_tokens_total{{{own},engine="0",model_name="demo"}}' in page
    assert "vllm:kv_cache_usage_perc" not in page, "a frontend has no KV cache"


@pytest.mark.parametrize(
    ("client", "host", "key", "status"),
    [
        ("127.0.0.1", "localhost:8000", "", 200),
        ("127.0.0.1", "evil.example", "", 401),  # DNS rebinding
        ("10.1.2.3", "10.1.2.4", "", 401),
        ("10.1.2.3", "10.1.2.4", "b", 403),
        ("10.1.2.3", "10.1.2.4", "a", 200),
    ],
)
async def test_other_hosts_need_an_admin_key(
    graph: Graph, client: str, host: str, key: str, status: int
) -> None:
    app = graph.app_with(ApiKeys([ApiKey.of("a", admin=True), ApiKey.of("b")]))
    transport = httpx.ASGITransport(app, client=(client, 1))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
        assert (await http.get("/metrics", headers={"x-api-key": key})).status_code == status


async def test_scrapers_share_one_fetch_of_a_bounded_number_of_pages(
    monkeypatch: pytest.MonkeyPatch, graph: Graph
) -> None:
    monkeypatch.setattr(metrics_page, "KEPT", 60.0)
    fetched: list[str] = []
    async with page_server(fetched) as good, MemoryRegistry(graph.registry) as registry:
        instance = Instance("p-7", Role.PREFILL, metrics=good)
        await registry.put(keys.instance(instance), encode_record(instance))
        page = MetricsPage(graph.context)
        texts = await asyncio.gather(*(page.get() for _ in range(50)))
        monkeypatch.setattr(metrics_page, "MAX_MERGED", 0)
        too_many = await MetricsPage(graph.context).get()
    assert len(fetched) == 1
    assert set(texts) == {texts[0]}
    assert b'instance="p-7"' in texts[0]
    assert b'instance="p-7"' not in too_many


async def test_requests_are_counted_by_code(graph: Graph) -> None:
    def counts() -> list[float]:
        labels = [("demo", "200"), ("demo", "400"), ("", "404")]
        return [counted("pdserve_requests_total", model=model, code=code) for model, code in labels]

    before = counts()
    async with graph.worker():
        await complete(graph)
        await complete(graph, temperature=-1)
        await complete(graph, model="x")
        await until(lambda: counts() == [count + 1 for count in before])


WAYS = {"mode": "remote", "reason": "long"}, {"mode": "local", "reason": "transfer"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_remote_prefill_whose_transfer_failed_counts_as_local(graph: Graph, stream: bool) -> None:
    async with sim_engines(graph, 1, 1) as (_, prefill):
        before = [counted("pdserve_prefill_total", **labels) for labels in WAYS]
        prefill.faults.drop_transfers = True
        prompt = [350 + stream, *range(400, 600)]
        answer = await complete(graph, prompt=prompt, stream=stream)
        after = [counted("pdserve_prefill_total", **labels) for labels in WAYS]
    assert answer.status_code == 200
    # a stream's headers leave with its first token, before the transfer fails
    assert answer.headers["x-pdserve-prefill"] == ("remote" if stream else "local")
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)


async def test_cached_tokens_of_the_usage_leave_out_a_transfer(graph: Graph) -> None:
    """Cached tokens are prefix hits: none at first, then at the prefill worker, then at the first decode worker."""
    body = {"model": "demo", "input": "The code of the box is 1234. " * 30, "max_output_tokens": 4}
    async with sim_engines(graph, 2, 1):
        answers = [await graph.http.post("/v1/responses", json=body) for _ in range(3)]
    ways = [answer.headers["x-pdserve-prefill"] for answer in answers]
    cached = [answer.json()["usage"]["input_tokens_details"]["cached_tokens"] for answer in answers]
    assert ways == ["remote", "remote", "local"]
    assert cached[0] == 0
    assert min(cached[1:]) > 100
