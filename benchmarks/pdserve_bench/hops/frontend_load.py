"""Load on a frontend: so many streams at a time, watched while all of them run; or requests of one token."""

import asyncio
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdserve.errors import Unavailable
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.hops.servers import PROMPT, SEQUENCE, STEP, WORD
from pdserve_bench.load import ClosedLoop
from pdserve_bench.systems.cpu import CpuMeter

RAMP = 150.0
"""streams that begin in a second: each begins with a request, which costs as much as many tokens"""
SETTLE = 0.5
BEGIN_WITHIN = 60.0
"""seconds after the last request was sent"""
_TIMEOUT = 600.0
_COARSE = 0.02
"""seconds: a window begins and ends between the bursts of longer steps"""


@dataclass(frozen=True)
class FrontendTurn:
    """One measurement of one server."""

    system: str
    load: int
    """streams, or clients that ask for one token after the other"""
    requests: int
    """that were answered in the window"""
    tokens: int
    """that came in the window"""
    chunks: int
    seconds: float
    cpu: Mapping[str, float]
    """seconds in the window, by what the process is"""
    client: float
    """CPU seconds of the load generator in the window"""
    ttfts: Sequence[float]
    gaps: Sequence[float]
    """seconds between chunks of one stream"""
    failed: int
    error: str = ""
    """of a request that failed"""

    @property
    def case(self) -> int:
        return self.load


def step_seconds(streams: int) -> float:
    return STEP + SEQUENCE * streams


def ramp_seconds(streams: int) -> float:
    return streams / RAMP


def tokens_needed(streams: int, seconds: float) -> int:
    """So that no stream ends within a window of so many seconds. Of the first streams, which have fast steps while the
    others begin: the integral of 1 / step over the ramp."""
    beginning = math.log(1 + SEQUENCE * streams / STEP) / (SEQUENCE * RAMP)
    return math.ceil(2 * (beginning + (seconds + 4 * SETTLE + 2.0) / step_seconds(streams))) + 50


async def hold_streams(
    system: str, endpoint: Endpoint, meter: CpuMeter, streams: int, seconds: float, prompts: Prompts
) -> FrontendTurn:
    """All streams begin, then a window in which all of them run and none begins or ends; then they are cut off. Raises
    Unavailable where they do not begin."""
    tokens = tokens_needed(streams, seconds)
    exchanges = [Exchange(endpoint.body(prompts.of(PROMPT), tokens)) for _ in range(streams)]
    tasks: list[asyncio.Task[None]] = []
    try:
        began = time.monotonic()
        for number, exchange in enumerate(exchanges):
            await asyncio.sleep(max(0.0, began + number / RAMP - time.monotonic()))
            tasks.append(asyncio.create_task(endpoint.ask(exchange, _TIMEOUT)))
        await _begun(system, exchanges)
        await asyncio.sleep(SETTLE)
        await _between_steps(exchanges)
        begin, client, before = time.monotonic(), time.process_time(), meter.read()
        characters, chunks = _received(exchanges)
        await asyncio.sleep(seconds)
        await _between_steps(exchanges)
        end, spent, used = time.monotonic(), meter.read().since(before), time.process_time() - client
        more, chunks_then = _received(exchanges)
        over = [exchange for exchange in exchanges if exchange.ended]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return FrontendTurn(
        system,
        streams,
        requests=0,
        tokens=(more - characters) // len(WORD),
        chunks=chunks_then - chunks,
        seconds=end - begin,
        cpu=spent.seconds,
        client=used,
        ttfts=[exchange.ttft for exchange in exchanges if exchange.ttft is not None],
        gaps=[
            after - first
            for exchange in exchanges
            for first, after in pairwise(exchange.arrivals)
            if begin <= first and after <= end
        ],
        failed=len(over),
        error=next((exchange.error or "it ended within the window" for exchange in over), ""),
    )


async def ask_for_one_token(
    system: str, endpoint: Endpoint, meter: CpuMeter, clients: int, seconds: float, prompts: Prompts
) -> FrontendTurn:
    """So many clients ask for one token each, again and again."""

    def requests() -> Iterator[Exchange]:
        while True:
            yield Exchange(endpoint.body(prompts.of(PROMPT), 1))

    async def send(exchange: Exchange) -> None:
        await endpoint.ask(exchange, _TIMEOUT)

    begin, client, before = time.monotonic(), time.process_time(), meter.read()
    async with ClosedLoop(requests(), send, clients) as loop:
        await asyncio.sleep(seconds)
    end, spent, used = time.monotonic(), meter.read().since(before), time.process_time() - client
    good = [exchange for exchange in loop.done if exchange.outcome is Outcome.FINISHED]
    bad = [exchange for exchange in loop.done if exchange.outcome is not Outcome.FINISHED]
    return FrontendTurn(
        system,
        clients,
        requests=len(good),
        tokens=sum(exchange.output_tokens for exchange in good),
        chunks=sum(len(exchange.arrivals) for exchange in good),
        seconds=end - begin,
        cpu=spent.seconds,
        client=used,
        ttfts=[exchange.ttft for exchange in good if exchange.ttft is not None],
        gaps=[],
        failed=len(bad),
        error=next((exchange.error for exchange in bad), ""),
    )


def _received(exchanges: Sequence[Exchange]) -> tuple[int, int]:
    """Characters and chunks so far."""
    return sum(len(exchange.text) for exchange in exchanges), sum(len(x.arrivals) for x in exchanges)


async def _begun(system: str, exchanges: Sequence[Exchange]) -> None:
    deadline = time.monotonic() + BEGIN_WITHIN
    while waiting := sum(not exchange.arrivals and not exchange.ended for exchange in exchanges):
        if time.monotonic() > deadline:
            load, cores = os.getloadavg()[0], os.cpu_count()
            why = f"{system}: {waiting} of {len(exchanges)} streams have not begun within {BEGIN_WITHIN:g} s"
            raise Unavailable(f"{why}; the machine's load is {load:.0f} on {cores} cores")
        await asyncio.sleep(0.02)
    if all(exchange.error for exchange in exchanges):
        raise Unavailable(f"{system}: no stream begins: {exchanges[0].error}")


async def _between_steps(exchanges: Sequence[Exchange]) -> None:
    """Wait until the tokens of a step have come, and no more: so that a window holds whole steps, and both their tokens
    and the CPU time that they took. Not for longer than three steps."""
    step = step_seconds(len(exchanges))
    if step < _COARSE:
        return
    deadline, changed = time.monotonic() + 3 * step, 0.0
    seen = _received(exchanges)
    while time.monotonic() < deadline:
        await asyncio.sleep(step / 20)
        if (now := _received(exchanges)) != seen:
            seen, changed = now, time.monotonic()
        elif changed and time.monotonic() - changed > step / 5:
            return
