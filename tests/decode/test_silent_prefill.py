"""Prefill workers that are registered, and take no prompts or cannot answer."""

import pytest

from pdserve.decode import prefill_workers
from pdserve.messages import PrefillStarted
from pdserve.records import Instance, Role, encode_record
from tests.conditions import until
from tests.decode.graph import Answered, WorkerGraph
from tests.decode.test_worker import LONG, act_prefill, expected, failures
from tests.engine.sims import LOADED

LOST = Instance("prefill-x", Role.PREFILL, "demo", fingerprint=LOADED, queue_lost=True)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote prefill may take longer than any test."""
    monkeypatch.setattr("pdserve.decode.policy.FLOOR", 60.0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.decode.policy.FLOOR", 0.1)
    monkeypatch.setattr("pdserve.decode.policy.SLACK", 0.0)


def here(answered: Answered, prompt: list[int], reason: str) -> bool:
    return (answered.tokens, answered.way) == (expected(prompt, 4), ("local", reason))


async def test_a_prefill_worker_says_that_it_has_lost_the_queue_and_that_it_is_back() -> None:
    async with WorkerGraph() as graph:
        await graph.prefill()

        def said() -> list[bool]:
            return [worker.queue_lost for worker in graph.decode.view.instances(Role.PREFILL)]

        assert said() == [False]
        await graph.broker.down()
        await until(lambda: said() == [True])
        await graph.broker.up()
        await until(lambda: said() == [False])


@pytest.mark.usefixtures("patient")
async def test_a_worker_that_says_it_has_lost_the_queue_is_not_waited_for() -> None:
    async with WorkerGraph() as graph:
        registry, queue, frontend = await act_prefill(graph), await graph.queue(), await graph.frontend()
        taken, waiting = await frontend.submit(LONG), await frontend.submit(LONG[1:])
        await queue.pull(1, 5.0)
        await queue.answer("decode-0", PrefillStarted(taken, "prefill-x"))
        await until(lambda: bool(graph.decode.requests.get(taken).prefiller))  # type: ignore[union-attr]
        await registry.put("instances/prefill/prefill-x", encode_record(LOST))
        assert here(await frontend.end_of(taken), LONG, "fallback")
        assert here(await frontend.end_of(waiting), LONG[1:], "fallback")
        assert here(await frontend.ask(LONG[2:]), LONG[2:], "no-prefill-worker")
        await act_prefill(graph, "prefill-y")
        await frontend.submit(LONG[3:])
        await until(lambda: graph.depth > 0)


@pytest.mark.usefixtures("patient")
async def test_a_worker_that_was_killed_is_not_waited_for_until_its_lease_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_workers, "LOOK", 0.02)
    async with WorkerGraph() as graph:
        registry, frontend = await graph.registry_of_another(), await graph.frontend()
        queue, other = await graph.queue(), await graph.queue()
        await queue.expect_warm_ups("prefill-x")
        alive = Instance("prefill-x", Role.PREFILL, "demo", fingerprint=LOADED)
        await registry.put("instances/prefill/prefill-x", encode_record(alive))
        taken, waiting = await frontend.submit(LONG), await frontend.submit(LONG[1:])
        await until(lambda: graph.depth == 2)
        await other.pull(1, 5.0)
        await other.answer("decode-0", PrefillStarted(taken, "prefill-x"))
        await until(lambda: bool(graph.decode.requests.get(taken).prefiller))  # type: ignore[union-attr]
        await queue.__aexit__(None, None, None)
        assert here(await frontend.end_of(taken), LONG, "fallback")
        assert here(await frontend.end_of(waiting), LONG[1:], "fallback")
        assert here(await frontend.ask(LONG[2:]), LONG[2:], "no-prefill-worker")
        back = await graph.queue()
        await back.expect_warm_ups("prefill-x")
        await until(lambda: bool(graph.decode._workers.available()))


@pytest.mark.usefixtures("hasty")
async def test_after_two_untaken_prompts_no_more_is_tried_until_a_worker_is_heard_of() -> None:
    async with WorkerGraph(max_prefill_queue_size=9) as graph:
        await act_prefill(graph)
        queue, frontend = await graph.queue(), await graph.frontend()
        before = failures("timeout")
        for prompt in (LONG, LONG[1:]):
            assert here(await frontend.ask(prompt), prompt, "fallback")
        assert here(await frontend.ask(LONG[2:]), LONG[2:], "no-prefill-worker")
        assert failures("timeout") == before + 2
        await queue.answer("decode-0", PrefillStarted("of a request that is over", "prefill-x"))

        async def asked_again() -> bool:
            return (await frontend.ask(LONG[3:])).way[1] == "fallback"

        await until(asked_again)


async def test_two_untaken_prompts_end_the_wait_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own bound may be far away: it grows with the prompt."""
    monkeypatch.setattr("pdserve.decode.policy.FLOOR", 0.1)
    async with WorkerGraph(max_prefill_queue_size=9) as graph:
        await act_prefill(graph)
        frontend = await graph.frontend()
        timeout = graph.decode._remote.timeout
        monkeypatch.setattr(timeout, "seconds", lambda *_: 60.0)
        long = await frontend.submit(LONG)
        await until(lambda: graph.depth == 1)
        monkeypatch.setattr(timeout, "seconds", lambda *_: 0.1)
        for prompt in (LONG[1:], LONG[2:]):
            assert here(await frontend.ask(prompt), prompt, "fallback")
        assert here(await frontend.end_of(long), LONG, "fallback")
        assert caplog.text.count("no prefill worker takes prompts") == 1
