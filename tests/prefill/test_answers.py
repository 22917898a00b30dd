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


async def test_an_answer_whose_kv_is_never_released_is_forgotten(answers: AnswerSender) -> None:
    await answers.send("decode-0", done("a", lease=0.0))
    assert list(answers.untaken()) == []
    await answers.empty()
