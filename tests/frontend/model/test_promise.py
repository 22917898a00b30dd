"""What a decode worker learns of the promise to a client."""

import msgspec
import pytest
from msgspec import UNSET

from pdserve.messages import Promise, Submit, encode_to_decode
from pdserve.registry import keys
from pdserve.slo import SPARE, Promised
from tests.conditions import until
from tests.frontend.conftest import Graph
from tests.frontend.test_generate import complete
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = Promised(0.5, 0.06)
TODAY = {
    "type",
    "request_id",
    "prompt",
    "timeout",
    "body",
    "migrated",
    "engines_died",
    "traceparent",
    "client",
}


async def ask(graph: Graph, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await complete(graph, headers=named)).status_code


def promise(submit: Submit) -> Promise:
    assert isinstance(submit.promise, Promise)
    return submit.promise


async def test_without_a_promise_workers_get_what_they_got_before(graph: Graph) -> None:
    async with graph.worker() as worker:
        assert await ask(graph, x_slo_ttft_ms="never", x_slo_tpot_ms="60") == 200
    assert worker.seen[0].promise is UNSET
    assert msgspec.msgpack.decode(encode_to_decode(worker.seen[0])).keys() == TODAY


async def test_a_worker_gets_what_is_left_of_the_promise(graph: Graph) -> None:
    async with graph.worker(slo=Promised(300.0, 0.06)) as worker:
        assert await ask(graph) == await ask(graph, x_slo_ttft_ms="1000000", x_slo_tpot_ms="5") == 200
    for submit, ttft in zip(worker.seen, (300.0, 1000.0), strict=True):
        assert promise(submit).gap == 0.06
        assert ttft - 60 < (promise(submit).ttft or 0.0) < ttft


async def test_a_flexible_request_has_none_and_its_client_comes_last_at_the_worker(graph: Graph) -> None:
    async with graph.worker(slo=CHAT) as worker:
        for tier in ("auto", "flex"):
            assert (await complete(graph, service_tier=tier)).status_code == 200
    first, flexible = worker.seen
    assert (flexible.promise, flexible.client) == (UNSET, SPARE + first.client)


async def test_the_promise_changes_live(graph: Graph) -> None:
    async with graph.worker(slo=CHAT) as worker, MemoryRegistry(graph.registry) as registry:

        async def becomes(name: str, value: str | None, expected: Promised) -> None:
            key = keys.setting(name)
            await (registry.delete(key) if value is None else registry.put(key, value.encode()))
            await until(lambda: graph.models.find("demo").promised == expected)

        await becomes("slo-gap", "100ms", Promised(0.5, 0.1))
        await becomes("slo-ttft", "off", Promised(None, 0.1))
        await becomes("slo-gap", "soon", Promised(None, 0.06))
        assert await ask(graph) == 200
        assert promise(worker.seen[-1]) == Promise(None, 0.06)
        await becomes("slo-ttft", None, CHAT)
        await registry.delete(keys.setting("slo-gap"))
