"""How old KV is at most, whatever the clocks of other hosts show and however long an answer was on its way."""

import asyncio

import pytest

from pdserve.decode.kv_age import ASK_AGAIN, KvAge
from pdserve.messages import Placed, PrefillConfirm, PrefillDone, PrefillFailed
from tests.decode.graph import LONG, ActedPrefill, FrontendStream, Prefill, WorkerGraph, handle


def done(age: float, token: str = "", request_id: str = "r") -> PrefillDone:
    return PrefillDone(request_id, handle(LONG), age=age, token=token)


def test_kv_is_no_older_than_the_question_for_it_and_the_confirmed_answer_says() -> None:
    age = KvAge(asked=100.0)
    for told in (0.0, 3600.0):
        assert not age.doubtful(done(told), now=104.0)
        assert age.seconds(done(told), now=104.0) == 4.0, "the age in the message is not trusted"
    assert age.doubtful(done(1.0), now=160.0)
    token = age.confirm(160.0)
    assert token
    assert age.doubtful(done(1.0), now=160.5), "the answer of before, repeated or held back"
    assert not age.doubtful(done(1.5, token), now=160.5)
    assert age.seconds(done(1.5, token), now=160.5) == 2.0, "its way was long"
    assert age.seconds(done(-40.0, token), now=160.5) == 0.5
    assert age.seconds(done(1.5, "of another"), now=160.5) == 60.5
    assert age.confirm(160.0 + ASK_AGAIN / 2) is None, (
        "a lost confirmation is asked for again, but not at once"
    )
    assert age.confirm(160.0 + ASK_AGAIN) not in (None, token)
    assert age.doubtful(done(0.0, token), now=162.0)


@pytest.mark.parametrize(("age", "mode"), [(1.0, "remote"), (29.0, "local"), (None, "local")])
async def test_an_answer_that_was_held_back_is_confirmed_before_its_kv_is_read(
    acted: ActedPrefill, frontend: FrontendStream, pulled: str, age: float | None, mode: str
) -> None:
    """None: the KV is gone when it should be confirmed."""
    notices, kv_age = acted.queue.notices(), acted.graph.request(pulled).kv_age
    assert kv_age is not None
    kv_age.asked -= 60.0
    await acted.answer(done(0.0, request_id=pulled))
    asked = await asyncio.wait_for(anext(notices), 5)
    assert isinstance(asked, PrefillConfirm)
    assert (asked.decode, asked.worker, asked.held) == ("decode-0", "prefill-x", "p")
    await acted.answer(done(0.0, request_id=pulled), done(0.0, "guessed", request_id=pulled))
    assert frontend.answered[pulled].placed is None
    confirmed = PrefillFailed(pulled, "expired") if age is None else done(age, asked.token, pulled)
    await acted.answer(confirmed)
    await frontend.end_of(pulled)
    placed = next(message for message in frontend.messages if isinstance(message, Placed))
    assert placed.prefill == mode  # a later one reports that this KV does not exist


async def test_a_prefill_worker_confirms_its_answers(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.decode.kv_age.DOUBT", 0.0)  # every answer was on its way for too long
    assert (await frontend.ask(LONG)).way[0] == "remote"
    await prefill.frees_all()
    await graph.frees_all()
