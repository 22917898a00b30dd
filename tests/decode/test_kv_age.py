"""How old KV is at most, whatever the clocks of other hosts say and however long an answer was on its way."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.decode.kv_age import ASK_AGAIN, KvAge
from pdserve.messages import Placed, PrefillConfirm, PrefillDone, PrefillFailed, ToPrefill
from tests.conditions import until
from tests.decode.graph import FrontendStream, WorkerGraph
from tests.decode.test_worker import LONG, act_prefill, expected, handle
from tests.memory.queue import MemoryQueue


def done(age: float, token: str = "", request_id: str = "r") -> PrefillDone:
    return PrefillDone(request_id, handle(LONG), age=age, token=token)


def test_kv_is_no_older_than_the_question_for_it() -> None:
    age = KvAge(asked=100.0)
    assert not age.doubtful(done(age=0.0), now=104.0)
    assert age.seconds(done(age=0.0), now=104.0) == 4.0, "what the other side says is not believed"
    assert age.seconds(done(age=3600.0), now=104.0) == 4.0


def test_a_confirmed_answer_is_as_old_as_it_says_and_its_way_was_long() -> None:
    age = KvAge(asked=100.0)
    assert age.doubtful(done(age=1.0), now=160.0)
    token = age.confirm(160.0)
    assert token
    assert age.doubtful(done(age=1.0), now=160.5), "the answer of before, said again or held back"
    assert not age.doubtful(done(age=1.5, token=token), now=160.5)
    assert age.seconds(done(age=1.5, token=token), now=160.5) == 2.0
    assert age.seconds(done(age=-40.0, token=token), now=160.5) == 0.5
    assert age.seconds(done(age=1.5, token="of another"), now=160.5) == 60.5


def test_a_lost_confirmation_is_asked_for_again_but_not_at_once() -> None:
    age = KvAge(asked=100.0)
    first = age.confirm(160.0)
    assert age.confirm(160.0 + ASK_AGAIN / 2) is None
    second = age.confirm(160.0 + ASK_AGAIN)
    assert second
    assert second != first
    assert age.doubtful(done(age=0.0, token=str(first)), now=162.0)


@pytest.fixture
def in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer was on its way for too long."""
    monkeypatch.setattr("pdserve.decode.kv_age.DOUBT", 0.0)


async def confirm(notices: AsyncIterator[ToPrefill]) -> PrefillConfirm:
    async with asyncio.timeout(5):
        async for notice in notices:
            if isinstance(notice, PrefillConfirm):
                return notice
    raise AssertionError


def a_minute_passes(graph: WorkerGraph, request_id: str) -> None:
    """While an answer is on its way, or this worker hangs."""
    request = graph.decode.requests.get(request_id)
    assert request is not None
    assert request.kv_age is not None
    request.kv_age.asked -= 60.0


async def answer_held_back(
    graph: WorkerGraph,
) -> tuple[MemoryQueue, FrontendStream, AsyncIterator[ToPrefill], str]:
    """A request, by its id, whose prefill worker, which the test acts, has just answered, a minute too late."""
    await act_prefill(graph)
    queue, frontend = await graph.queue(), await graph.frontend()
    notices = queue.notices()
    request_id = await frontend.submit(LONG)
    await queue.pull(1, 5.0)
    a_minute_passes(graph, request_id)
    await queue.answer("decode-0", done(0.0, request_id=request_id))
    return queue, frontend, notices, request_id


@pytest.mark.parametrize(("age", "mode"), [(1.0, "remote"), (29.0, "local")])
async def test_an_answer_that_was_held_back_is_confirmed_before_its_kv_is_read(age: float, mode: str) -> None:
    async with WorkerGraph() as graph:
        queue, frontend, notices, request_id = await answer_held_back(graph)
        asked = await confirm(notices)
        assert (asked.decode, asked.worker, asked.held) == ("decode-0", "prefill-x", "p")
        await queue.answer("decode-0", done(0.0, request_id=request_id))
        await queue.answer("decode-0", done(0.0, "guessed", request_id=request_id))
        assert frontend.answered[request_id].placed is None
        await queue.answer("decode-0", done(age, asked.token, request_id=request_id))
        answered = await frontend.end_of(request_id)
        placed = next(message for message in frontend.messages if isinstance(message, Placed))
        assert placed.prefill == mode  # what comes later tells that this KV does not exist
        assert answered.tokens == expected(LONG, 4)


async def test_kv_that_is_gone_when_it_should_be_confirmed_is_not_waited_for() -> None:
    async with WorkerGraph() as graph:
        queue, frontend, notices, request_id = await answer_held_back(graph)
        await confirm(notices)
        await queue.answer("decode-0", PrefillFailed(request_id, "expired"))
        answered = await frontend.end_of(request_id)
        assert answered.way[1] == "fallback"


@pytest.mark.usefixtures("in_doubt")
async def test_a_prefill_worker_confirms_its_answers() -> None:
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        answered = await (await graph.frontend()).ask(LONG)
        assert answered.way[0] == "remote"
        assert answered.tokens == expected(LONG, 4)
        await until(prefill.engine.all_blocks_free)
        await until(graph.decode_engine.all_blocks_free)
