"""Workers test their engines and warm up with each other before they get requests."""

import asyncio
import time

import pytest

from pdserve.contract.messages import PrefillDone, PrefillRequest, PrefillStarted
from pdserve.contract.records import WIRE, Instance, Role, encode_record
from pdserve.decode.peers import prefill_workers
from pdserve.decode.remote import warm_up
from pdserve.decode.worker import DecodeWorker
from pdserve.prefill import answer_sender
from pdserve.prefill.worker import PrefillWorker
from pdserve.process import engine_checks, presence
from pdserve.process.engine_checks import self_test
from pdserve.util.errors import EngineDead
from tests.conditions import holds, until
from tests.decode.graph import WorkerGraph, counted, shared_queue
from tests.engine.sims import LOADED, body, sim
from tests.memory.registry import MemoryRegistry

LONG = [300 + (7 * number) % 600 for number in range(500)]
SILENT = Instance("prefill-x", Role.PREFILL, "demo", wire=WIRE, fingerprint=LOADED)


def warm(result: str) -> float:
    return counted("pdserve_warm_ups_total", result=result)


def newcomers(graph: WorkerGraph) -> list[str]:
    return [key for key in graph.registry.data if key.startswith("/t/newcomers/")]


@pytest.fixture
def impatient_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "WARM_UP_WITHIN", 0.3)
    monkeypatch.setattr(warm_up, "FIRST_RETRY", 0.05)
    monkeypatch.setattr("pdserve.decode.remote.client.WARM_UP_TIMEOUT", 0.2)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the bound of warm-ups so long that a test that waits for it fails."""
    monkeypatch.setattr(presence, "WARM_UP_WITHIN", 60.0)


async def test_only_one_metric_counts_warm_ups(
    slow: None,
) -> None:
    before = warm("ok")
    names = ["pdserve_prefill_queue_wait_seconds_count", "pdserve_kv_transfer_seconds_count"]
    waits, transfers = map(counted, names)
    local = counted("pdserve_prefill_total", mode="local", reason="short")
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        await until(lambda: warm("ok") == before + 1)
        await graph.start_decoding(graph.make(DecodeWorker, "decode-1"))
        assert warm("ok") == before + 2
        assert [counted(name) for name in names] == [waits, transfers]
        assert counted("pdserve_prefill_total", mode="local", reason="short") == local
        assert graph.depth == len(graph.decode.requests) == graph.decode.requests.waiting == 0
        assert not newcomers(graph)
        await prefill.frees_all()
        await graph.frees_all()
        assert (await (await graph.frontend()).ask(LONG)).way[0] == "remote"
        assert [counted(name) for name in names] == [waits + 1, transfers + 1]


async def test_a_prefill_worker_waits_for_all_registered_decode_workers(
    slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill worker registers once its KV was read."""
    monkeypatch.setattr(presence, "INTERVAL", 0.01)
    graph = WorkerGraph()
    decode = Instance("decode-x", Role.DECODE, "demo", fingerprint=LOADED)
    async with (
        MemoryRegistry(graph.registry, "t") as registry,
        shared_queue(graph.broker) as queue,
        sim(Role.DECODE, "decode-x") as engine,
    ):
        await registry.put("instances/decode/decode-x", encode_record(decode))
        answers = queue.answers("decode-x")
        worker = graph.make(PrefillWorker, "prefill-0")
        life = asyncio.create_task(worker.run())
        await until(lambda: bool(newcomers(graph)))
        prompt = LONG[:18]
        request = PrefillRequest("w", "decode-x", prompt, 60.0, 16, body(), warm_up=True)
        await queue.address("prefill-0", request)
        assert await anext(answers) == PrefillStarted("w", "prefill-0")
        done = await anext(answers)
        assert isinstance(done, PrefillDone)
        await holds(lambda: not worker.ready.is_set())
        assert "instances/prefill/prefill-0" not in await registry.read("")
        await engine.generate("w", prompt, body(1), done.handle)
        await until(worker.ready.is_set)
        assert "instances/prefill/prefill-0" in await registry.read("")
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


async def test_a_decode_worker_registers_despite_a_silent_prefill_worker(
    impatient_pairs: None,
) -> None:
    graph, failed = WorkerGraph(), warm("failed")
    async with MemoryRegistry(graph.registry, "t") as registry, shared_queue(graph.broker) as queue:
        await registry.put("newcomers/prefill/prefill-x", encode_record(SILENT))
        async with graph:
            assert graph.decode.ready.is_set()
            await until(lambda: warm("failed") >= failed + 2)
            assert (await (await graph.frontend()).ask(LONG)).way[1] == "no-prefill-worker"
            assert isinstance(await anext(queue.addressed("prefill-x")), PrefillRequest)


