"""One comparison: from a file and users to results, within a budget of time.

Where systems fit side by side (CPU, simulated engines) they run together and are measured in turn; GPUs have room for
one at a time. What comes when, of the time: aggregated engines at several batch sizes are screened, then the graphs
with their thresholds, then the best of both kinds are measured in turn, the aggregated one twice.
"""

import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pdserve.config.host import find_folder
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.errors import ConfigError, Unavailable
from pdserve.plan.machine import GIB, Machine
from pdserve.plan.model_folder import ModelFacts, read_model
from pdserve.plan.plan import make_plan
from pdserve_bench.compare.candidates import (
    Candidate,
    CandidateMaker,
    Hardware,
    HardwareKind,
    Launch,
    hardware,
)
from pdserve_bench.compare.measuring import Entrant, Measuring, best_of, common_rate, noise, unstarted
from pdserve_bench.compare.recommend import CandidateResult, Criteria, Recommendation, recommend
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.goodput.search import GoodputSearch
from pdserve_bench.progress import Schedule
from pdserve_bench.runs import Scalable
from pdserve_bench.sections import read_sections
from pdserve_bench.slo import Slo
from pdserve_bench.systems.system import PlainVllm, Stage

_START = {
    HardwareKind.CPU: (30.0, 50.0),
    HardwareKind.GPU: (90.0, 150.0),
    HardwareKind.SIM: (15.0, 15.0),
}
"""seconds until plain vLLM, and a graph, answer: expected"""
_STOP = 12.0
"""seconds at the end of the budget, for what runs to stop"""
_SCREENING = 0.45
"""of the time that is left when a first system runs"""
_MEMORY = 0.85
"""of what is free that may be used"""
_FINALS = 0.37
"""of the time, that the finalists have at least"""
_ANOTHER = 90.0
"""seconds that another aggregated engine takes: started and screened"""
_CPU_SCREENING = 0.3
"""of the time until the finals"""
_LEAST = 4.5
"""seconds of a probe"""
_STEADY = 2.5
"""times as long as a request takes alone: a probe, at least"""
_CONTROL = 0.65
"""of the time of the finalists, from when on the control runs too"""
_CPU_START = 14.0
"""CPU seconds until a simulated graph answers"""
_RATES = (0.05, 50.0)
"""first rates, in requests per second"""


@dataclass(frozen=True)
class CompareOptions:
    file: Path
    slo: Slo
    share: float = 0.9
    rate: float | None = None
    """requests per second that the user asks about"""
    minutes: float = 9.0
    batches: tuple[int, ...] = ()
    seed: int = 1


@dataclass(frozen=True)
class UserLoad:
    """What the users do."""

    described: str
    make: Callable[[Endpoint], Awaitable[Scalable]]
    """asks a first server what it has to know"""
    prompts: tuple[int, ...]
    """tokens of prompts, samples"""
    shared: bool
    """prompts have parts in common, so that a prefix cache has them"""


def maker_of(file: Path) -> CandidateMaker:
    """Makes the candidates of this file on this machine. Raises ConfigError."""
    config, machine = load(file, {}), Machine.detect()
    if config.frontend is None:
        raise ConfigError([f"{file} has no Frontend section: requests are sent as clients send them."])
    here = hardware(config, machine)
    if problems := make_plan(config, machine).problems:
        raise ConfigError(list(problems))
    model = None if here.kind is HardwareKind.SIM else _model(config)
    return CandidateMaker(config, read_sections(file), here, machine, model)


