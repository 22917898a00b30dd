"""Two workers that both decode and prefill, on simulated engines."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.contract.messages import Submit
from pdserve.decode.policy.decision import MIN_TIMEOUT
from pdserve.decode.requests import DecodeRequest
from pdserve.prefill import pull_policy
from pdserve.util.errors import EngineDead
from tests.conditions import until
from tests.decode.graph import LONG, SHORT, BothWorkers, counted, failing
from tests.engine.sims import body


@pytest.fixture
async def pair() -> AsyncIterator[BothWorkers]:
    async with BothWorkers() as pair:
        yield pair


async def test_an_idle_or_lone_worker_prefills_its_own_prompts(
    pair: BothWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    pulling = pair.a.worker._prompts.pulling
    await until(lambda: pulling._waiting is not None)
    for _ in range(4):  # repeated calls end the same wait only once
        pulling.stop_waiting()
        await asyncio.sleep(0)
    await until(lambda: pulling._waiting is not None)
    assert (await pair.a.frontend.ask(LONG)).way == ("local", "own")
    assert "prefill local (own), prompt 500" in caplog.text
    assert not pair.broker.queue("pdserve", "model").entries
    pair.b.worker.stop()
    await pair.b.life
    await until(lambda: not pair.a.worker._workers.available())
    await pair.a.frontend.stream()
    assert (await pair.a.frontend.ask(LONG[1:])).way == ("local", "no-prefill-worker")


async def test_the_prompt_of_a_busy_worker_is_prefilled_by_an_idle_one() -> None:
    """Each worker has read KV of the other before the first request."""
    before = counted("pdserve_warm_ups_total", result="ok")
    async with BothWorkers() as pair:
        await until(lambda: counted("pdserve_warm_ups_total", result="ok") == before + 2)
        for worker in (pair.a, pair.b):
            stream = await worker.frontend.stream()
            answered = await worker.frontend.ask([*LONG, int(worker.worker.id[-1])])
            assert answered.way == ("remote", "long")
            await worker.frontend.cancel(stream)
            await pair.a.frees_all()
            await pair.b.frees_all()


async def test_a_prompt_does_not_wait_long_when_all_workers_are_busy(pair: BothWorkers) -> None:
    for worker in (pair.a, pair.b):
        await worker.frontend.stream()
        worker.worker._prompts.pulling.prompt_seconds = 1000.0
    answers = await asyncio.gather(*(pair.a.frontend.ask([*LONG, n]) for n in range(4)))
    assert {answered.way for answered in answers} <= {("remote", "long"), ("local", "own")}


async def test_a_prompt_that_its_own_worker_pulls_counts_as_no_failure(
    pair: BothWorkers,
) -> None:
    pair.b.engine.faults.going.clear()
    await pair.b.frontend.submit(SHORT, 100)
    await until(lambda: len(pair.b.worker.requests.occupying()) == 1)
    pair.b.worker._prompts.pulling.pulled = 1e9  # this worker pulls no prompt
    await pair.a.frontend.stream()
    with failing("own", 0):
        assert (await pair.a.frontend.ask(LONG)).way == ("local", "own")
    assert not pair.broker.queue("pdserve", "model").entries
    pair.b.engine.faults.going.set()


@pytest.mark.parametrize("draining", [False, True])
async def test_a_prompt_is_prefilled_locally_when_all_caches_are_full(
    pair: BothWorkers, monkeypatch: pytest.MonkeyPatch, draining: bool
) -> None:
    """`draining`: no cache counts as full, but the prompt's worker drains."""
    monkeypatch.setattr(pull_policy, "DECODE_SHARE", 1.0)  # any sequence fills the cache
    for worker in (pair.a, pair.b):
        worker.engine.faults.slow = 20.0
        await worker.frontend.stream()
    if draining:
        monkeypatch.setattr(type(pair.a.worker._prompts.pulling), "full", False)
        monkeypatch.setattr(pair.b.worker._prompts.pulling, "pulled", 1e9)
    prompt = await pair.a.frontend.submit(LONG)
    pair.a.worker._prompts.pulling.draining = draining
    await until(lambda: pair.a.frontend.answered[prompt].placed is not None, within=MIN_TIMEOUT)
    assert (await pair.a.frontend.end_of(prompt)).way == ("local", "own")
    assert len(pair.a.worker.requests) == 1, "the stream still runs"


async def test_estimates_count_prompts_from_the_queue(pair: BothWorkers) -> None:
    await pair.a.frontend.stream()
    pair.b.engine.faults.going.clear()
    await pair.a.frontend.submit(LONG)
    await until(lambda: len(pair.b.worker._prompts._running) == 1)
    asked = DecodeRequest("frontend", Submit("asked", LONG, 30.0, body(4)))
    estimates = pair.b.worker._runner.estimator.of(asked, 100, 100, [pair.a.worker.id])
    assert estimates is not None
    assert estimates.local_wait > 0
    assert not estimates.is_idle
    pair.b.engine.faults.going.set()


async def test_a_worker_that_dies_with_prompt_and_stream_loses_neither(pair: BothWorkers) -> None:
    await pair.a.frontend.stream()
    stream = await pair.b.frontend.stream(max_tokens=50)
    pair.b.engine.faults.slow = 1000.0
    prompt = await pair.a.frontend.submit(LONG)
    pair.b.worker._prompts.pulling.pulled = 0.0
    pair.a.worker._prompts.pulling.pulled = 1e9
    await until(lambda: len(pair.b.worker._prompts._running) == 1)
    pair.b.engine.die()
    with pytest.raises(EngineDead):
        await pair.b.life
    assert (await pair.a.frontend.end_of(prompt)).way == ("local", "fallback")
    assert (await pair.b.frontend.failure(stream)).retry, "another worker continues it"


async def test_a_drained_worker_finishes_prompts_and_streams(
    pair: BothWorkers,
) -> None:
    await pair.a.frontend.stream()
    pair.b.engine.faults.slow = 50.0
    prompt = await pair.a.frontend.submit(LONG)
    await until(lambda: len(pair.b.worker._prompts._running) == 1)
    stream = await pair.b.frontend.submit(SHORT, 20)
    await until(lambda: len(pair.b.worker.requests.occupying()) == 1)
    pair.b.worker.stop()
    await pair.b.life
    assert (await pair.a.frontend.end_of(prompt)).way == ("remote", "long")
    assert not (await pair.b.frontend.end_of(stream)).failed


async def test_a_prefill_worker_serves_workers_of_role_both(pair: BothWorkers) -> None:
    prefill = await pair.prefill("prefill-0")
    for worker in (pair.a, pair.b):
        await worker.frontend.stream()
    answers = await asyncio.gather(*(pair.a.frontend.ask([*LONG, n]) for n in range(3)))
    assert [answered.way for answered in answers] == [("remote", "long")] * 3
    await prefill.frees_all()
