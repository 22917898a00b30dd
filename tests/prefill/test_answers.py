"""Which answers are repeated."""

from collections.abc import AsyncIterator

import pytest

from pdserve.messages import KvHandle, PrefillDone
from pdserve.prefill.answers import AnswerSender
from tests.decode.graph import shared_queue
from tests.memory.queue import MemoryBroker


@pytest.fixture
async def answers() -> AsyncIterator[AnswerSender]:
    async with shared_queue(MemoryBroker()) as queue:
        yield AnswerSender(queue)


def done(name: str, lease: float = 30.0) -> PrefillDone:
    return PrefillDone(
        name, KvHandle("prefill-0", f"engine-{name}", "127.0.0.1", 1, [[1]], 16, 16, lease=lease)
    )


async def test_a_fresh_answer_is_not_repeated(answers: AnswerSender) -> None:
    await answers.send("decode-0", done("a"))
    assert list(answers.untaken()) == []


async def test_an_answer_is_repeated_until_its_kv_is_released(
    answers: AnswerSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.prefill.answers.REPEAT_AFTER", 0.0)
    await answers.send("decode-0", done("a"))
    await answers.send("decode-1", done("b"))
    assert list(answers.untaken()) == [("decode-0", done("a")), ("decode-1", done("b"))]
    answers.released("engine-a")
    answers.released("unknown")
    assert list(answers.untaken()) == [("decode-1", done("b"))]
    answers.released("engine-b")
    assert list(answers.untaken()) == []
    await answers.empty()


async def test_an_answer_whose_kv_is_never_released_is_forgotten(answers: AnswerSender) -> None:
    await answers.send("decode-0", done("a", lease=0.0))
    assert list(answers.untaken()) == []
    await answers.empty()