@dataclass
class Comparison:
    """Readable at any time."""

    options: CompareOptions
    asked: UserLoad
    config: Config
    here: Hardware
    maker: CandidateMaker
    entrants: list[Entrant] = field(default_factory=list)
    """in the order of simplicity within each kind"""
    noise: float | None = None
    foreign: list[float | None] = field(default_factory=list)
    """the share of the machine that other programs took, for each probe"""
    notes: list[str] = field(default_factory=list)
    _start: float = 0.0
    """requests per second of the first probes"""
    _whole: float = 0.0
    """seconds that a request takes alone"""

    @classmethod
    def prepare(cls, options: CompareOptions, asked: UserLoad) -> "Comparison":
        """Starts nothing. Raises ConfigError."""
        maker = maker_of(options.file)
        return cls(options, asked, maker.config, maker.here, maker)

    # what is known

    @property
    def finalists(self) -> list[Entrant]:
        """The best aggregated one first."""
        return _best(self.entrants)

    @property
    def seen_at(self) -> float | None:
        """The rate whose TTFTs and gaps are shown: the asked one, else one that all finalists were probed at."""
        asked = self.options.rate
        if asked is not None and any(each.of(asked) for each in self.entrants):
            return asked
        return common_rate(self.finalists)

    def results(self) -> list[CandidateResult]:
        return [each.result(self.seen_at) for each in self.entrants]

    def recommendation(self) -> Recommendation:
        options = self.options
        criteria = Criteria(options.slo, options.share, options.rate, self.noise, self.foreign_share)
        return recommend(self.results(), criteria)

    @property
    def foreign_share(self) -> float | None:
        """The mean of the probes."""
        known = [share for share in self.foreign if share is not None]
        return sum(known) / len(known) if known else None

    def candidate(self, recommendation: Recommendation) -> Candidate | None:
        name = recommendation.choice.name if recommendation.choice else None
        return next((each.candidate for each in self.entrants if each.name == name), None)

    # how it is found out

    async def run(self, schedule: Schedule) -> None:
        """Raises ConfigError and Unavailable where nothing at all can be measured."""
        options = self.options
        deadline = time.monotonic() + 60 * options.minutes
        with tempfile.TemporaryDirectory(prefix="pdserve-compare-") as folder:
            async with Stage(Path(folder), lambda _: None) as stage:
                measuring = Measuring(
                    stage,
                    schedule,
                    options.slo,
                    options.share,
                    options.seed,
                    deadline=deadline,
                    foreign=self.foreign,
                )
                await self._measure(measuring, deadline - _STOP)

    async def _measure(self, measuring: Measuring, until: float) -> None:
        alone = self.here.kind is HardwareKind.GPU
        first = [self._enter(each) for each in self.maker.aggregated(self.options.batches)]
        separate = self._affordable(
            self.maker.disaggregated(self.asked.prompts, self.asked.shared), len(_launches(first))
        )
        if self.here.kind is HardwareKind.SIM:
            await self._group(measuring, [*first, *map(self._enter, separate)], until)
        elif alone:
            await self._in_turn(measuring, first, separate, until)
            return
        else:
            finals = measuring.deadline - _STOP - _FINALS * 60 * self.options.minutes
            await self._group(measuring, [*first, *map(self._enter, separate)], finals, _CPU_SCREENING)
            chosen = (best_of(first, True) or first[0]).candidate
            more = [
                *self.maker.rebatched(chosen.threads, self.options.batches),
                *self.maker.replicas(chosen.shape.batch),
            ]
            most = int(max(0.0, finals - time.monotonic()) // _ANOTHER)
            if out := [each.name for each in more[most:]]:
                self.notes.append(f"Not run, for lack of time: {', '.join(out)}. Give --minutes more.")
            await self._group(measuring, list(map(self._enter, more[:most])), finals, _CPU_SCREENING)
        await self._final(measuring, until)

    def _affordable(self, candidates: Sequence[Candidate], others: int) -> list[Candidate]:
        """The file's own split, and as many others as can be started within a part of the time."""
        launches = _launches_of(candidates)
        _, graph = _START[self.here.kind]
        seconds = 60 * self.options.minutes * _SCREENING
        if self.here.kind is HardwareKind.SIM:
            most = int(seconds * (psutil.cpu_count() or 1) / _CPU_START) - others
        else:
            most = int(seconds / graph) - others // 2
        kept = {launch.key for launch in launches[: max(1, most)]}
        if out := [launch.key for launch in launches if launch.key not in kept]:
            self.notes.append(f"Not run, for lack of time: {', '.join(out)}. Give --minutes more.")
        return [each for each in candidates if each.launch.key in kept]

    def _enter(self, candidate: Candidate) -> Entrant:
        entrant = Entrant(candidate, GoodputSearch(self._start or 1.0, self.options.share))
        self.entrants.append(entrant)
        return entrant

    async def _group(
        self, measuring: Measuring, entrants: Sequence[Entrant], until: float, part: float = _SCREENING
    ) -> None:
        """Start as many as fit beside the best so far, screen them, and keep the best of each kind running."""
        waiting = _launches(entrants)
        while waiting:
            kept = {launch.key for launch in _launches(_best(self.entrants))}
            await measuring.stage.stop(*(key for key in measuring.stage.up if key not in kept))
            room = _MEMORY * psutil.virtual_memory().available / GIB
            now = [waiting.pop(0)]
            while waiting and sum(each.memory_gib for each in now) + waiting[0].memory_gib <= room:
                now.append(waiting.pop(0))
            keys = {launch.key for launch in now}
            some = [each for each in entrants if each.candidate.launch.key in keys]
            await self._start_up(measuring, now, some)
            rivals = [each for each in _best(self.entrants) if each not in some]
            end = time.monotonic() + part * (until - time.monotonic())
            await measuring.screen([*rivals, *some], self._start, self._probe_seconds(end, len(some)), end)

    def _probe_seconds(self, until: float, count: int) -> float:
        """Length of a screening probe, if each entrant gets some four."""
        return self._steady(min(10.0, (until - time.monotonic()) / (4 * count + 2)))

    def _steady(self, seconds: float) -> float:
        """Long enough that as many requests run as will in the long run."""
        return max(seconds, _LEAST, min(20.0, _STEADY * self._whole))

    async def _start_up(
        self, measuring: Measuring, launches: Sequence[Launch], entrants: Sequence[Entrant]
    ) -> None:
        """Start them and warm them up. Raises Unavailable where nothing has come up, and nothing is known."""
        plain, graph = _START[self.here.kind]
        expected = max(plain if isinstance(launch.system, PlainVllm) else graph for launch in launches)
        names = ", ".join(launch.key for launch in launches)
        with measuring.phase(f"starting {names}", expected + 0.5 * expected * (len(launches) - 1)):
            problems = await measuring.start(launches)
        unstarted(entrants, problems)
        if len(problems) == len(launches) and not any(each.probes for each in self.entrants):
            raise Unavailable("Nothing came up: " + "; ".join(problems.values()))
        if measuring.users is None:
            running = next(iter(measuring.stage.up.values()))
            measuring.users = await self.asked.make(running.endpoint)
        warm = min(3.0, max(1.0, 60 * self.options.minutes / 150))
        seen: dict[str, tuple[float, float]] = {}
        for entrant in entrants:
            key = entrant.candidate.launch.key
            if entrant.problem or key in seen:
                continue
            with measuring.phase(f"warming up {entrant.name}", warm + 1):
                seen[key] = await measuring.warm_up(entrant, warm) or (math.inf, math.inf)
        ttft, whole = min(seen.values(), default=(math.inf, math.inf))
        if not self._start and whole < math.inf:
            (low, high), self._whole = _RATES, whole
            self._start = self.options.rate or float(f"{min(high, max(low, 0.5 / ttft)):.2g}")
        for entrant in entrants:
            if not entrant.probes:
                entrant.search = GoodputSearch(self._start or 1.0, self.options.share)

    async def _final(self, measuring: Measuring, until: float) -> None:
        """Raises no error: a finalist that fails has a problem."""
        finalists = self.finalists
        kept = {launch.key for launch in _launches(finalists)}
        await measuring.stage.stop(*(key for key in measuring.stage.up if key not in kept))
        if not finalists:
            return
        now = time.monotonic()
        until = max(until, min(measuring.deadline - _STOP, now + _FINALS * 60 * self.options.minutes))
        seconds = self._steady(min(20.0, (until - now) / 18))
        await self._search(measuring, finalists, seconds, until, control=finalists[0])

    async def _search(
        self,
        measuring: Measuring,
        entrants: Sequence[Entrant],
        seconds: float,
        until: float,
        control: Entrant | None = None,
    ) -> None:
        """Search their goodput, that of the `control` twice."""
        searches = [(each, each.search) for each in entrants]
        if control is None:
            await measuring.refine(searches, seconds, until)
            return
        now = time.monotonic()
        await measuring.refine(searches, seconds, now + _CONTROL * (until - now))
        again = await measuring.again(control, self._start, seconds, until)
        await measuring.refine([*searches, (control, again)], seconds, until)
        self.noise = noise(control.search, again)

    async def _in_turn(
        self, measuring: Measuring, first: Sequence[Entrant], separate: Sequence[Candidate], until: float
    ) -> None:
        """One system at a time has all of the GPUs: each is measured to its end while it runs."""
        replicas = self.maker.replicas(first[0].candidate.shape.batch)
        entrants = [*first, *map(self._enter, [*replicas, *separate])]
        launches = _launches(entrants)
        for number, launch in enumerate(launches):
            some = [each for each in entrants if each.candidate.launch.key == launch.key]
            left = (until - time.monotonic()) / (len(launches) - number)
            if left < 30.0:
                for entrant in some:
                    entrant.problem = "no time was left for it: give --minutes more"
                continue
            end = time.monotonic() + left
            await measuring.stage.stop(*measuring.stage.up)
            await self._start_up(measuring, [launch], some)
            end = max(end, time.monotonic() + 0.3 * left)
            if len(some) > 1:
                half = time.monotonic() + _SCREENING * (end - time.monotonic())
                await measuring.screen(some, self._start, self._probe_seconds(half, len(some)), half)
            chosen = best_of(some, True) or best_of(some, False) or some[0]
            if not chosen.problem:
                seconds = self._steady(min(20.0, (end - time.monotonic()) / 10))
                control = chosen if chosen.candidate.aggregated and self.noise is None else None
                await self._search(measuring, [chosen], seconds, end, control)


def _launches(entrants: Sequence[Entrant]) -> list[Launch]:
    return _launches_of([entrant.candidate for entrant in entrants])


def _launches_of(candidates: Sequence[Candidate]) -> list[Launch]:
    return list({candidate.launch.key: candidate.launch for candidate in candidates}.values())


def _best(entrants: Sequence[Entrant]) -> list[Entrant]:
    return [best for best in (best_of(entrants, True), best_of(entrants, False)) if best is not None]


def _model(config: Config) -> ModelFacts | None:
    folder = find_folder(config.model, "main")
    try:
        return read_model(folder) if folder else None
    except ConfigError:
        return None
