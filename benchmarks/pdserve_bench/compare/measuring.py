"""The measurements: candidates are screened at common rates, and the best of each kind are measured in turn until their
goodput is known, the baseline twice."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from pdserve.errors import ConfigError, Unavailable
from pdserve_bench.client import Outcome
from pdserve_bench.compare.candidates import Candidate, Launch
from pdserve_bench.compare.recommend import AtLoad, CandidateResult
from pdserve_bench.foreign import ForeignLoad
from pdserve_bench.goodput.measure import Canary, GoodputOptions, Probe, probe, warm_up
from pdserve_bench.goodput.search import GoodputSearch
from pdserve_bench.progress import Schedule
from pdserve_bench.runs import Scalable
from pdserve_bench.samples import percentile, wilson
from pdserve_bench.slo import Slo, Tally
from pdserve_bench.systems.system import Stage

_SCREENED = 12
"""requests of a probe that only sorts out; a low rate is probed for longer"""
LEAST_REQUESTS = 30
"""that a candidate's share was judged by at the rate that it carries, before anything is recommended"""
_CERTAIN = LEAST_REQUESTS
_LONGER = 2.0
"""times the seconds of a probe, at most"""
_ADOPTED = 0.2
"""seconds until all workers have a new threshold"""
_WARM_RATE = 2.0
_REST = "rest"
_NARROW = 1.5
"""a control whose interval is wider tells nothing of the noise"""


@dataclass(eq=False)
class Entrant:
    """A candidate and what is known of it so far."""

    candidate: Candidate
    search: GoodputSearch
    probes: list[Probe] = field(default_factory=list)
    """that have ended"""
    cpu: dict[int, float] = field(default_factory=dict)
    """CPU seconds of its processes, by the place of the probe"""
    problem: str = ""

    @property
    def name(self) -> str:
        return self.candidate.name

    def of(self, rate: float | None) -> list[Probe]:
        return [each for each in self.probes if each.rate == rate]

    def share(self, rate: float) -> float | None:
        """None where it was not probed at this rate."""
        found = self.of(rate)
        judged = self.judged(rate)
        return sum(each.tally.kept for each in found) / judged if judged else None

    def judged(self, rate: float) -> int:
        return sum(each.judged for each in self.of(rate))

    @property
    def thin(self) -> float | None:
        """A rate on which its interval rests and which was probed too little. What broke needs a second probe, since a
        machine that was busy for a moment breaks any rate, unless hardly any request kept the SLO."""
        low, high = self.search.carried, self.search.broken
        if low is not None and self.judged(low) < LEAST_REQUESTS:
            return low
        if high is not None and self.judged(high) < LEAST_REQUESTS and len(self.of(high)) < 2:
            kept = sum(each.tally.kept for each in self.of(high))
            return high if wilson(kept, self.judged(high))[1] > self.search.share / 2 else None
        return None

    def rank(self) -> tuple[float, float]:
        """More is better: what it carries, and how near it came at the lowest rate that it does not carry."""
        broken = self.search.broken
        return self.search.estimate or 0.0, (self.share(broken) or 0.0) if broken else 1.0

    def result(self, rate: float | None = None) -> CandidateResult:
        """Sum up what is known, with what users saw at `rate`."""
        search, candidate = self.search, self.candidate
        low = search.carried
        lowest = low if low is not None else min((each.rate for each in self.probes), default=0.0)
        return CandidateResult(
            candidate.name,
            candidate.aggregated,
            low,
            search.broken,
            search.estimate,
            sum((each.tally for each in self.of(search.broken)), Tally()),
            sum(each.tally.failed for each in self.probes if each.rate <= lowest),
            candidate.processes,
            candidate.split,
            self.at(rate) if rate is not None else None,
            self.problem,
            self.judged(low) if low is not None else 0,
            "" if self.thin is None else f"{self.judged(self.thin)} requests at {self.thin:.3g} requests/s",
        )

    def ttfts(self, rate: float) -> list[float]:
        return [ttft for each in self.of(rate) for ttft in each.ttfts]

    def at(self, rate: float) -> AtLoad | None:
        probes = self.of(rate)
        if not probes:
            return None
        ttfts = self.ttfts(rate)
        gaps = [gap for each in probes for gap in each.longest_gaps]
        done = [exchange for each in probes for exchange in each.run.of(Outcome.FINISHED)]
        tokens = sum(each.prompt_tokens + each.output_tokens for each in done)
        spent = sum(self.cpu.get(number, 0.0) for number, each in enumerate(self.probes) if each.rate == rate)
        return AtLoad(
            rate,
            sum(each.tally.kept for each in probes),
            sum(each.judged for each in probes),
            (percentile(ttfts, 0.5), percentile(ttfts, 0.9)),
            (percentile(gaps, 0.5), percentile(gaps, 0.9)),
            sum(each.output_tokens for each in done) / sum(each.run.seconds for each in probes),
            1000 * spent / tokens if tokens and spent else None,
        )


