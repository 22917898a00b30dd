"""Goodput of a server: probes, each of them users at one rate for some seconds, until the search is over.

    found = FoundGoodput(options)             # readable at any time, as after Ctrl-C
    await find_goodput(endpoint, users, found, schedule)
    found.search.carried, found.search.broken, found.search.estimate, found.probes

`users` are any `Scalable`, as `PoissonRequests`. Each probe begins on an idle server, so that no backlog of one leaks
into the next, and is broken off when so many requests have missed the SLO that the rest cannot make up for it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from pdserve.errors import Unavailable
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.goodput.search import GoodputSearch
from pdserve_bench.progress import Schedule
from pdserve_bench.runs import LoadRun, Scalable
from pdserve_bench.samples import CONFIDENCE, wilson
from pdserve_bench.slo import SHARE, Slo, Tally
from pdserve_bench.stalls import GeneratorStalls

_LONGER = 3.0
"""times the seconds of a probe, at most"""
_IDLE_WITHIN = 60.0
_WARM_SECONDS, _WARM_RATE, _WARM_WITHIN = 4.0, 4.0, 120.0
"""seconds, requests per second at most, and seconds until first tokens are waited for no longer"""
_LOOK = 0.2
_CANARY_TIMEOUT = 30.0


@dataclass(frozen=True)
class GoodputOptions:
    """Rates in requests per second, times in seconds."""

    slo: Slo = field(default_factory=Slo)
    share: float = SHARE
    seconds: float = 20.0
    """of a probe"""
    start_rate: float = 4.0
    precision: float = 0.1
    lowest: float = 0.05
    highest: float = 1000.0
    most_probes: int = 24
    budget: float = 900.0
    """seconds for all of it: no probe is begun that would end later"""
    seed: int = 1
    warm_up: bool = True


@dataclass
class Probe:
    """Users at one rate."""

    rate: float
    """that was asked for"""
    seconds: float
    """for which requests were sent, unless it was broken off"""
    seed: int
    run: LoadRun = field(default_factory=LoadRun)
    tally: Tally = field(default_factory=Tally)
    """once it has ended"""
    hopeless: bool = False
    """broken off, for it could not keep the SLO any more: the requests that were running are in no share"""
    blamed: int = 0
    """requests that broke the SLO, and would have kept it had the load generator not been late itself"""
    disturbed: bool = False
    """those decide whether the rate is carried: it is probed once more instead"""
    counted: bool = False
    """the search was told of it: it is neither disturbed nor broken off from outside"""
    stall: float = 0.0
    """the longest, of the load generator, in seconds"""
    slo: Slo = field(default_factory=Slo)
    """set by `probe`"""

    @property
    def judged(self) -> int:
        """All requests, without those that a hopeless probe broke off before they had broken a promise."""
        return self.tally.requests - (self.tally.unfinished if self.hopeless else 0)

    @property
    def share(self) -> float:
        """of `judged` that kept the SLO; 1 of none"""
        return self.tally.kept / self.judged if self.judged else 1.0

    @property
    def uncertainty(self) -> float:
        """Half of Wilson's interval of the share"""
        low, high = wilson(self.tally.kept, self.judged)
        return (high - low) / 2

    @property
    def sent_rate(self) -> float:
        """Requests per second, as they were sent: fewer than asked for where the generator did not keep up"""
        last = max((each.started for each in self.run.exchanges), default=self.run.began)
        lasted = max(last - self.run.began, min(self.seconds, self.run.seconds))
        return self.tally.requests / lasted if lasted else 0.0

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
            [*each.gaps, *([] if each.ended else [until - each.arrivals[-1]])]
            for each in self.run.exchanges
            if each.arrivals
        ]
        return [max(gaps) for gaps in waits if gaps]


class FoundGoodput:
    """What is known so far."""

    def __init__(self, options: GoodputOptions) -> None:
        self.options = options
        self.probes: list[Probe] = []
        """in order, disturbed ones too; the last one may still run: `run.ended` is 0 then"""
        self.search = GoodputSearch(
            options.start_rate,
            options.share,
            options.precision,
            options.lowest,
            options.highest,
            options.most_probes,
        )
        self.complete = False
        """the search has come to its end, neither broken off nor out of time"""
        self.notes: list[str] = []

    def of(self, rate: float | None) -> list[Probe]:
        """The probes that counted, at this rate."""
        return [probe for probe in self.probes if probe.rate == rate and probe.counted]


