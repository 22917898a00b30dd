"""Probes for goodput: send requests at one rate for some seconds and count those that keep the SLO.

A probe starts on an idle server (`Canary`), so that no earlier requests slow it down. It is cut short once too many
requests have missed the SLO.
"""

import asyncio
import time
from dataclasses import dataclass, field

from pdserve.util.errors import Unavailable
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.measure.foreign_cpu import ForeignLoad
from pdserve_bench.measure.runs import LoadRun, Scalable
from pdserve_bench.measure.samples import wilson
from pdserve_bench.measure.slo import SHARE, Slo, Tally

_IDLE_WITHIN = 60.0
_WARM_WITHIN = 120.0
"""Seconds until the warm-up stops waiting for first tokens."""
_HANGS = 10.0
"""A request counts as hung this many seconds after its last token or, without a token, after its TTFT bound."""
_POLL_INTERVAL = 0.2
_BEAT = 0.01
_CANARY_TIMEOUT = 30.0


@dataclass(frozen=True)
class GoodputOptions:
    """Rates in requests per second, times in seconds."""

    slo: Slo = field(default_factory=Slo)
    share: float = SHARE
    seconds: float = 20.0
    start_rate: float = 4.0
    precision: float = 0.1
    lowest: float = 0.05
    highest: float = 1000.0
    most_probes: int = 24
    budget: float = 900.0
    """No probe starts that would end after this many seconds."""
    seed: int = 1
    warm_up: bool = True
    longer: float = 3.0
    """At a low rate, a probe lasts up to this many times `seconds`."""
    least: int = 0
    """The ends of the final interval are probed until each has this many judged requests (the broken one, at most
    twice)."""


JUDGE_LATER = GoodputOptions(Slo(3600.0, 3600.0), share=0.0)
"""Options that never cut a probe short."""


@dataclass
class Probe:
    rate: float
    seconds: float
    """Duration of the load, unless cut short."""
    seed: int
    run: LoadRun = field(default_factory=LoadRun)
    tally: Tally = field(default_factory=Tally)
    hopeless: bool = False
    """Cut short because too many requests had missed the SLO."""
    counted: bool = False
    """The search uses the probe, because nothing interrupted it."""
    stall: float = 0.0
    """Longest delay of the load generator itself, in seconds."""
    foreign: float | None = None
    """CPU share of other programs; None if unknown."""
    slo: Slo = field(default_factory=Slo)

    @property
    def judged(self) -> int:
        """Number of requests; in a hopeless probe, without those that were cut off before they broke a bound."""
        return self.tally.requests - (self.tally.unfinished if self.hopeless else 0)

    @property
    def share(self) -> float:
        """Share of `judged` that kept the SLO; 1 without any."""
        return self.tally.kept / self.judged if self.judged else 1.0

    @property
    def ttfts(self) -> list[float]:
        """Seconds to each first token. A request without one counts with its wait if that exceeds the bound, but not
        if it failed without hanging."""
        until = self.run.ended or time.monotonic()
        times = []
        for each in self.run.exchanges:
            waited = (each.ended or until) - each.started
            if each.ttft is not None:
                times.append(each.ttft)
            elif waited > self.slo.ttft and (each.hung or not each.error):
                times.append(waited)
        return times

    @property
    def longest_gaps(self) -> list[float]:
        """Longest gap of each request that has or awaits its second token, the current wait included."""
        until = self.run.ended or time.monotonic()
        waits = [
            [
                *each.gaps,
                *([(each.ended or until) - each.arrivals[-1]] if each.hung or not each.ended else []),
            ]
            for each in self.run.exchanges
            if each.arrivals
        ]
        return [max(gaps) for gaps in waits if gaps]


async def probe(endpoint: Endpoint, users: Scalable, made: Probe, options: GoodputOptions) -> None:
    """Run the probe to its end. If cancelled, `made.run` keeps its requests."""
    made.slo, run = options.slo, made.run
    others = ForeignLoad()
    run.began = time.monotonic()
    watched = _Watched(made, options)
    stalls = asyncio.create_task(_watch_stalls(made))
    task = asyncio.create_task(users.at(made.rate, made.seconds, made.seed).run(endpoint, run))
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_POLL_INTERVAL)
            watched.look()
            made.hopeless = watched.hopeless and not task.done()
            if made.hopeless or watched.nothing_to_learn():
                break
    finally:
        task.cancel()
        stalls.cancel()
        try:
            # `await task` would swallow a Ctrl-C
            await asyncio.gather(task, stalls, return_exceptions=True)
        finally:
            run.ended = run.ended or time.monotonic()
            made.tally = Tally.of(made.slo, run.exchanges, run.ended)
            made.foreign = others.share()
    if not task.cancelled():
        task.result()


