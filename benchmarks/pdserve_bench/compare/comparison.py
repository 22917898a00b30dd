"""One comparison within a time budget: from a file and a load to results.

Candidates run one at a time. First, the goodput of each is searched. Then the search goes on for the best of each
kind. For the aggregated one it is also repeated from the start, to measure the noise.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.config.engine_args.installed import find_folder
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.plan.machine import Machine
from pdserve.plan.model_folder import ModelFacts, read_model
from pdserve.plan.plan import make_plan
from pdserve.util.errors import ConfigError, Unavailable
from pdserve_bench.compare.candidates import Candidate, CandidateMaker, Hardware, HardwareKind, hardware
from pdserve_bench.compare.measuring import (
    START_SECONDS,
    CompareOptions,
    Entrant,
    Measuring,
    UserLoad,
    best_of,
    noise,
)
from pdserve_bench.compare.recommend import CandidateResult, Criteria, Recommendation, recommend
from pdserve_bench.goodput.result import GoodputResult
from pdserve_bench.graphs.sections import read_sections
from pdserve_bench.progress import say

_STOP = 12.0
"""Seconds reserved at the end for stopping the servers."""
_FINALS = 0.4
"""Share of the time for the finalists."""
_WORTH_STARTING = 20.0
"""Minimal seconds of probes for each candidate. If time is too short, the last candidates are skipped."""


def maker_of(file: Path) -> CandidateMaker:
    """Return the maker of this file's candidates on this machine. Raises ConfigError."""
    config, machine = load(file, {}), Machine.detect()
    if config.frontend is None:
        raise ConfigError([f"{file} has no Frontend section, which the requests need."])
    here = hardware(config, machine)
    if problems := make_plan(config, machine).problems:
        raise ConfigError(list(problems))
    model = None if here.kind is HardwareKind.SIM else _model(config)
    return CandidateMaker(config, read_sections(file), here, machine, model)


@dataclass
class Comparison:
    """Results can be read at any time."""

    options: CompareOptions
    asked: UserLoad
    config: Config
    here: Hardware
    maker: CandidateMaker
    entrants: list[Entrant] = field(default_factory=list)
    """Aggregated ones first; within a kind, the most promising first."""
    noise: float | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def prepare(cls, options: CompareOptions, asked: UserLoad) -> "Comparison":
        """List the candidates without starting any. Raises ConfigError."""
        maker = maker_of(options.file)
        return cls(options, asked, maker.config, maker.here, maker)

    # results

    @property
    def finalists(self) -> list[Entrant]:
        """The best entrant of each kind, the aggregated one first."""
        best = (best_of(self.entrants, True), best_of(self.entrants, False))
        return [each for each in best if each is not None]

    def results(self) -> list[CandidateResult]:
        return [each.result(self.options.rate) for each in self.entrants]

    def recommendation(self) -> Recommendation:
        options = self.options
        criteria = Criteria(options.slo, options.share, options.rate, self.noise, self.foreign_share)
        return recommend(self.results(), criteria)

    @property
    def foreign_share(self) -> float | None:
        """Mean CPU share of other programs during the probes; None if unknown."""
        known = [
            each.foreign for entrant in self.entrants for each in entrant.probes if each.foreign is not None
        ]
        return statistics.fmean(known) if known else None

    def candidate(self, recommendation: Recommendation) -> Candidate | None:
        name = recommendation.choice.name if recommendation.choice else None
        return next((each.candidate for each in self.entrants if each.name == name), None)

    # measuring

    async def run(self) -> None:
        """Raises Unavailable if nothing can be measured."""
        options, deadline = self.options, time.monotonic() + 60 * self.options.minutes
        with tempfile.TemporaryDirectory(prefix="pdserve-compare-") as folder:
            measuring = Measuring(Path(folder), options, self.asked, self.here.kind)
            until = deadline - _STOP
            try:
                await self._try_each(measuring, until - _FINALS * 60 * options.minutes)
                await self._final(measuring, until)
            finally:
                await measuring.stop()

    async def _try_each(self, measuring: Measuring, until: float) -> None:
        """Give each entrant the same time after its start."""
        waiting = self._choose(measuring, until - time.monotonic())
        while waiting:
            entrant, *waiting = waiting
            if await self._start(measuring, entrant):
                entrant.found = measuring.unknown()
                left = until - time.monotonic() - START_SECONDS[self.here.kind] * len(waiting)
                part = left / (1 + len(waiting))
                await self._search(measuring, entrant, entrant.found, time.monotonic() + part)
        if not any(each.probes for each in self.entrants):
            raise Unavailable("No candidate started: " + "; ".join(each.problem for each in self.entrants))

    def _choose(self, measuring: Measuring, seconds: float) -> list[Entrant]:
        """Choose as many candidates as these seconds allow, at least two, beginning with the first of each kind. Note
        which are left out."""
        together, apart = (
            [Entrant(each, measuring.unknown()) for each in candidates]
            for candidates in (self.maker.aggregated(), self.maker.disaggregated())
        )
        wanted = [*together[:1], *apart[:1], *together[1:], *apart[1:]]
        most = max(2, int(seconds / (START_SECONDS[self.here.kind] + _WORTH_STARTING)))
        if out := [entrant.name for entrant in wanted[most:]]:
            self.notes.append(f"Skipped for lack of time: {'; '.join(out)}. Give --minutes more.")
        self.entrants += [each for each in (*together, *apart) if each in wanted[:most]]
        return wanted[:most]

    async def _start(self, measuring: Measuring, entrant: Entrant) -> bool:
        """On failure, record the entrant's problem."""
        try:
            await measuring.start(entrant.candidate)
        except (ConfigError, Unavailable, OSError) as error:
            say(f"{entrant.name}: {error}")
            entrant.problem = _brief(str(error))
            return False
        return True

    async def _search(
        self, measuring: Measuring, entrant: Entrant, found: GoodputResult, until: float
    ) -> None:
        """On failure, record the entrant's problem."""
        try:
            if entrant.name == measuring.name or await self._start(measuring, entrant):
                await measuring.search(found, until)
        except Unavailable as error:
            entrant.problem = str(error)

    async def _final(self, measuring: Measuring, until: float) -> None:
        """Continue the finalists' searches, and repeat the aggregated one's. The running finalist is the first, so that
        it does not start again."""
        finalists, control = self.finalists, measuring.unknown()
        turns = [(each, each.found) for each in finalists]
        turns += [(each, control) for each in finalists if each.candidate.aggregated]
        turns.sort(key=lambda turn: turn[0].name != measuring.name)
        for number, (entrant, found) in enumerate(turns):
            if (now := time.monotonic()) < until:
                await self._search(measuring, entrant, found, now + (until - now) / (len(turns) - number))
            if found is control:
                self.noise = noise(entrant.found, control)
                if self.noise is not None:
                    entrant.again = control.search.carried, control.search.broken


def _brief(text: str) -> str:
    """Return an error's first and last line, without the log between them."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]]))[:300] if lines else "no reason was given"


def _model(config: Config) -> ModelFacts | None:
    folder = find_folder(config.model, "main")
    try:
        return read_model(folder) if folder else None
    except ConfigError:
        return None
