"""Probes of a server: users at one rate for some seconds, and how many of their requests keep an SLO.

`users` are any `Scalable`, as `PoissonRequests`. Each probe begins on an idle server (`Canary`), so that no backlog of
one leaks into the next, and is cut short when so many requests have missed the SLO that the rest cannot make up for it.
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
"""seconds until first tokens are waited for no longer"""
_HANGS = 10.0
"""seconds by which a token is late, of a request that is given up as one without an end"""
_LOOK = 0.2
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
    """seconds for all of it: no probe is begun that would end later"""
    seed: int = 1
    warm_up: bool = True
    longer: float = 3.0
    """times the seconds of a probe, at most, where the rate is low"""
    least: int = 0
    """requests that both ends of the last interval are judged by: they are probed again until there are as many"""


JUDGE_LATER = GoodputOptions(Slo(3600.0, 3600.0), share=0.0)
"""no probe is cut short"""


@dataclass
class Probe:
    """Users at one rate."""

    rate: float
    seconds: float
    """for which requests were sent, unless it was cut short"""
    seed: int
    run: LoadRun = field(default_factory=LoadRun)
    tally: Tally = field(default_factory=Tally)
    hopeless: bool = False
    """cut short, for it could not keep the SLO any more: the requests that were running are in no share"""
    counted: bool = False
    """in the search: it was not broken off from outside"""
    stall: float = 0.0
    """seconds by which the load generator itself was late, at most"""
    foreign: float | None = None
    """the share of this machine that other programs took; None where it is not known"""
    slo: Slo = field(default_factory=Slo)

    @property
    def judged(self) -> int:
        """All requests, without those that a hopeless probe cut short before they had broken a promise."""
        return self.tally.requests - (self.tally.unfinished if self.hopeless else 0)

    @property
    def share(self) -> float:
        """of `judged` that kept the SLO; 1 of none"""
        return self.tally.kept / self.judged if self.judged else 1.0

    @property
    def ttfts(self) -> list[float]:
        """Seconds to the first token, or of the wait for it where that exceeded the SLO's bound.
        A refusal is no fast first token, and what was cut earlier says nothing."""
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
        """One of each request with two tokens, or that waits for its second; with what a request still waits for."""
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
    """Run it to its end. Cancelled, it has what there is: its requests are in `made.run`."""
    made.slo, run = options.slo, made.run
    others = ForeignLoad()
    run.began = time.monotonic()
    watched = _Watched(made, options)
    stalls = asyncio.create_task(_watch_stalls(made))
    task = asyncio.create_task(users.at(made.rate, made.seconds, made.seed).run(endpoint, run))
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_LOOK)
            watched.look()
            made.hopeless = watched.hopeless and not task.done()
            if made.hopeless or watched.nothing_to_learn():
                break
    finally:
        task.cancel()
        stalls.cancel()
        try:
            # not `await task`: a Ctrl-C that comes now would be swallowed
            await asyncio.gather(task, stalls, return_exceptions=True)
        finally:
            run.ended = run.ended or time.monotonic()
            made.tally = Tally.of(made.slo, run.exchanges, run.ended)
            made.foreign = others.share()
    if not task.cancelled():
        task.result()


async def _watch_stalls(made: Probe) -> None:
    """Wake up every 10 ms: so late are this event loop's sends, and the times of arrivals."""
    while True:
        due = time.monotonic() + _BEAT
        await asyncio.sleep(_BEAT)
        made.stall = max(made.stall, time.monotonic() - due)


class _Watched:
    """A probe that runs: is there still something to learn?"""

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
        """Whether its first token or a gap was too long, or the next token is more than a second late by now."""
        hangs = bool(exchange.arrivals) and now - exchange.arrivals[-1] > self._slo.gap + 1
        return hangs or self._slo.broke_ttft(exchange, now) or self._slo.broke_gap(exchange)

    @property
    def hopeless(self) -> bool:
        """So many requests have missed the SLO that the probe surely shows a rate that is not carried, even if all
        others keep it."""
        expected = max(round(self._made.rate * self._made.seconds), self._taken)
        return wilson(max(0, expected - self._missed), expected)[1] < self._share

    def nothing_to_learn(self) -> bool:
        """All is sent, and what still runs has missed. What makes no progress is waited for, until it surely hangs: it
        has failed then."""
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
    """A tiny request: answered as fast as on the idle server, no backlog is before it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._usual = 0.0

    async def learn(self) -> None:
        """Measure it on an idle server. Raises Unavailable with its words where it does not answer."""
        times = []
        for _ in range(3):
            exchange = await self._ask()
            if exchange.error:
                raise Unavailable(f"{self._endpoint.url} does not answer: {exchange.error}")
            times.append(exchange.ended - exchange.started)
        self._usual = min(times)

    async def until_idle(self) -> None:
        """Raises Unavailable where it does not become so."""
        begin = time.monotonic()
        while True:
            exchange = await self._ask()
            took = exchange.ended - exchange.started
            if not exchange.error and took <= 2 * self._usual + 0.05:
                return
            if time.monotonic() - begin > _IDLE_WITHIN:
                answer, late = exchange.error or f"a tiny request takes {took:.1f} s", f"{_IDLE_WITHIN:g} s"
                raise Unavailable(f"{self._endpoint.url} is not idle again {late} after a probe: {answer}")
            await asyncio.sleep(0.2)

    async def _ask(self) -> Exchange:
        exchange = Exchange(self._endpoint.body("0", 1))
        await self._endpoint.ask(exchange, _CANARY_TIMEOUT)
        return exchange


async def warm_up(endpoint: Endpoint, users: Scalable, rate: float, seconds: float, seed: int) -> LoadRun:
    """Some requests that do not count, all answered or given up. Raises Unavailable where the server answers none of
    them."""
    run = LoadRun()
    patient = GoodputOptions(slo=Slo(_WARM_WITHIN, 3600.0), share=0.0)
    await probe(endpoint, users, Probe(rate, seconds, seed, run), patient)
    failed = run.of(Outcome.FAILED)
    if failed and not run.of(Outcome.FINISHED):
        raise Unavailable(f"{endpoint.url} answers none of {len(failed)} requests: {failed[0].error}")
    return run