def best_of(entrants: Iterable[Entrant], aggregated: bool) -> Entrant | None:
    """Return the best measured entrant of this kind; the first of equals."""
    fit = [
        each
        for each in entrants
        if each.candidate.aggregated == aggregated and each.probes and not each.problem
    ]
    return max(fit, key=Entrant.rank, default=None)


def common_rate(entrants: Sequence[Entrant]) -> float | None:
    """A rate at which each of them was probed, so that what users saw there can be compared: the highest that at least
    one of them carries; where none carries any, the lowest."""
    if not entrants:
        return None
    rates = set.intersection(*({each.rate for each in entrant.probes} for entrant in entrants))
    most = max(each.search.carried or 0.0 for each in entrants)
    return max((rate for rate in rates if rate <= most), default=min(rates, default=None))


@dataclass
class Measuring:
    stage: Stage
    """what runs, by the keys of the launches"""
    schedule: Schedule
    slo: Slo
    share: float
    seed: int
    users: Scalable | None = None
    """known once a first system runs"""
    deadline: float = 0.0
    """monotonic: when all of it should be over, for the time left that is shown"""
    foreign: list[float | None] = field(default_factory=list)
    """the share of the machine that other programs took, for each probe"""
    _applied: dict[str, dict[str, str]] = field(default_factory=dict)
    _canaries: dict[str, Canary] = field(default_factory=dict)
    _seeds: int = 0

    def phase(self, name: str, seconds: float) -> AbstractContextManager[None]:
        """The time left is that of the budget."""
        self.announce_rest(seconds)
        return self.schedule.phase(name, seconds)

    def announce_rest(self, seconds: float) -> None:
        """What is left of the budget after so many seconds."""
        self.schedule.cancel(_REST)
        self.schedule.announce(_REST, max(0.0, self.deadline - time.monotonic() - seconds))

    async def start(self, launches: Iterable[Launch]) -> dict[str, str]:
        """All that do not run yet, at the same time. Returns why those did not come up that did not, by key."""

        async def start(launch: Launch) -> None:
            try:
                await self.stage.start(launch.key, launch.system)
            except (ConfigError, Unavailable, OSError) as error:
                self.schedule.say(f"{launch.key}: {error}")
                problems[launch.key] = _brief(str(error))

        problems: dict[str, str] = {}
        async with asyncio.TaskGroup() as group:
            for launch in launches:
                if launch.key not in self.stage.up:
                    group.create_task(start(launch))
        return problems

    async def warm_up(self, entrant: Entrant, seconds: float) -> tuple[float, float] | None:
        """Some requests that do not count, of its own launch. Returns the shortest TTFT and the shortest time of a
        whole request, None where there was none; notes where it does not answer."""
        running = self.stage.up[entrant.candidate.launch.key]
        assert self.users is not None
        try:
            run = await warm_up(running.endpoint, self.users, _WARM_RATE, seconds, self._seed())
            canary = self._canaries[entrant.candidate.launch.key] = Canary(running.endpoint)
            await canary.learn()
        except Unavailable as error:
            entrant.problem = str(error)
            return None
        done = [each for each in run.of(Outcome.FINISHED) if each.ttft is not None]
        if not done:
            return None
        return min(each.ttft or 0.0 for each in done), min(each.ended - each.started for each in done)

    async def screen(self, entrants: Sequence[Entrant], start: float, seconds: float, until: float) -> None:
        """Sort out within each kind, until the time (monotonic) is over; but probe all at the start rate."""
        kinds = [[each for each in entrants if each.candidate.aggregated == kind] for kind in (True, False)]
        for number, kind in enumerate(kinds):
            left = until - time.monotonic()
            part = left if number else left * len(kind) / max(1, len(entrants))
            await self._heat(kind, start, seconds, time.monotonic() + part)

    async def _heat(self, entrants: Sequence[Entrant], start: float, seconds: float, until: float) -> None:
        """Probe them at rates that double, those that break one no more, until one is left. Where none carries the
        start rate, it is halved until one does."""
        rate, alive, turn = start, [each for each in entrants if not each.problem], 0
        while alive:
            for entrant in alive if turn % 2 == 0 else alive[::-1]:
                if entrant.share(rate) is None and not entrant.problem:
                    if time.monotonic() > until and rate != start:
                        return
                    await self.probe(entrant, rate, stretched(rate, seconds, _SCREENED))
            turn += 1
            alive = [each for each in alive if not each.problem]
            kept = [each for each in alive if (each.share(rate) or 0.0) >= self.share]
            settled = len(kept) == 1 or (kept and rate < start) or (not kept and rate > start)
            if settled or len(alive) < 2 or rate < start / 100:
                return
            alive, rate = (kept, float(f"{2 * rate:.4g}")) if kept else (alive, float(f"{rate / 2:.4g}"))

    async def refine(
        self, searches: Sequence[tuple[Entrant, GoodputSearch]], seconds: float, until: float
    ) -> bool:
        """Probe them in turn, there and back, until each search is at its end (True) or the time is over."""
        turn = 0
        while time.monotonic() < until:
            order = list(searches if turn % 2 == 0 else searches[::-1])
            busy = False
            for entrant, search in order:
                rate = search.next()
                if rate is None and search is entrant.search:
                    rate = entrant.thin
                if rate is None or entrant.problem:
                    continue
                length = stretched(rate, seconds, _CERTAIN)
                if time.monotonic() + length / 2 > until:
                    return False
                busy = True
                await self.probe(entrant, rate, length, search)
            turn += 1
            if not busy:
                return True
        return False

    async def again(self, entrant: Entrant, start: float, seconds: float, until: float) -> GoodputSearch:
        """Measure a running system once more, as if nothing were known but where to look: at the two ends of what was
        found before, and from there on."""
        control = GoodputSearch(entrant.search.carried or start, self.share)
        for rate in (entrant.search.carried, entrant.search.broken):
            if rate is not None and time.monotonic() < until and control.broken is None:
                await self.probe(entrant, rate, stretched(rate, seconds, _CERTAIN), control)
        return control

    async def probe(
        self, entrant: Entrant, rate: float, seconds: float, search: GoodputSearch | None = None
    ) -> None:
        """Where the system fails, its problem says so."""
        try:
            made = await self._probe(entrant, rate, seconds, search)
        except Unavailable as error:
            entrant.problem = str(error)
            return
        (search or entrant.search).tell(rate, made.tally.kept, made.judged)
        if search is None or search is entrant.search:
            entrant.probes.append(made)

    async def _probe(
        self, entrant: Entrant, rate: float, seconds: float, search: GoodputSearch | None
    ) -> Probe:
        assert self.users is not None
        key = entrant.candidate.launch.key
        running = self.stage.up[key]
        settings = dict(entrant.candidate.settings)
        if settings != self._applied.get(key, {}):
            await running.apply(settings)
            self._applied[key] = settings
            await asyncio.sleep(_ADOPTED)
        made = Probe(rate, seconds, self._seed())
        control = " (control)" if search is not None and search is not entrant.search else ""
        with self.phase(f"{entrant.name}{control}: {rate:.3g} req/s", seconds):
            meter, others = running.cpu_meter(), ForeignLoad()
            before = meter.read()
            await probe(running.endpoint, self.users, made, GoodputOptions(slo=self.slo, share=self.share))
            self.foreign.append(others.share())
            if not control:
                entrant.cpu[len(entrant.probes)] = meter.read().since(before).total
            await self._canaries[key].until_idle()
        return made

    def _seed(self) -> int:
        self._seeds += 1
        return self.seed + self._seeds


def stretched(rate: float, seconds: float, requests: int) -> float:
    return max(seconds, min(requests / rate, _LONGER * seconds))


def noise(search: GoodputSearch, control: GoodputSearch) -> float | None:
    """Return by how much two measurements of the same system differ, as a share; None where the control did not get
    far."""
    ours, theirs, low, high = search.estimate, control.estimate, control.carried, control.broken
    if not ours or not theirs or not low or not high or high / low > _NARROW:
        return None
    return abs(ours - theirs) / max(ours, theirs)


def _brief(text: str) -> str:
    """Return the first and the last line, without the log between them, which was said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]]))[:300] if lines else "no reason was given"


def unstarted(entrants: Iterable[Entrant], problems: Mapping[str, str]) -> None:
    """Note why a launch did not come up."""
    for entrant in entrants:
        if problem := problems.get(entrant.candidate.launch.key):
            entrant.problem = problem
