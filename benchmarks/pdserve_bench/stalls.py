"""When the load generator itself did not get to run: what it measures then is its own wait, not the server's."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

from pdserve.tasks import Lifetime
from pdserve_bench.client import Exchange
from pdserve_bench.slo import Slo

_BEAT = 0.01
_AFTER = 0.01
"""seconds that it may take until all has been read that came during a stall"""
_LEAST = 0.003
"""seconds: less is how exactly a timer fires"""


class GeneratorStalls(Lifetime):
    """Wakes up every 10 ms while it is entered, and notes by how much it came too late: so late are this event loop's
    sends, and so late may the times of arrivals be that it noted."""

    def __init__(self) -> None:
        self.longest = 0.0
        """seconds"""
        self._ends: list[float] = []
        self._lags: list[float] = []

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    def within(self, begin: float, end: float) -> float:
        """Seconds of stalls that touch this time (monotonic)."""
        place = bisect_left(self._ends, begin)
        total = 0.0
        while place < len(self._ends) and self._ends[place] - self._lags[place] <= end:
            total += self._lags[place]
            place += 1
        return total

    def to_blame(self, slo: Slo, exchange: Exchange) -> bool:
        """Whether a request that broke the SLO would have kept it, so far, without the stalls: those during which it
        was to be sent, or its late tokens came. A stall while nothing comes does no harm."""
        broke = slo.broke_ttft(exchange) or slo.broke_gap(exchange)
        if exchange.error or not exchange.arrivals or not broke:
            return False
        first = exchange.arrivals[0]
        if first - exchange.started - self._around(exchange.started) - self._around(first) > slo.ttft:
            return False
        return all(
            after - before - self._around(after) <= slo.gap
            for before, after in pairwise(exchange.arrivals)
            if after - before > slo.gap
        )

    def _around(self, moment: float) -> float:
        return self.within(moment - _AFTER, moment + _LEAST)

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_BEAT)
            now = time.monotonic()
            lag = now - before - _BEAT
            if lag > _LEAST:
                self._ends.append(now)
                self._lags.append(lag)
                self.longest = max(self.longest, lag)