@pytest.mark.usefixtures("brief_transfers")
async def test_a_failed_warm_up_is_repeated_and_is_no_failure_of_a_request(
    impatient_pairs: None,
) -> None:
    reasons = ("transfer", "timeout")
    failures = [counted("pdserve_remote_prefill_failures_total", reason=reason) for reason in reasons]
    failed, ok = warm("failed"), warm("ok")
    async with WorkerGraph() as graph:
        prefill = await graph.prefill(drop_transfers=True)
        await until(lambda: warm("failed") > failed)
        assert warm("ok") == ok
        prefill.engine.faults.drop_transfers = False
        await until(lambda: warm("ok") == ok + 1)
        await prefill.frees_all()
        await graph.frees_all()
    assert failures == [counted("pdserve_remote_prefill_failures_total", reason=reason) for reason in reasons]


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_a_worker_stops_waiting_for_a_newcomer_that_left(slow: None, role: Role) -> None:
    """A newcomer is a worker that warms up before it registers. This one does not answer, and then leaves."""
    graph, other = WorkerGraph(), Role.PREFILL if role is Role.DECODE else Role.DECODE
    key, hung = f"newcomers/{other.value}/x", Instance("x", other, "demo", wire=WIRE, fingerprint=LOADED)
    worker = graph.decode if role is Role.DECODE else graph.make(PrefillWorker, "prefill-0")
    async with MemoryRegistry(graph.registry, "t") as registry:
        await registry.put(key, encode_record(hung))
        life = asyncio.create_task(worker.run())
        await until(lambda: bool(worker.view.newcomers(role, "demo")))
        await holds(lambda: not worker.ready.is_set())
        await registry.delete(key)
        await until(worker.ready.is_set, within=20.0)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


async def test_a_worker_whose_engine_dies_of_its_first_work_never_registers() -> None:
    graph = WorkerGraph()
    graph.decode_engine.faults.dead = True
    async with MemoryRegistry(graph.registry, "t") as registry:
        with pytest.raises(EngineDead, match="on command"):
            await graph.decode.run()
        assert not await registry.read("")


async def test_a_worker_whose_engine_dies_of_a_warm_up_ends() -> None:
    """The death interrupts the warm-up, which then cannot cancel its request in the dead engine."""
    async with WorkerGraph() as graph:
        graph.decode_engine.faults.fatal_pulls = True
        await graph.start(graph.make(PrefillWorker, "prefill-0"))
        with pytest.raises(EngineDead, match="on command"):
            await asyncio.wait_for(asyncio.shield(graph.life), 10)
        assert graph.decode.unready() == "the simulated engine died on command"


async def test_an_engine_that_hangs_at_its_first_work_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"PROBE_INTERVAL": 0.05, "HANGS_AFTER": 0.2, "TICK": 0.05}.items():
        monkeypatch.setattr(engine_checks, name, seconds)
    async with sim(Role.DECODE, "decode-0") as engine:
        engine.faults.going.clear()
        with pytest.raises(EngineDead, match="hangs"):
            await asyncio.wait_for(self_test(engine), 10)


async def test_a_drain_does_not_wait_for_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "WARM_UP_WITHIN", 0.05)
    monkeypatch.setattr(warm_up, "FIRST_RETRY", 0.01)
    graph = WorkerGraph(drain_timeout=30.0)
    async with MemoryRegistry(graph.registry, "t") as registry:
        await registry.put("newcomers/prefill/prefill-x", encode_record(SILENT))
        async with graph:
            frontend = await graph.frontend()
            running = await frontend.stream(max_tokens=200)
            graph.decode.stop()
            await until(lambda: not graph.decode.ready.is_set())
            await until(lambda: bool(graph.decode.requests.of("")))
            assert not (await frontend.end_of(running)).failed
            began = time.monotonic()
            await graph.life
            assert time.monotonic() - began < warm_up.TIMEOUT / 2


async def test_of_many_workers_only_some_pairs_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other pairs connect at their first request."""
    monkeypatch.setattr(prefill_workers, "MAX_PAIRS", 1)
    monkeypatch.setattr(answer_sender, "MAX_PAIRS", 0)
    before = warm("ok")
    async with WorkerGraph() as graph:
        for number in range(3):
            await graph.prefill(f"prefill-{number}")
        chosen = graph.decode._workers.to_warm_up()
        assert len(chosen) == 1
        await until(lambda: warm("ok") > before)
        assert warm("ok") - before <= 3, "one pair at a time; a later worker may replace the chosen one"
        frontend = await graph.frontend()
        for number in range(6):
            assert (await frontend.ask([number, *LONG])).finished
