"""Closed loops: so many clients, each of which sends the next request when it has its answer.

First a single engine is measured under several settings; the best of them takes part as the baseline. Then it and the
graph are measured in turn. A round measures each system once under each load, and the next round does so in the
opposite order (ABBA): what slows the machine for a while slows all, and what grows slowly cancels out. The baseline
comes twice in each round, at both ends: its two turns differ by nothing but noise.
"""

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from pdserve.errors import Unavailable
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.compare.candidates import (
    ALL_LOCAL,
    ALL_REMOTE,
    START_SECONDS,
    Candidate,
    CandidateMaker,
    Hardware,
    HardwareKind,
)
from pdserve_bench.compare.identity import Reference, Sameness
from pdserve_bench.endpoint import Endpoint, Prompts, learn_prompts
from pdserve_bench.foreign import ForeignLoad
from pdserve_bench.load import ClosedLoop
from pdserve_bench.progress import Schedule
from pdserve_bench.runs import LoadRun
from pdserve_bench.systems.cpu import CpuMeter
from pdserve_bench.systems.system import RunningSystem, Stage

TOKENS = "output tokens/s"
TIMES = [f"{name} {share}" for name in ("TTFT", "ITL", "longest gap") for share in ("p50", "p99")]
CPU = "CPU s per 1,000 tokens"
ANSWER = "output tokens per answer"
REMOTE = "remote prefills"
"""a share of the requests"""
_WARM_UP = 1.5
"""seconds of load before each window: longer than plain vLLM's workers on a CPU spin after their last message"""
_LONGER = 4.0
"""times the warm-up, at most, until there are as many answers as clients"""
_TIMEOUT = 60.0
_IN_FORCE_WITHIN = 60.0


@dataclass(frozen=True)
class ClosedOptions:
    clients: tuple[int, ...]
    prompt_tokens: int = 1300
    answer_len: int = 64
    rounds: int = 3
    seconds: float = 3.0
    batches: tuple[int, ...] = ()
    seed: int = 1


@dataclass(frozen=True)
class Turn:
    round: int
    system: str
    clients: int
    again: bool = False
    """the baseline for the second time"""


@dataclass
class Measured:
    """A window of a steady load."""

    turn: Turn
    figures: dict[str, float] = field(default_factory=dict)
    """times in seconds, rates per second, shares"""
    cpu: dict[str, float] = field(default_factory=dict)
    """seconds for 1,000 output tokens, by what the process is"""
    outcomes: Counter[str] = field(default_factory=Counter)
    """of all requests of the turn, those of the warm-up included"""
    errors: list[str] = field(default_factory=list)
    foreign: float | None = None
    """the share of the machine that other programs took"""
    complete: bool = False


def alternate(systems: Sequence[str], loads: Sequence[int], rounds: int, *, grouped: bool) -> list[Turn]:
    """The first system is the baseline. All systems get a load one after the other; `grouped`: a system gets all loads
    one after the other, so that it is started once in a round where only one may run at a time."""
    entrants = [*((system, False) for system in systems), (systems[0], True)]
    pairs = [(entrant, load) for load in loads for entrant in entrants]
    if grouped:
        pairs = [(entrant, load) for entrant in entrants for load in loads]
    turns: list[Turn] = []
    for number in range(rounds):
        made = [Turn(number, system, load, again) for (system, again), load in pairs]
        turns += reversed(made) if number % 2 else made
    return turns


