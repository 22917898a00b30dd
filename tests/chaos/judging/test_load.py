"""The judged load against a misbehaving server."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import repeat

import pytest
from pdserve_bench.chaos.judge import Judgement
from pdserve_bench.chaos.load import JudgedLoad
from pdserve_bench.chaos.questions import Case

from tests.bench.answers import DONE, STREAM, Asked, event, tiny_server, whole

ANSWER = (7, 8, 9)


def _event(*tokens: int) -> bytes:
    return event({"choices": [{"index": 0, "text": "", "token_ids": list(tokens)}]})


ANSWERS = {
    "right": STREAM + _event(7) + _event(8, 9) + DONE,
    "wrong": STREAM + _event(7) + _event(9, 9) + DONE,
    "doubled": STREAM + _event(7) + _event(7, 8, 9) + DONE,
    "short": STREAM + _event(7, 8) + DONE,
    "503": whole({"error": {"message": "nobody"}}, 503),
    "hangs": STREAM + _event(7),
}


@asynccontextmanager
async def _server(kind: str) -> AsyncIterator[str]:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        assert asked.body["prompt"] == [1, 2]
        writer.write(ANSWERS[kind])
        if kind == "hangs":
            await asyncio.Event().wait()

    async with tiny_server(answer) as server:
        yield server.url


def _cases() -> Iterator[Case]:
    return repeat(Case((1, 2), 3, True, ANSWER))


@pytest.mark.parametrize(
    ("kind", "result", "error"),
    [
        ("right", Judgement.OK, ""),
        ("wrong", Judgement.WRONG, ""),
        ("doubled", Judgement.WRONG, ""),
        ("short", Judgement.FAILED, ""),
        ("503", Judgement.FAILED, "HTTP 503 nobody"),
        ("hangs", Judgement.HUNG, "no end within 0.5 s"),
    ],
)
async def test_responses_are_judged(kind: str, result: Judgement, error: str) -> None:
    async with _server(kind) as url, JudgedLoad(url, "demo", _cases(), 2, 0.5) as load:
        await load.until(lambda attempt: True, 2)
    seen = load.seen("none", 0.0)
    assert {request.result for request in seen} == {result}
    assert {request.trace.error if request.trace else "" for request in seen} == {error}


async def test_connections_of_a_killed_frontend_are_counted_apart() -> None:
    """All requests break: some with the killed frontend, one on a living frontend's connection, and two that began or
    ended long after the kill."""
    async with _server("hangs") as url, JudgedLoad(url, "demo", _cases(), 5, 0.2) as load:
        await load.until(lambda attempt: True, 5)
    for attempt in load.done:
        attempt.hung, attempt.reset, attempt.error = False, True, "connection: reset"
    spared, late, young, *_ = load.done
    load.frontend_dies({spared.port})
    killed_at = load.done[-1].ended
    load._killed_at = killed_at
    for attempt in load.done:
        attempt.started, attempt.ended = killed_at - 1, killed_at + 1
    late.started, late.ended = killed_at + 10, killed_at + 11
    young.started, young.ended = killed_at + 1.9, killed_at + 45
    count = Counter(attempt.result for attempt in load.seen("frontend-kill", killed_at))
    assert count == {Judgement.FAILED: 3, Judgement.APART: len(load.done) - 3}


@pytest.mark.parametrize(
    ("other", "result"),
    [
        ((7, 8, 9), Judgement.OK),
        ((7, 9, 9), Judgement.OK),
        ((7, 9, 8), Judgement.WRONG),
        ((), Judgement.WRONG),
    ],
    ids=["equal outputs", "the second output", "a mixture of both", "no second output"],
)
async def test_a_second_expected_output_counts_only_as_a_whole(
    other: tuple[int, ...], result: Judgement
) -> None:
    kind = "right" if other == ANSWER else "wrong"  # "wrong" is 7, 9, 9
    async with _server(kind) as url, JudgedLoad(url, "demo", _cases(), 1, 5) as load:
        load.also_right = {(1, 2): other}
        await load.until(lambda attempt: True)
    assert {attempt.result for attempt in load.seen("mixed-weights", 0.0)} == {result}


async def test_no_request_is_sent_while_the_load_is_paused() -> None:
    async with _server("right") as url, JudgedLoad(url, "demo", _cases(), 2, 5) as load:
        await load.until(lambda attempt: True)
        load.pause()
        await load.idle()
        before = len(load.done)
        assert not load.running
        load.resume()
        await load.until(lambda attempt: True, before + 1)
