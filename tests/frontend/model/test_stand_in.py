"""While no decode worker is available, a prefill worker decodes."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from msgspec.structs import replace

from pdserve.contract.records import Role, encode_record
from pdserve.registry import keys
from tests.conditions import holds, until
from tests.decode.graph import counted
from tests.frontend.conftest import Graph, card
from tests.frontend.model.echo import EchoWorker, continuation
from tests.frontend.sequence.test_moving import RED, having, post, steps
from tests.frontend.test_generate import PROMPT, complete, text_of
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")


def stand_in(
    graph: Graph, pace: float | None = 0.0, at_once: int = 0
) -> AbstractAsyncContextManager[EchoWorker]:
    return graph.worker(role=Role.PREFILL, connected=False, pace=pace, at_once=at_once)


@asynccontextmanager
async def without_decode_worker(
    graph: Graph, pace: float | None = None, at_once: int = 0
) -> AsyncIterator[EchoWorker]:
    """Yield a prefill worker of a model that has lost its decode worker."""
    async with stand_in(graph, pace, at_once) as prefill:
        async with graph.worker():
            pass
        yield prefill


@pytest.mark.parametrize("generated", [0, 1, 5])
async def test_a_request_continues_at_one_stand_in_after_another(graph: Graph, generated: int) -> None:
    """New requests go to a prefill worker too, and the model stays listed."""
    async with graph.worker(pace=None) as decode, stand_in(graph, pace=None) as first:
        request = post(graph, max_tokens=12)
        await steps(decode, generated)
        assert not first.hello, "not connected while a decode worker is available"
        await decode.die()
        await steps(first, 1)
        async with stand_in(graph) as second:
            await first.die()
            answer = await request
            expected = await text_of(graph, continuation(PROMPT, 12))
            (listed,) = (await graph.http.get("/v1/models")).json()["data"]
            assert (await complete(graph)).headers["x-pdserve-instance"] == second.id
    assert answer.json()["choices"][0]["text"] == expected
    assert answer.headers["x-pdserve-instance"] == ",".join(w.id for w in (decode, first, second))
    assert [submit.prompt for submit in first.seen] == [PROMPT + continuation(PROMPT, generated)]
    assert second.seen[0].prompt == PROMPT + continuation(PROMPT, generated + 1)
    assert listed["id"] == "demo"


async def test_while_the_only_decode_worker_drains_new_requests_go_to_the_stand_in(graph: Graph) -> None:
    async with EchoWorker("decode-0-drains", pace=None) as decode, MemoryRegistry(graph.registry) as registry:
        await registry.put(keys.card("demo", decode.id), encode_record(card()))
        await registry.put(keys.instance(decode.instance), encode_record(decode.instance))
        await decode.until(lambda: decode.hello)
        async with stand_in(graph) as prefill:
            running = post(graph)
            await steps(decode, 1)
            assert not prefill.hello
            draining = replace(decode.instance, draining=True)
            await registry.put(keys.instance(draining), encode_record(draining))
            await prefill.until(lambda: prefill.hello)
            answer = await complete(graph)
            decode.go()
            assert (await running).headers["x-pdserve-instance"] == decode.id
        assert answer.headers["x-pdserve-instance"] == prefill.id


async def test_a_new_decode_worker_gets_new_requests_and_those_without_tokens(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.frontend.workers.pool.HAND_OVER_POLL", 0.01)
    async with without_decode_worker(graph) as prefill:
        begun = post(graph, max_tokens=3)
        await steps(prefill, 1)
        waiting = post(graph)
        await prefill.until(lambda: len(prefill.jobs) == 2)
        async with graph.worker() as decode:
            fresh = await complete(graph)
            moved = await waiting
            assert fresh.headers["x-pdserve-instance"] == decode.id
            assert moved.headers["x-pdserve-instance"] == f"{prefill.id},{decode.id}"
            await prefill.until(lambda: len(prefill.jobs) == 1)
            await steps(prefill, 2)
            assert (await begun).headers["x-pdserve-instance"] == prefill.id


async def test_requests_on_a_stand_in_are_handed_over_unless_they_need_a_replay(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.frontend.workers.pool.HAND_OVER_AFTER", 0.0)
    monkeypatch.setattr("pdserve.frontend.workers.pool.HAND_OVER_POLL", 0.01)
    before = counted("pdserve_migrations_total", reason="handed-over")
    async with without_decode_worker(graph) as prefill:
        moves, stays = post(graph, max_tokens=12), post(graph, presence_penalty=0.5)
        await prefill.until(lambda: len(prefill.jobs) == 2)
        await steps(prefill, 5)
        async with graph.worker() as decode:
            answer = await moves
            expected = await text_of(graph, continuation(PROMPT, 12))
            await holds(lambda: not stays.done() and len(decode.seen) == 1)
            prefill.go()
            assert (await stays).headers["x-pdserve-instance"] == prefill.id
            await until(lambda: {link.to for link in graph.models.links()} == {decode.id})
        assert answer.json()["choices"][0]["text"] == expected
        assert answer.headers["x-pdserve-instance"] == f"{prefill.id},{decode.id}"
        (submit,) = decode.seen
        assert (submit.prompt, submit.migrated) == (PROMPT + continuation(PROMPT, 5), False)
    assert counted("pdserve_migrations_total", reason="handed-over") == before + 1


async def test_a_stand_in_keeps_a_request_whose_adapter_no_decode_worker_has(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.frontend.workers.pool.HAND_OVER_POLL", 0.01)
    async with without_decode_worker(graph) as prefill, having(graph, prefill, RED):
        await until(lambda: "red" in graph.models.find("demo").adapters)
        request = post(graph, model="red")
        await prefill.until(lambda: prefill.jobs)
        async with graph.worker() as decode:
            await holds(lambda: prefill.jobs)
            async with having(graph, decode, RED):
                assert (await request).headers["x-pdserve-instance"] == f"{prefill.id},{decode.id}"


async def test_a_stand_in_gets_no_more_requests_than_its_engine_runs(graph: Graph) -> None:
    async with without_decode_worker(graph, at_once=2) as prefill:
        await until(lambda: graph.models.usable_workers().get("demo") == 1)
        requests = [post(graph) for _ in range(3)]
        await prefill.until(lambda: len(prefill.seen) == 2)
        await holds(lambda: len(prefill.seen) == 2)
        prefill.go()
        assert {(await request).status_code for request in requests} == {200}


async def test_prefill_workers_without_an_address_or_with_other_weights_do_not_stand_in(graph: Graph) -> None:
    silent, other = (
        EchoWorker(f"prefill-{loaded}", loaded=loaded, role=Role.PREFILL) for loaded in ("", "other")
    )
    async with silent, other, MemoryRegistry(graph.registry) as registry:
        for instance in (replace(silent.instance, address=""), other.instance):
            await registry.put(keys.instance(instance), encode_record(instance))
        async with graph.worker():
            pass
        await until(lambda: graph.models.usable_workers().get("demo") == 0)
        answer = await complete(graph, headers={"x-request-timeout": "0.3"})
        assert answer.status_code == 503
        assert silent.hello == other.hello == ""


async def test_a_lost_connection_is_renewed_before_a_prefill_worker_stands_in(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker cuts the connection, as workers do when a frontend is silent for too long."""
    async with graph.worker() as decode, stand_in(graph) as prefill:
        monkeypatch.setattr("pdserve.frontend.workers.pool.MIN_RETRY_DELAY", 0.1)
        await holds(lambda: graph.models.usable_workers()["demo"], 0.2)
        (connection,) = decode._stream._frontends.values()
        connection.cut("was silent")
        await until(lambda: any(link.failures for link in graph.models.links()))
        assert (await complete(graph)).headers["x-pdserve-instance"] == decode.id
        assert not prefill.hello
        await decode.die()
        assert (await complete(graph)).headers["x-pdserve-instance"] == prefill.id
