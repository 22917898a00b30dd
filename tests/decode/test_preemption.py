"""Which frontend a decode worker asks to preempt, how many requests, and when it checks."""

import asyncio

import pytest

from pdserve.contract.messages import Submit
from pdserve.decode.replies import choose_preemption
from pdserve.decode.requests import DecodeRequest, DecodeRequests, Phase
from pdserve.observe.tracing import Tracer
from tests.conditions import holds


def running(text: str) -> list[DecodeRequest]:
    """Return requests in order of arrival. Each word: a frontend (digit), a client (letter), and a number of requests;
    `?`: without a first step."""
    requests: list[DecodeRequest] = []
    for word in text.split():
        frontend, client, count = word[0], word[1], int(word[2:].rstrip("?"))
        for _ in range(count):
            submit = Submit(f"r{len(requests)}", [1], 10.0, [], client=client)
            request = DecodeRequest(frontend, submit, Phase.RUNNING, has_first_step=not word.endswith("?"))
            request.since = len(requests)
            requests.append(request)
    return requests


@pytest.mark.parametrize(
    ("inside", "queued", "expected"),
    [
        ("0g8", 0, ("", 0)),
        ("0g7 1h1?", 0, ("", 0)),  # `h` is being prefilled
        ("0g8 1h1?", 1, ("0", 1)),
        ("0g2 1g6 0h1?", 1, ("1", 1)),
        ("0g8 0g3? 1h1?", 4, ("0", 4)),  # three of `g` wait before `h`
        ("0g8 1h1? 0g3?", 4, ("0", 1)),
        ("0g6 1h2 1h3?", 3, ("0", 3)),
        ("0g5 1h2 1h3?", 3, ("", 0)),
        ("0a1 0b1 0c1 1d1?", 1, ("", 0)),
        ("0g8 1~1 1h7 0h1?", 1, ("1", 1)),  # flex requests pause first, even if the client has only one
        ("0~8 1~1?", 1, ("", 0)),
        ("0~1 0a4 0b4 1a1? 1b1? 1a1?", 3, ("0", 1)),  # only as many as there are flex requests
        ("0a8 1~3? 1h1?", 4, ("1", 3)),  # waiting flex requests leave the engine's queue
        ("0~5 0~3? 1h1?", 4, ("0", 4)),
    ],
)
def test_choose_preemption(inside: str, queued: int, expected: tuple[str, int]) -> None:
    assert choose_preemption(running(inside), queued) == expected


async def test_an_idle_worker_checks_again_only_when_it_gets_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.decode.requests.IDLE_INTERVAL", 3600.0)
    requests = DecodeRequests(Tracer())
    waiting = asyncio.create_task(requests.pause(0.01))
    await holds(lambda: not waiting.done())
    added = requests.add("frontend", Submit("r", [1], 60.0, []))
    await asyncio.wait_for(waiting, 5.0)
    await asyncio.wait_for(requests.pause(0.01), 5.0)
    assert added is not None
    requests.drop(added)
    waiting = asyncio.create_task(requests.pause(0.01))
    await holds(lambda: not waiting.done())
    waiting.cancel()
