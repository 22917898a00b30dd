"""A worker stalls: its requests without a token, and all new requests, go to other workers until it works again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from pdserve.contract.records import encode_record
from pdserve.process import engine_checks
from pdserve.registry import keys
from tests.conditions import holds, until
from tests.decode.graph import counted
from tests.frontend.conftest import Graph
from tests.frontend.model.echo import EchoWorker
from tests.frontend.model.sims import sim_workers
from tests.frontend.model.test_stand_in import stand_in
from tests.frontend.sequence.test_moving import post, steps
from tests.frontend.test_generate import complete
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"PROBE_INTERVAL": 0.02, "STALLS_AFTER": 0.1, "TICK": 0.02}.items():
        monkeypatch.setattr(engine_checks, name, seconds)


@asynccontextmanager
async def stalled(graph: Graph, worker: EchoWorker) -> AsyncIterator[None]:
    """While entered, the worker's record says that it is stalled."""
    async with MemoryRegistry(graph.registry) as registry:
        instance = replace(worker.instance, stalled=True)
        await registry.put(keys.instance(instance), encode_record(instance))
        yield


async def test_a_stalled_engine_gets_no_requests_until_it_steps_again(
    graph: Graph,
) -> None:
    before = counted("pdserve_migrations_total", reason="stalled")
    async with sim_workers(graph, 2) as (stuck, idle):
        stuck.engine.faults.going.clear()
        answers = await asyncio.gather(*(post(graph) for _ in range(8)))
        ways = [answer.headers["x-pdserve-instance"] for answer in answers]
        moved = f"{stuck.id},{idle.id}"
        assert set(ways) == {idle.id, moved}
        assert counted("pdserve_migrations_total", reason="stalled") == before + ways.count(moved)
        answers = [await complete(graph) for _ in range(4)]
        assert {answer.headers["x-pdserve-instance"] for answer in answers} == {idle.id}
        stuck.engine.faults.going.set()
        await until(lambda: not stuck.worker._presence.instance.stalled)
        await until(lambda: graph.processor().workers.capacity.max_requests == 2 * 256)
        answers = [await complete(graph) for _ in range(4)]
        assert {answer.headers["x-pdserve-instance"] for answer in answers} == {stuck.id, idle.id}
        await until(stuck.engine.all_blocks_free)


async def test_a_new_worker_takes_requests_without_a_token_from_a_stalled_one(
    graph: Graph,
) -> None:
    async with graph.worker(pace=None) as only:
        stream = post(graph)
        await steps(only, 1)
        async with stalled(graph, only):
            waiting = post(graph)
            await only.until(lambda: len(only.jobs) == 2)
            assert (await graph.http.get("/health")).status_code == 200
            async with graph.worker() as other:
                assert (await waiting).headers["x-pdserve-instance"] == f"{only.id},{other.id}"
                only.go()
                assert (await stream).headers["x-pdserve-instance"] == only.id


async def test_prefill_workers_stand_in_for_a_stalled_decode_worker(graph: Graph) -> None:
    async with stand_in(graph) as prefill, graph.worker(pace=None) as only:
        waiting = post(graph)
        await only.until(lambda: only.jobs)
        async with stalled(graph, only):
            assert (await waiting).headers["x-pdserve-instance"] == f"{only.id},{prefill.id}"
        only.go()
        await until(lambda: graph.processor().workers._ready() is graph.processor().workers._decode)
        assert (await complete(graph)).headers["x-pdserve-instance"] == only.id


async def test_a_silent_worker_is_stalled_until_it_is_heard(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open, as when the worker's process is stopped (SIGSTOP)."""
    async with graph.worker(pace=None) as silent, graph.worker() as other:
        requests = [post(graph), post(graph)]
        await silent.until(lambda: silent.jobs)
        link = graph.processor().workers._links[silent.id]
        monkeypatch.setattr(link, "last_received", lambda: 1.0)
        ways = {(await request).headers["x-pdserve-instance"] for request in requests}
        assert ways == {other.id, f"{silent.id},{other.id}"}
        assert {(await complete(graph)).headers["x-pdserve-instance"] for _ in range(3)} == {other.id}
        monkeypatch.undo()
        silent.go()
        await until(lambda: link.silent_checks == 0)
        ways = {(await complete(graph)).headers["x-pdserve-instance"] for _ in range(4)}
        assert ways == {other.id, silent.id}


async def test_an_engine_that_computes_for_long_keeps_its_requests(graph: Graph) -> None:
    async with sim_workers(graph, 2) as (slow, other):
        slow.engine.faults.slow = other.engine.faults.slow = 200.0
        answers = await asyncio.gather(*(post(graph, max_tokens=1) for _ in range(4)))
        assert {answer.headers["x-pdserve-instance"] for answer in answers} == {slow.id, other.id}
        await holds(lambda: not slow.worker._engine_watch.stalled)


async def test_prefill_workers_stand_in_for_a_decode_worker_that_stalls_after_it_reconnects(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with graph.worker(pace=None) as only, stand_in(graph) as prefill:
        monkeypatch.setattr("pdserve.frontend.workers.pool.MIN_RETRY_DELAY", 0.1)
        await holds(lambda: graph.models.usable_workers()["demo"], 0.2)
        (connection,) = only._stream._frontends.values()
        connection.cut("was silent")
        await until(lambda: any(link.failures for link in graph.models.links()))
        await until(lambda: graph.models.usable_workers()["demo"] == 1)
        waiting = post(graph)
        await only.until(lambda: only.jobs)
        async with stalled(graph, only):
            assert (await waiting).headers["x-pdserve-instance"] == f"{only.id},{prefill.id}"


async def test_a_request_is_moved_from_at_most_two_stalled_workers(graph: Graph) -> None:
    """The request may make engines hang, and would otherwise move for ever."""
    async with graph.worker(pace=None) as first, graph.worker(pace=None) as second:
        request = post(graph)
        for here in (first, second):
            await here.until(lambda here=here: here.jobs)
            async with stalled(graph, here):
                await here.until(lambda here=here: not here.jobs)
            await until(lambda: not len(graph.processor().workers._stalled))
        await first.until(lambda: first.jobs)
        async with stalled(graph, first):
            await until(lambda: first.id in graph.processor().workers._stalled)
            await holds(lambda: first.jobs and not second.jobs)
            first.go()
            assert len((await request).json()["choices"]) == 1
        assert len(first.seen) == 2
