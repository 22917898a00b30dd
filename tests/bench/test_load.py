"""Load: arrivals at random."""

import asyncio
import statistics
import time
from itertools import count, pairwise

import pytest
from pdserve_bench.client import Exchange
from pdserve_bench.load import arrivals, open_loop


async def _arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    async def send(exchange: Exchange) -> None:
        exchange.started = exchange.ended = time.monotonic()

    sent = await open_loop((Exchange() for _ in count()), send, rate, seconds, seed)
    assert all(exchange.ended for exchange in sent)
    return [exchange.started for exchange in sent]


def test_arrivals_are_poisson() -> None:
    """Their number has the variance of its mean, and the waits between them are exponential."""
    runs = [list(arrivals(40.0, 3.0, seed)) for seed in range(20)]
    numbers = [len(times) for times in runs]
    assert statistics.fmean(numbers) == pytest.approx(120, abs=3.3 * (120 / 20) ** 0.5)
    assert 0.35 < statistics.variance(numbers) / 120 < 2.2  # chi square of 19 degrees: 0.1 % on each side
    waits = [after - before for times in runs for before, after in pairwise(times)]
    assert statistics.fmean(waits) == pytest.approx(1 / 40, rel=0.1)
    assert statistics.median(waits) == pytest.approx(0.6931 / 40, rel=0.1)


async def test_requests_are_sent_when_they_arrive() -> None:
    begin = time.monotonic()
    sent = await _arrivals(40.0, 0.5, seed=4)
    due = list(arrivals(40.0, 0.5, seed=4))
    assert len(sent) == len(due)
    assert all(begin + at <= time for at, time in zip(due, sent, strict=True)), "none is sent too early"


async def test_arrivals_do_not_wait_for_answers() -> None:
    """None is answered before ten have been sent."""
    sent, ten = [], asyncio.Event()

    async def send(exchange: Exchange) -> None:
        sent.append(exchange)
        if len(sent) == 10:
            ten.set()
        await ten.wait()

    async with asyncio.timeout(60):
        await open_loop((Exchange() for _ in count()), send, 50.0, 0.5, 3)
    assert len(sent) > 10


async def test_a_seed_says_when_requests_arrive() -> None:
    first, same, other = await asyncio.gather(*(_arrivals(30.0, 1.0, seed) for seed in (1, 1, 2)))
    assert len(first) == len(same)
    assert first != other


async def test_cancelled_load_cancels_its_requests() -> None:
    running, busy = set[int](), asyncio.Event()

    async def send(exchange: Exchange) -> None:
        running.add(id(exchange))
        if len(running) == 3:
            busy.set()
        try:
            await asyncio.sleep(60)
        finally:
            running.discard(id(exchange))

    load = open_loop((Exchange() for _ in count()), send, 100.0, 60.0, 1)
    task: asyncio.Task[list[Exchange]] = asyncio.create_task(load)
    await busy.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running