def expected_seconds(options: GoodputOptions) -> float:
    """Return about how long the search takes, to announce it."""
    return min(options.budget, GoodputSearch(precision=options.precision).left() * (options.seconds + 2) + 10)


async def find_goodput(
    endpoint: Endpoint,
    users: Scalable,
    found: FoundGoodput,
    schedule: Schedule | None = None,
    label: str = "goodput",
    ended: Callable[[Probe], object] = lambda _: None,
) -> FoundGoodput:
    """Fill `found`. Where the schedule has announced a phase of the name `label`, that stands for all of this. `ended`
    is called with each probe when it is counted, or is not. Raises Unavailable where the server answers no request at
    all, or does not become idle again."""
    schedule = schedule or Schedule()
    options, deadline = found.options, time.monotonic() + found.options.budget
    schedule.cancel(label)
    schedule.announce(label, expected_seconds(options))
    canary = Canary(endpoint)
    await canary.learn()
    try:
        if options.warm_up:
            slowly, briefly = min(_WARM_RATE, options.start_rate), min(_WARM_SECONDS, options.seconds)
            with schedule.phase(f"{label}: warming up", briefly):
                await warm_up(endpoint, users, slowly, briefly, options.seed - 1)
                await canary.until_idle()
        while (rate := found.search.next()) is not None:
            seconds = _probe_seconds(rate, options)
            if time.monotonic() + seconds > deadline:
                found.notes.append(f"Out of time after {options.budget:g} s: the search was not at its end.")
                return found
            schedule.cancel(label)
            left = min((found.search.left() - 1) * (seconds + 2), deadline - time.monotonic() - seconds)
            schedule.announce(label, max(0.0, left))
            found.probes.append(Probe(rate, seconds, options.seed + len(found.probes)))
            with schedule.phase(f"{label}: {rate:.3g} req/s", seconds):
                await probe(endpoint, users, found.probes[-1], options, schedule.update)
                await canary.until_idle()
            _settle(found, found.probes[-1])
            ended(found.probes[-1])
            if found.search.carried is None and _none_alone(found):
                found.notes.append(
                    "No lower rate was tried: requests that had the server to themselves missed too."
                )
                break
        found.complete = True
    finally:
        schedule.cancel(label)
    return found


def _settle(found: FoundGoodput, ended: Probe) -> None:
    """Tell the search. A disturbed probe is made once more instead; what is disturbed then too, counts."""
    before = found.probes[-2] if len(found.probes) > 1 else None
    if ended.disturbed and not (before and before.disturbed and not before.counted):
        return
    ended.counted = True
    found.search.tell(ended.rate, ended.tally.kept, ended.judged)


def _none_alone(found: FoundGoodput) -> bool:
    """Whether requests that had the server to themselves have missed the SLO too: then no lower rate is carried."""
    slo, kept, count = found.options.slo, 0, 0
    for made in (probe for probe in found.probes if probe.counted):
        until = 0.0
        exchanges = sorted(made.run.exchanges, key=lambda each: each.started)
        for exchange, after in zip_longest(exchanges, exchanges[1:]):
            ended = exchange.ended or made.run.ended
            if exchange.started >= until and exchange.ended and (after is None or ended <= after.started):
                kept, count = kept + slo.kept(exchange), count + 1
            until = max(until, ended)
    return wilson(kept, count)[1] < found.options.share


def _probe_seconds(rate: float, options: GoodputOptions) -> float:
    """A low rate is probed for longer: until there are twice as many requests as it takes to be sure of a rate at which
    all keep the SLO (Wilson's interval; 49 for 90 %)."""
    least = 2 * CONFIDENCE**2 * options.share / max(0.02, 1 - options.share)
    return max(options.seconds, min(least / rate, _LONGER * options.seconds))