class ClosedLoops:
    """Readable at any time."""

    def __init__(
        self, options: ClosedOptions, here: Hardware, singles: Sequence[Candidate], graph: Sequence[Candidate]
    ) -> None:
        """`singles` are single engines; `graph` is the graph under each of its settings, the last as its file
        decides."""
        self.options, self.here, self.graph, self._singles = options, here, graph, singles
        self.screened: list[tuple[Candidate, list[Measured]]] = []
        """single engines, each with its measurements under the smallest and the largest load"""
        self.baseline: Candidate | None = None
        self.turns: list[Turn] = []
        self.measured: list[Measured] = []
        self.same: dict[str, Sameness] = {}
        self.compared: list[Exchange] = []
        self._prompts: Prompts | None = None
        self._reference: Reference | None = None

    @classmethod
    def of(cls, options: ClosedOptions, maker: CandidateMaker) -> Self:
        """Starts nothing. Raises ConfigError."""
        return cls(options, maker.here, maker.engines(options.batches), maker.modes())

    @property
    def outcomes(self) -> Counter[str]:
        """Of all requests."""
        found = count_outcomes(self.compared)
        for each in (*(each for _, some in self.screened for each in some), *self.measured):
            found += each.outcomes
        return found

    async def run(self, schedule: Schedule) -> None:
        """Raises ConfigError and Unavailable. Cancelled, what is known stays."""
        with tempfile.TemporaryDirectory(prefix="pdserve-compare-") as folder:
            async with Stage(Path(folder), schedule.update) as stage:
                await self.measure(stage, schedule)

    async def measure(self, stage: Stage, schedule: Schedule) -> None:
        baseline = self.baseline = await self._choose(stage, schedule)
        schedule.say(f"baseline: {baseline.name}")
        systems = {each.name: each for each in (baseline, *self.graph)}
        options, alone = self.options, self.here.kind is HardwareKind.GPU
        self.turns = alternate(list(systems), options.clients, options.rounds, grouped=alone)
        for turn in self.turns:
            schedule.announce(_phase(turn), self._seconds(turn.clients))
        for turn in self.turns:
            candidate = systems[turn.system]
            running = await self._running(stage, schedule, candidate, alone)
            await self._put_in_force(running, candidate)
            await self._compare_answers(schedule, running, turn.system)
            await self._measure(schedule, running, turn, self.measured)

    async def _choose(self, stage: Stage, schedule: Schedule) -> Candidate:
        """The single engine with the most tokens/s: the geometric mean over the loads."""
        if len(self._singles) == 1:
            return self._singles[0]
        for candidate in self._singles:
            running = await self._running(stage, schedule, candidate, True)
            self.screened.append((candidate, []))
            for clients in dict.fromkeys((self.options.clients[0], self.options.clients[-1])):
                turn = Turn(len(self.screened) - 1, candidate.name, clients)
                await self._measure(schedule, running, turn, self.screened[-1][1])
        return max(self.screened, key=lambda each: score(each[1]))[0]

    async def _running(
        self, stage: Stage, schedule: Schedule, candidate: Candidate, alone: bool
    ) -> RunningSystem:
        launch, seconds = candidate.launch, START_SECONDS[self.here.kind]
        if launch.key not in stage.up:
            baselines = {each.launch.key for each, _ in self.screened if each is not self.baseline}
            await stage.stop(*(key for key in stage.up if alone or key in baselines))
            with schedule.phase(f"starting {candidate.name}", seconds):
                await stage.start(launch.key, launch.system)
        running = stage.up[launch.key]
        if self._prompts is None:
            self._prompts = await learn_prompts(running.endpoint, self.options.seed)
        return running

    async def _put_in_force(self, running: RunningSystem, candidate: Candidate) -> None:
        """Apply its settings, and ask until prompts are placed as they say, twice as many in a row as there are decode
        workers. Raises Unavailable where they are not."""
        await running.apply(candidate.settings)
        expected = {str(ALL_LOCAL): "local", str(ALL_REMOTE): "remote"}.get(str(candidate.settings))
        assert self._prompts is not None
        right, deadline = 0, time.monotonic() + _IN_FORCE_WITHIN
        while expected and right < 2 * candidate.shape.decode:
            probe = Exchange(running.endpoint.body(self._prompts.of(self.options.prompt_tokens), 2))
            await running.endpoint.ask(probe, _TIMEOUT)
            right = right + 1 if probe.prefill == expected else 0
            if time.monotonic() > deadline:
                went = probe.error or f"a prompt went {probe.prefill or 'nowhere'}"
                raise Unavailable(f"{candidate.name}: its live settings are not in force: {went}.")

    async def _compare_answers(self, schedule: Schedule, running: RunningSystem, name: str) -> None:
        """Once for each system. The baseline is the first: the others are compared with it."""
        assert self._prompts is not None
        if self._reference is None:
            self._reference = Reference.of(self._prompts, self.compared)
            with schedule.phase("asking for the baseline's answers", 4.0):
                await self._reference.learn(running.endpoint)
        elif name not in self.same and name != self.turns[0].system:
            with schedule.phase(f"comparing the answers of {name}", 4.0):
                self.same[name] = await self._reference.compare(running.endpoint)

    async def _measure(
        self, schedule: Schedule, running: RunningSystem, turn: Turn, found: list[Measured]
    ) -> None:
        """Adds the measurement also where it is broken off."""
        assert self._prompts is not None
        made, sent = Measured(turn), list[Exchange]()
        found.append(made)
        phase = _phase(turn)
        try:
            with schedule.phase(phase, self._seconds(turn.clients)):
                await self._load(running, turn.clients, self._prompts, made, sent)
        finally:
            made.outcomes = count_outcomes(sent)
            made.errors = list(dict.fromkeys(each.error for each in sent if each.error))
        schedule.say(f"{phase}: {made.figures[TOKENS]:.0f} tokens/s, {made.outcomes['failed']} failed")

    async def _load(
        self, running: RunningSystem, clients: int, prompts: Prompts, made: Measured, sent: list[Exchange]
    ) -> None:
        """Warm up, measure a window, and wait for the last answers."""
        requests = self._requests(running.endpoint, prompts, sent)
        async with ClosedLoop(requests, partial(running.endpoint.ask, timeout=_TIMEOUT), clients) as loop:
            await asyncio.sleep(_WARM_UP)
            with suppress(TimeoutError):
                async with asyncio.timeout((_LONGER - 1) * _WARM_UP):
                    await loop.until(lambda _: True, clients)
            meter: CpuMeter = running.cpu_meter()
            began, before, others = time.monotonic(), meter.read(), ForeignLoad()
            await asyncio.sleep(self.options.seconds)
            ended, spent, made.foreign = time.monotonic(), meter.read().since(before), others.share()
        made.figures = window_figures(sent, began, ended)
        if tokens := tokens_between(sent, began, ended):
            made.cpu = {name: 1000 * seconds / tokens for name, seconds in spent.seconds.items()}
            made.figures |= {CPU: sum(made.cpu.values())} if made.cpu else {}
        made.complete = True

    def _requests(self, endpoint: Endpoint, prompts: Prompts, sent: list[Exchange]) -> Iterator[Exchange]:
        options = self.options
        while True:
            sent.append(Exchange(endpoint.body(prompts.of(options.prompt_tokens), options.answer_len)))
            yield sent[-1]

    def _seconds(self, clients: int) -> float:
        return _WARM_UP + self.options.seconds + 0.5 + clients / 16