async def _watch_stalls(made: Probe) -> None:
    """Wake every 10 ms and record the longest delay. Requests are sent, and tokens noted, as late as these wake-ups."""
    while True:
        due = time.monotonic() + _BEAT
        await asyncio.sleep(_BEAT)
        made.stall = max(made.stall, time.monotonic() - due)


class _Watched:
    """Tells whether a running probe can still change the result."""

    def __init__(self, made: Probe, options: GoodputOptions) -> None:
        self._made, self._share, self._slo = made, options.share, made.slo
        self._taken, self._missed = 0, 0
        self._open: set[Exchange] = set()

    def look(self) -> None:
        exchanges, now = self._made.run.exchanges, time.monotonic()
        self._open.update(exchanges[self._taken :])
        self._taken = len(exchanges)
        for exchange in list(self._open):
            if exchange.outcome is not Outcome.UNFINISHED or self._late(exchange, now):
                self._open.remove(exchange)
                self._missed += not self._slo.kept(exchange)

    def _late(self, exchange: Exchange, now: float) -> bool:
        """Whether the first token was too late, a gap was too long, or the next token is over a second late."""
        hangs = bool(exchange.arrivals) and now - exchange.arrivals[-1] > self._slo.gap + 1
        return hangs or self._slo.broke_ttft(exchange, now) or self._slo.broke_gap(exchange)

    @property
    def hopeless(self) -> bool:
        """Whether so many requests missed the SLO that the share is too low even if all others keep it."""
        expected = max(round(self._made.rate * self._made.seconds), self._taken)
        return wilson(max(0, expected - self._missed), expected)[1] < self._share

    def nothing_to_learn(self) -> bool:
        """Whether all requests were sent, all that still run have missed the SLO, and those of them without progress
        count as hung. If so, mark these as failed."""
        run, slo, now = self._made.run, self._slo, time.monotonic()
        running = [each for each in run.exchanges if each.outcome is Outcome.UNFINISHED]
        if (
            not running
            or now < (run.asks_until or run.began + self._made.seconds) + 1
            or self._open & {*running}
        ):
            return False
        silent = [each for each in running if not each.arrivals or now - each.arrivals[-1] > slo.gap + 1]
        if any(now - (each.arrivals or [each.started + slo.ttft])[-1] < _HANGS for each in silent):
            return False
        for each in silent:
            each.hung, each.error, each.ended = True, f"no token for {_HANGS:g} s", now
        return True


class Canary:
    """A tiny request. If its latency is that of the idle server, no other requests wait there."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._usual = 0.0

    async def learn(self) -> None:
        """Measure its latency on an idle server. Raises Unavailable with the server's error."""
        times = []
        for _ in range(3):
            exchange = await self._ask()
            if exchange.error:
                raise Unavailable(f"{self._endpoint.url} does not answer: {exchange.error}")
            times.append(exchange.ended - exchange.started)
        self._usual = min(times)

    async def until_idle(self) -> None:
        """Wait until the server is as fast as when idle. Raises Unavailable if it stays busy."""
        begin = time.monotonic()
        while True:
            exchange = await self._ask()
            took = exchange.ended - exchange.started
            if not exchange.error and took <= 2 * self._usual + 0.05:
                return
            if time.monotonic() - begin > _IDLE_WITHIN:
                answer, late = exchange.error or f"a tiny request takes {took:.1f} s", f"{_IDLE_WITHIN:g} s"
                raise Unavailable(f"{self._endpoint.url} is still busy {late} after a probe: {answer}")
            await asyncio.sleep(0.2)

    async def _ask(self) -> Exchange:
        exchange = Exchange(self._endpoint.body("0", 1))
        await self._endpoint.ask(exchange, _CANARY_TIMEOUT)
        return exchange


async def warm_up(endpoint: Endpoint, users: Scalable, rate: float, seconds: float, seed: int) -> LoadRun:
    """Send requests that do not count and wait for them. Raises Unavailable if none succeeds."""
    run = LoadRun()
    patient = GoodputOptions(slo=Slo(_WARM_WITHIN, 3600.0), share=0.0)
    await probe(endpoint, users, Probe(rate, seconds, seed, run), patient)
    failed = run.of(Outcome.FAILED)
    if failed and not run.of(Outcome.FINISHED):
        raise Unavailable(f"{endpoint.url} answers none of {len(failed)} requests: {failed[0].error}")
    return run