async def probe(
    endpoint: Endpoint,
    users: Scalable,
    made: Probe,
    options: GoodputOptions,
    news: Callable[[str], None] = lambda _: None,
) -> None:
    """Run it to its end. Cancelled, it has what there is: its requests are in `made.run`."""
    made.slo, run = options.slo, made.run
    run.began = time.monotonic()
    watched = _Watched(made, options)
    async with GeneratorStalls() as stalls:
        task = asyncio.create_task(users.at(made.rate, made.seconds, made.seed).run(endpoint, run))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LOOK)
                made.hopeless = watched.hopeless(stalls) and not task.done()
                news(watched.news())
                if made.hopeless or watched.nothing_to_learn():
                    break
        finally:
            task.cancel()
            try:
                await asyncio.gather(
                    task, return_exceptions=True
                )  # so that a Ctrl-C that comes now is not swallowed
            finally:
                run.ended = run.ended or time.monotonic()
                made.tally = Tally.of(made.slo, run.exchanges, run.ended)
                made.stall = stalls.longest
                made.blamed = sum(stalls.to_blame(made.slo, exchange) for exchange in run.exchanges)
    if not task.cancelled():
        task.result()
    carried_if = (made.tally.kept + made.blamed) / made.judged if made.judged else 1.0
    made.disturbed = made.share < options.share <= carried_if


class _Watched:
    """A probe that runs: is there still something to learn?"""

    def __init__(self, made: Probe, options: GoodputOptions) -> None:
        self._made, self._options, self._slo = made, options, options.slo
        self._taken, self._missed = 0, 0
        self._open: dict[Exchange, int] = {}
        """those that may still keep the SLO, and how many of their tokens were looked at"""

    def hopeless(self, stalls: GeneratorStalls) -> bool:
        """So many requests have certainly missed the SLO that the probe surely shows a rate that is not carried, even
        if all others keep it."""
        self._look(stalls)
        expected = max(round(self._made.rate * self._made.seconds), len(self._made.run.exchanges))
        return wilson(max(0, expected - self._missed), expected)[1] < self._options.share

    def news(self) -> str:
        return f"{self._taken} sent, {len(self._open)} running, {self._missed} missed"

    def nothing_to_learn(self) -> bool:
        """All is sent, and what still runs has missed, or does not end."""
        run = self._made.run
        late = time.monotonic() - (run.asks_until or run.began + self._made.seconds)
        running = {each for each in run.exchanges if each.outcome is Outcome.UNFINISHED}
        return late > 1 and bool(running) and not running & self._open.keys()

    def _look(self, stalls: GeneratorStalls) -> None:
        exchanges, now = self._made.run.exchanges, time.monotonic()
        self._open.update(dict.fromkeys(exchanges[self._taken :], 0))
        self._taken = len(exchanges)
        for exchange, seen in list(self._open.items()):
            ended = exchange.outcome is not Outcome.UNFINISHED
            if not ended and not self._late(exchange, seen, now, stalls):
                self._open[exchange] = max(0, len(exchange.arrivals) - 1)
                continue
            if not ended and exchange.arrivals and stalls.to_blame(self._slo, exchange):
                continue
            del self._open[exchange]
            self._missed += not self._slo.kept(exchange) and not stalls.to_blame(self._slo, exchange)

    def _late(self, exchange: Exchange, seen: int, now: float, stalls: GeneratorStalls) -> bool:
        """Whether its first token, or one that came since the last look, was too late; or the next one is more than a
        second late by now."""
        since = exchange.arrivals[-1] if exchange.arrivals else exchange.started
        now -= stalls.within(since, now)
        gaps = (after - before for before, after in pairwise(exchange.arrivals[seen:]))
        hangs = bool(exchange.arrivals) and now - since > self._slo.gap + 1
        return self._slo.broke_ttft(exchange, now) or hangs or any(gap > self._slo.gap for gap in gaps)


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
            if not exchange.error and exchange.ended - exchange.started <= 2 * self._usual + 0.05:
                return
            if time.monotonic() - begin > _IDLE_WITHIN:
                answer = (
                    exchange.error or f"answers a tiny request in {exchange.ended - exchange.started:.1f} s"
                )
                raise Unavailable(
                    f"{self._endpoint.url} is not idle again {_IDLE_WITHIN:g} s after a probe: {answer}"
                )
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