def _phase(turn: Turn) -> str:
    return f"round {turn.round + 1}, c={turn.clients}: {turn.system}" + (" again" if turn.again else "")


def score(measured: Sequence[Measured]) -> float:
    values = [each.figures.get(TOKENS, 0.0) for each in measured]
    return statistics.geometric_mean(values) if values and all(values) else 0.0


def window_figures(exchanges: Sequence[Exchange], began: float, ended: float) -> dict[str, float]:
    """Figures of a load that was steady between these two moments and went on after them. Tokens count when they come;
    times and gaps are those of the finished requests that began in the window."""
    ours = [each for each in exchanges if each.outcome is Outcome.FINISHED and began <= each.started < ended]
    figures = {TOKENS: tokens_between(exchanges, began, ended) / (ended - began)}
    if ours:  # else it is not known, which is not 0
        seen = LoadRun(ours, began, ended).summary()
        figures |= {name: seen[name] for name in TIMES}
        figures[ANSWER] = sum(exchange.output_tokens for exchange in ours) / len(ours)
    if placed := [exchange.prefill for exchange in ours if exchange.prefill]:
        figures[REMOTE] = placed.count("remote") / len(placed)
    return figures


def tokens_between(exchanges: Sequence[Exchange], began: float, ended: float) -> float:
    """Output tokens that came in that time. An event may carry several: each counts for its share of its answer."""
    total = 0.0
    for exchange in exchanges:
        if inside := sum(began <= arrival < ended for arrival in exchange.arrivals):
            total += exchange.output_tokens * inside / len(exchange.arrivals)
    return total


def count_outcomes(exchanges: Sequence[Exchange]) -> Counter[str]:
    return Counter(exchange.outcome.value for exchange in exchanges)
