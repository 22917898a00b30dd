"""How old KV is at most, whatever the clocks of other hosts show and however long an answer was on its way."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.decode.kv_age import ASK_AGAIN, KvAge
from pdserve.messages import Placed, PrefillConfirm, PrefillDone, PrefillFailed, ToPrefill
from tests.decode.graph import LONG, ActedPrefill, FrontendStream, Prefill, WorkerGraph, handle


def done(age: float, token: str = "", request_id: str = "r") -> PrefillDone:
    return PrefillDone(request_id, handle(LONG), age=age, token=token)


def test_kv_is_no_older_than_the_question_for_it() -> None:
    age = KvAge(asked=100.0)
    assert not age.doubtful(done(age=0.0), now=104.0)
    assert age.seconds(done(age=0.0), now=104.0) == 4.0, "the age in the message is not trusted"
    assert age.seconds(done(age=3600.0), now=104.0) == 4.0


def test_a_confirmed_answer_is_as_old_as_it_says_and_its_way_was_long() -> None:
    age = KvAge(asked=100.0)
    assert age.doubtful(done(age=1.0), now=160.0)
    token = age.confirm(160.0)
    assert token
    assert age.doubtful(done(age=1.0), now=160.5), "the answer of before, repeated or held back"
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


async def confirm(notices: AsyncIterator[ToPrefill]) -> PrefillConfirm:
    async with asyncio.timeout(5):
        async for notice in notices:
            if isinstance(notice, PrefillConfirm):
                return notice
    raise AssertionError


@pytest.fixture
async def held_back(graph: WorkerGraph, acted: ActedPrefill, pulled: str) -> PrefillConfirm:
    """What the decode worker asks after an answer that came a minute too late."""
    notices, age = acted.queue.notices(), graph.request(pulled).kv_age
    assert age is not None
    age.asked -= 60.0
    await acted.answer(done(0.0, request_id=pulled))
    return await confirm(notices)


@pytest.mark.parametrize(("age", "mode"), [(1.0, "remote"), (29.0, "local")])
async def test_an_answer_that_was_held_back_is_confirmed_before_its_kv_is_read(
    acted: ActedPrefill,
    frontend: FrontendStream,
    pulled: str,
    held_back: PrefillConfirm,
    age: float,
    mode: str,
) -> None:
    assert (held_back.decode, held_back.worker, held_back.held) == ("decode-0", "prefill-x", "p")
    await acted.answer(done(0.0, request_id=pulled), done(0.0, "guessed", request_id=pulled))
    assert frontend.answered[pulled].placed is None
    await acted.answer(done(age, held_back.token, request_id=pulled))
    await frontend.end_of(pulled)
    placed = next(message for message in frontend.messages if isinstance(message, Placed))
    assert placed.prefill == mode  # a later one reports that this KV does not exist


async def test_kv_that_is_gone_when_it_should_be_confirmed_is_not_waited_for(
    acted: ActedPrefill, frontend: FrontendStream, pulled: str, held_back: PrefillConfirm
) -> None:
    await acted.answer(PrefillFailed(pulled, "expired"))
    assert (await frontend.end_of(pulled)).way[1] == "fallback"


async def test_a_prefill_worker_confirms_its_answers(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.decode.kv_age.DOUBT", 0.0)  # every answer was on its way for too long
    assert (await frontend.ask(LONG)).way[0] == "remote"
    await prefill.frees_all()
    await graph.frees_all()
