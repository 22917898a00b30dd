"""Prefill workers broadcast their state when it may change a decision, and at a bounded rate."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from pdserve.contract.messages import PrefillLoad, PrefillStarted, QueueState, decode_queue_state
from pdserve.queue.depth import Puller
from pdserve.queue.jetstream.client import short_connection
from pdserve.queue.jetstream.stream import QueueNames
from pdserve.queue.reports import INTERVAL, MAX_RATE, StateReports
from tests.conditions import until
from tests.queue.conftest import Queues, nats_queues
from tests.queue.requests import request

TOKEN_SECONDS = 0.0001


def state(
    delivered: int, pending: int = 0, tokens: int = 0, token: float = TOKEN_SECONDS, worker: str = "p"
) -> QueueState:
    return QueueState(delivered, pending, worker, PrefillLoad(tokens, token))


@pytest.mark.parametrize(
    ("reported", "now", "due"),
    [
        ([(state(1), 0)], state(9), False),  # pulled and done
        ([(state(1), 0)], state(9, pending=1), True),
        ([(state(5, pending=4), 0)], state(9), True),  # the queue is empty again
        ([(state(5, pending=4), 0)], state(5, pending=4), False),  # no pull since
        ([(state(5, pending=4), 9.95)], state(9, pending=1), False),  # just reported, here by the same worker
        ([(state(9), 0)], state(9, tokens=400), False),  # 40 ms of work
        ([(state(9), 0)], state(9, tokens=600), True),
        ([(state(9, tokens=3000), 9.8)], state(9, tokens=1000), False),  # 0.2 s later, as expected
        ([(state(1, tokens=3000), 9.8)], state(9), True),  # done sooner
        ([(state(1, tokens=3000), 9.8)], state(9, tokens=3000), True),
        ([(state(1, token=0.0), 0)], state(9), True),  # the first measured speed
        ([(state(1), 0)], state(9, token=1.2 * TOKEN_SECONDS), False),
        ([(state(1), 0)], state(9, token=1.3 * TOKEN_SECONDS), True),
        ([(state(1), 0), (state(3, worker="q"), 0)], state(3), False),
        (
            [(state(1), 0), (state(8, pending=2, worker="q"), 9.95)],
            state(9, pending=1),
            False,
        ),  # another worker just reported
    ],
)
def test_only_what_others_do_not_expect_is_reported(
    reported: list[tuple[QueueState, float]], now: QueueState, due: bool
) -> None:
    reports = StateReports()
    for each, at in reported:
        reports.reported(each, at)
    assert (reports.next(now, 10.0) is not None) is due


def test_a_reported_load_adds_the_others_share_of_half_an_interval() -> None:
    reports = StateReports()
    reports.pulled("decode-0", 9.0)
    assert reports.next(state(1, tokens=1000), 10.0) == state(1, tokens=1000), "its own requests"
    reports.pulled("decode-1", 9.0)
    assert reports.next(state(1, tokens=1000), 10.0) == state(
        1, tokens=1000 + round(INTERVAL / 4 / TOKEN_SECONDS)
    )


@pytest.mark.parametrize(("workers", "rate"), [(1, 1 / INTERVAL), (4, 4 / INTERVAL), (500, MAX_RATE)])
def test_all_workers_together_send_a_bounded_number_of_reports(workers: int, rate: float) -> None:
    reports = StateReports()
    for number in range(workers):
        reports.reported(state(number, worker=f"p{number}"), 10.0)
    assert workers / reports.interval(10.0) == pytest.approx(rate)
    assert reports.interval(20.0) == INTERVAL


@pytest.fixture
async def broadcasts(nats_url: str, namespace: str) -> AsyncIterator[tuple[Queues, list[QueueState]]]:
    heard: list[QueueState] = []

    async def hear(message: Msg) -> None:
        heard.append(decode_queue_state(message.data))

    async with short_connection(nats_url, None) as client, nats_queues(nats_url, namespace) as queues:
        await client.subscribe(QueueNames(namespace, "org/model 1.5").state, cb=hear)
        await client.flush()
        yield queues, heard


class Prefill:
    """A prefill worker that computes nothing; the test sets its load."""

    def __init__(self) -> None:
        self.load = PrefillLoad(0, TOKEN_SECONDS)
        self.puller = Puller("prefill-0", lambda: self.load)


async def ask(queues: tuple[Queues, list[QueueState]], count: int, reads_state: bool = True) -> Any:
    """Publish `count` prompts. Return the queues of their decode worker, of another one, and of a prefill worker."""
    decode, other, prefill = [await queues[0]() for _ in range(3)]
    decode.answers("decode-0-a")
    for number in range(count):
        await decode.publish(msgspec.structs.replace(request(f"r{number}"), reads_state=reads_state))
    return decode, other, prefill


async def test_only_the_asking_worker_learns_the_state_of_a_pull(
    broadcasts: tuple[Queues, list[QueueState]],
) -> None:
    decode, other, prefill = await ask(broadcasts, 1)
    worker = Prefill()
    worker.load = PrefillLoad(0, 0.0)
    (delivery,) = await prefill.pull(1, 1, worker.puller)
    assert decode.depth == 1
    answers = decode.answers("decode-0-a")
    await prefill.answer("decode-0-a", PrefillStarted("r0", "prefill-0", state=delivery.state))
    await anext(answers)
    assert decode.depth == 0
    assert decode.loads["prefill-0"][0] == PrefillLoad(4, 0.0)
    await asyncio.sleep(3 * INTERVAL)
    assert broadcasts[1] == []
    assert other.loads == {}


async def test_a_backlog_is_reported_to_all_at_a_bounded_rate(
    broadcasts: tuple[Queues, list[QueueState]],
) -> None:
    _, other, prefill = await ask(broadcasts, 20)
    worker = Prefill()
    worker.load = PrefillLoad(5000, TOKEN_SECONDS)
    for _ in range(20):
        await prefill.pull(1, 1, worker.puller)
    await until(lambda: "prefill-0" in other.loads)
    assert other.loads["prefill-0"][0] == PrefillLoad(5000, TOKEN_SECONDS)
    assert other.depth == 0
    await asyncio.sleep(3 * INTERVAL)
    assert len(broadcasts[1]) < 10


@pytest.mark.parametrize("pulled", [True, False], ids=["after a pull", "after an addressed prompt"])
async def test_a_decode_worker_learns_the_load_of_anothers_addressed_prompts(
    pulled: bool, broadcasts: tuple[Queues, list[QueueState]]
) -> None:
    """Also if the prefill worker has begun no prompt since the decode worker's own."""
    decode, _, prefill = await ask(broadcasts, 1)
    worker = Prefill()
    (delivery,) = await prefill.pull(1, 1, worker.puller)
    answers = decode.answers("decode-0-a")
    state = delivery.state if pulled else QueueState(0, 0, "prefill-0")
    await prefill.answer("decode-0-a", PrefillStarted("r0", "prefill-0", state=state))
    await anext(answers)
    await asyncio.sleep(2 * INTERVAL)
    worker.load = PrefillLoad(5000, TOKEN_SECONDS)
    prefill.load_changed(worker.puller)
    await until(lambda: decode.loads["prefill-0"][0] == worker.load)


async def test_each_pull_is_broadcast_if_the_decode_worker_reads_no_state(
    broadcasts: tuple[Queues, list[QueueState]],
) -> None:
    decode, _, prefill = await ask(broadcasts, 3, reads_state=False)
    for _ in range(3):
        await prefill.pull(1, 1)
    await until(lambda: decode.depth == 0)
    assert [each.delivered_seq for each in broadcasts[1]] == [1, 2, 3]


async def test_the_pull_of_a_cancelled_request_is_broadcast(
    broadcasts: tuple[Queues, list[QueueState]],
) -> None:
    decode, _, prefill = await ask(broadcasts, 1)
    await prefill.pull(1, 0)
    await decode.publish(msgspec.structs.replace(request("late"), reads_state=True))
    await decode.cancel(["late"])
    await asyncio.sleep(0.1)
    assert await prefill.pull(1, 0.1) == []
    await until(lambda: [each.delivered_seq for each in broadcasts[1]] == [2])
