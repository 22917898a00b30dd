"""Registered prefill workers that pull no prompts or cannot answer."""

import pytest

from pdserve.contract.messages import PrefillRequest, PrefillStarted
from pdserve.contract.records import Role
from pdserve.decode.peers import prefill_workers
from pdserve.process import engine_checks
from tests.conditions import holds, until
from tests.decode.graph import LONG, ActedPrefill, FrontendStream, Prefill, WorkerGraph, failing
from tests.engine.sims import body


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote prefills do not time out within a test."""
    monkeypatch.setattr("pdserve.decode.policy.decision.MIN_TIMEOUT", 60.0)


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"PROBE_INTERVAL": 0.02, "STALLS_AFTER": 0.1, "TICK": 0.02}.items():
        monkeypatch.setattr(engine_checks, name, seconds)


FALLBACK, NO_WORKER = ("local", "fallback"), ("local", "no-prefill-worker")


async def test_a_prefill_worker_reports_the_loss_and_return_of_the_queue(
    graph: WorkerGraph, prefill: Prefill
) -> None:
    def lost() -> list[bool]:
        return [worker.queue_lost for worker in graph.decode.view.instances(Role.PREFILL)]

    assert lost() == [False]
    await graph.broker.down()
    await until(lambda: lost() == [True])
    await graph.broker.up()
    await until(lambda: lost() == [False])


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("end", ["it has lost the queue", "it is killed", "it hangs"])
async def test_a_worker_that_cannot_answer_is_not_waited_for(
    graph: WorkerGraph,
    frontend: FrontendStream,
    acted: ActedPrefill,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    """A worker that lost the queue reports that. Killed and hung workers report nothing, and are still registered."""
    reports = end == "it has lost the queue"
    monkeypatch.setattr(prefill_workers, "POLL_INTERVAL", 60.0 if reports else 0.02)
    taken, waiting = await frontend.submit(LONG), await frontend.submit(LONG[1:])
    await until(lambda: graph.depth == 2)
    listening, acted.queue = acted.queue, await graph.queue()
    await acted.pull()
    await acted.start(taken)
    if reports:
        await acted.register(queue_lost=True)
    elif end == "it hangs":
        graph.broker.hung.add("prefill-x")
    else:
        await listening.__aexit__(None, None, None)
    assert (await frontend.end_of(taken)).way == FALLBACK
    assert (await frontend.end_of(waiting)).way == FALLBACK
    assert (await frontend.ask(LONG[2:])).way == NO_WORKER
    if end == "it is killed":
        await acted.queue.expect_addressed("prefill-x")
    elif end == "it hangs":
        graph.broker.hung.clear()
    else:
        await graph.act_prefill("prefill-y")
    await until(lambda: bool(graph.decode._workers.available()))
    await frontend.submit(LONG[3:])
    await until(lambda: graph.depth > 0)


@pytest.mark.usefixtures("patient", "quick_watch")
async def test_prompts_of_a_stalled_prefill_worker_are_prefilled_locally(
    graph: WorkerGraph, frontend: FrontendStream, prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker pulls nothing until its engine works again."""
    prefill.engine.faults.going.clear()
    with failing("stalled"):
        assert (await frontend.ask(LONG)).way == FALLBACK
    assert "stalled: the engine of prefill-0 stalled (" in caplog.text
    pulling = prefill.worker._prompts.pulling
    assert pulling.stalled
    assert (await frontend.ask(LONG[1:])).way == NO_WORKER
    other = await graph.queue()
    await other.publish(PrefillRequest("untaken", "decode-0", LONG, 30.0, 16, body()))
    await holds(lambda: graph.depth == 1)
    prefill.engine.faults.going.set()
    await until(lambda: graph.depth == 0)
    await until(lambda: bool(graph.decode._workers.available()))
    assert (await frontend.ask(LONG[2:])).way == ("remote", "long")
    await prefill.frees_all()


async def test_after_two_untaken_prompts_all_are_local_until_a_worker_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A third prompt waits with a longer timeout. It is prefilled locally, too."""
    monkeypatch.setattr("pdserve.decode.policy.decision.MIN_TIMEOUT", 0.1)
    async with WorkerGraph(max_prefill_queue_size=9) as graph:
        acted, frontend = await graph.act_prefill(), await graph.frontend()
        timeout = graph.decode._remote.timeout
        monkeypatch.setattr(timeout, "seconds", lambda *_: 60.0)
        long = await frontend.submit(LONG)
        await until(lambda: graph.depth == 1)
        monkeypatch.setattr(timeout, "seconds", lambda *_: 0.1)
        with failing("timeout", 2):
            for prompt in (LONG[1:], LONG[2:]):
                assert (await frontend.ask(prompt)).way == FALLBACK
        assert (await frontend.end_of(long)).way == FALLBACK
        assert caplog.text.count("no prefill worker pulls prompts") == 1
        assert (await frontend.ask(LONG[3:])).way == NO_WORKER
        await acted.answer(PrefillStarted("of a request that is over", "prefill-x"))
        await until(lambda: bool(graph.decode._workers.available()))
        assert (await frontend.ask(LONG[4:])).way == FALLBACK
