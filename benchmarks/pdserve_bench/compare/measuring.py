"""Start candidates and search their goodput, as `bench goodput` does, for a comparison."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdserve_bench.client import Outcome
from pdserve_bench.compare.candidates import Candidate, HardwareKind
from pdserve_bench.compare.recommend import AtLoad, CandidateResult
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.goodput.measure import GoodputOptions, Probe, warm_up
from pdserve_bench.goodput.result import GoodputResult, find_goodput
from pdserve_bench.measure.runs import Scalable
from pdserve_bench.measure.samples import percentile
from pdserve_bench.measure.slo import SHARE, Slo, Tally
from pdserve_bench.progress import begin

START_SECONDS = {HardwareKind.CPU: 40.0, HardwareKind.GPU: 120.0, HardwareKind.SIM: 15.0}
LEAST_REQUESTS = 30
"""Requests that must be judged at the carried and at the broken rate before a candidate is recommended."""
_LEAST, _MOST = 4.5, 20.0
"""Bounds of a probe's length in seconds."""
_PROBES = 6
_STEADY = 2.5
"""Minimal length of a probe, in durations of a single request."""
_LONGER = 2.0
"""At a low rate, a probe lasts up to this many times as long as others."""
_WARM_RATE = 2.0
_RATES = (0.05, 50.0)
"""Bounds of the first rate, in requests per second."""
_NARROW = 1.5
"""Largest ratio of broken to carried rate at which a repetition is precise enough to tell the noise."""


@dataclass(frozen=True)
class CompareOptions:
    file: Path
    slo: Slo
    share: float = SHARE
    rate: float | None = None
    """Requests per second that the user needs."""
    minutes: float = 9.0
    seed: int = 1


@dataclass(frozen=True)
class UserLoad:
    described: str
    make: Callable[[Endpoint], Awaitable[Scalable]]
    """Measures the endpoint's tokens per word and returns the load."""


@dataclass(eq=False)
class Entrant:
    candidate: Candidate
    found: GoodputResult
    problem: str = ""
    again: tuple[float | None, float | None] = (None, None)
    """Carried and broken rates of the repetition that tells the noise."""

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def probes(self) -> list[Probe]:
        """Probes that have ended."""
        return [each for each in self.found.probes if each.counted]

    def rank(self) -> tuple[float, float]:
        """Sort key, higher is better: the goodput, then the share kept at the lowest broken rate."""
        search = self.found.search
        return search.estimate or 0.0, self.found.share(search.broken) if search.broken else 1.0

    def result(self, rate: float | None = None) -> CandidateResult:
        """Summarize, with latencies at `rate`, else at the highest carried rate. If the candidate was measured twice,
        `carried` and `broken` span both intervals."""
        found, search, candidate = self.found, self.found.search, self.candidate
        low, high, thin = search.carried, search.broken, found.thin
        lowest = low if low is not None else min((each.rate for each in self.probes), default=0.0)
        return CandidateResult(
            candidate.name,
            candidate.aggregated,
            low and min(low, self.again[0] or low),
            high and max(high, self.again[1] or high),
            search.estimate,
            sum((each.tally for each in found.of(search.broken)), Tally()),
            sum(each.tally.failed for each in self.probes if each.rate <= lowest),
            candidate.split,
            self.at(lowest if rate is None else rate),
            self.problem,
            "" if thin is None else f"{found.judged(thin)} requests at {thin:.3g} requests/s",
        )

    def at(self, rate: float) -> AtLoad | None:
        probes = self.found.of(rate)
        if not probes:
            return None
        ttfts = [ttft for each in probes for ttft in each.ttfts]
        gaps = [gap for each in probes for gap in each.longest_gaps]
        return AtLoad(
            rate,
            sum(each.tally.kept for each in probes),
            self.found.judged(rate),
            (percentile(ttfts, 0.5), percentile(ttfts, 0.9)),
            (percentile(gaps, 0.5), percentile(gaps, 0.9)),
        )


def best_of(entrants: Iterable[Entrant], aggregated: bool) -> Entrant | None:
    """Return the best measured entrant of this kind; of equals, the first."""
    kind = [each for each in entrants if each.candidate.aggregated == aggregated]
    return max((each for each in kind if each.probes and not each.problem), key=Entrant.rank, default=None)


@dataclass
class Measuring:
    """Starts one candidate at a time, because others would take CPU from it, and searches its goodput."""

    folder: Path
    """An existing folder; each start gets a new subfolder."""
    options: CompareOptions
    load: UserLoad
    kind: HardwareKind
    running: Endpoint | None = None
    name: str = ""
    """Name of the running candidate."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _users: Scalable | None = None
    _rate: float = 1.0
    """Requests per second of the first probes."""
    _whole: float = 0.0
    """Seconds of the fastest request of the first warm-up."""
    _seed: int = 0

    async def start(self, candidate: Candidate) -> None:
        """Stop the running candidate, start this one and warm it up. Raises ConfigError and Unavailable."""
        await self.stop()
        begin(f"starting {candidate.name}", START_SECONDS[self.kind])
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self.folder))
        running = await self._stack.enter_async_context(candidate.system.start(folder))
        users = self._users or await self.load.make(running)
        warm = min(3.0, max(1.0, 60 * self.options.minutes / 150))
        begin(f"warming up {candidate.name}", warm)
        run = await warm_up(running, users, _WARM_RATE, warm, self._next_seed())
        done = [each for each in run.of(Outcome.FINISHED) if each.ttft]
        if done and self._users is None:
            low, high = _RATES
            first = min(high, max(low, 0.5 / min(each.ttft or 0.0 for each in done)))
            self._rate = self.options.rate or float(f"{first:.2g}")
            self._whole = min(each.ended - each.started for each in done)
        self._users, self.running, self.name = users, running, candidate.name

    async def stop(self) -> None:
        self.running, self.name = None, ""
        await self._stack.aclose()

    def unknown(self) -> GoodputResult:
        """Return an empty result for a new search."""
        options = self.options
        return GoodputResult(
            GoodputOptions(
                options.slo,
                options.share,
                start_rate=self._rate,
                seed=self._next_seed(),
                warm_up=False,
                longer=_LONGER,
                least=LEAST_REQUESTS,
            )
        )

    async def search(self, found: GoodputResult, until: float) -> None:
        """Search the goodput of the running candidate until `until` (monotonic), with at least one probe. Raises
        Unavailable."""
        assert self._users is not None
        assert self.running is not None
        left = until - time.monotonic()
        seconds = max(_LEAST, min(_MOST, _STEADY * self._whole), min(_MOST, left / _PROBES))
        found.options = replace(found.options, seconds=seconds, budget=max(left, _LONGER * seconds + 1))
        await find_goodput(self.running, self._users, found, self.name)

    def _next_seed(self) -> int:
        """Return a seed for a search or a warm-up. Each probe of a search adds 1, so these seeds are 1000 apart."""
        self._seed += 1
        return self.options.seed + 1000 * self._seed


def noise(first: GoodputResult, again: GoodputResult) -> float | None:
    """Return the relative difference of two measurements of one system, as a share of the lower; None if `again` is too
    imprecise."""
    ours, theirs = first.search.estimate, again.search.estimate
    low, high = again.search.carried, again.search.broken
    if not ours or not theirs or not low or not high or high / low > _NARROW:
        return None
    return max(ours, theirs) / min(ours, theirs) - 1
