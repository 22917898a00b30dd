"""The contest: find the baseline's best settings, then measure all contestants in alternation.

`Record` has all that is known at any moment, so that it can be shown when the contest is broken off.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdserve.plan.plan import Plan
from pdserve_bench.endpoint import Prompts, learn_prompts
from pdserve_bench.progress import Schedule
from pdserve_bench.systems.aggregated import Baseline
from pdserve_bench.systems.alternation import Turn
from pdserve_bench.systems.contestants import Contestant, put_in_force
from pdserve_bench.systems.cpu import CpuReading
from pdserve_bench.systems.identity import Reference, Sameness
from pdserve_bench.systems.loads import LoadTurn, SystemLoad
from pdserve_bench.systems.measurement import (
    CPU,
    TOKENS,
    Measurement,
    Window,
    count_outcomes,
    different_errors,
)
from pdserve_bench.systems.stage import Stage, start_phase
from pdserve_bench.systems.system import Elsewhere

SETTLE = 2.5
"""seconds until systems count as idle: vLLM's workers spin for one second after each message"""
IDLE_SECONDS = 4.0
COMPARE_SECONDS = 4.0
SCREENING = "screening"


@dataclass
class Screened:
    """The baseline under one of the settings that were tried."""

    baseline: Baseline
    measurements: list[Measurement]

    @property
    def score(self) -> float:
        """Output tokens per second, the geometric mean over the loads."""
        values = [each.figures.get(TOKENS, 0.0) for each in self.measurements]
        return math.prod(values) ** (1 / len(values)) if values else 0.0


@dataclass
class Record:
    """What was found so far. The first contestant is the baseline."""

    contestants: Sequence[Contestant]
    loads: Sequence[SystemLoad]
    plan: Sequence[Turn]
    candidates: Sequence[Baseline]
    """ways to run the baseline, which are screened where there are several"""
    batches: Sequence[int] = ()
    """of max-num-batched-tokens, with which the best of them is screened then; they have one of these already"""
    in_turn: bool = False
    baseline: Baseline | None = None
    """as it takes part"""
    screened: list[Screened] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    """in order; the last may be broken off: `complete` is false then"""
    idle: dict[str, CpuReading] = field(default_factory=dict)
    """what each system spends while nothing is asked of it"""
    same: dict[str, Sameness] = field(default_factory=dict)
    """answers of each contestant, compared with the baseline's"""
    checks: dict[str, int] = field(default_factory=dict)
    """outcomes of the requests of that comparison"""
    notes: list[str] = field(default_factory=list)

    @property
    def outcomes(self) -> dict[str, int]:
        """Of all requests."""
        total = dict(self.checks)
        screening = [each for screened in self.screened for each in screened.measurements]
        for measurement in (*screening, *self.measurements):
            for outcome, count in measurement.outcomes.items():
                total[outcome] = total.get(outcome, 0) + count
        return total


@dataclass
class Contest:
    plan: Plan
    record: Record
    stage: Stage
    schedule: Schedule
    screening: Sequence[SystemLoad]
    seed: int
    settle: float = SETTLE
    idle_seconds: float = IDLE_SECONDS
    """that the idle systems are watched, after they have settled"""
    _prompts: Prompts | None = None
    _reference: Reference | None = None
    _compared: set[str] = field(default_factory=set)
    _settings: dict[str, object] = field(default_factory=dict)
    """those in force, by system; a system that was started anew is not in it"""

    def announce(self, start_seconds: float) -> None:
        """All that is to come."""
        screenings = self._screenings
        for number in range(screenings):
            for load in self.screening:
                self.schedule.announce(self._screening_phase(number, load), load.seconds)
        for name, starts in self._starts().items():
            starts += screenings if name == self._baseline_name else 0
            if isinstance(self.stage.systems.get(name), Elsewhere):
                starts = 0
            for count in range(1, starts + 1):
                self.schedule.announce(start_phase(name, count), start_seconds)
        for contestant in self.record.contestants:
            self.schedule.announce(_comparing(contestant), COMPARE_SECONDS)
        self.schedule.announce("measuring the idle systems", self.settle + self.idle_seconds)
        for turn in self.record.plan:
            self.schedule.announce(self._phase(turn), self._load(turn.load).seconds)

    async def run(self) -> None:
        """Raises ConfigError and Unavailable. Cancelled, `record` has what there is."""
        async with self.stage:
            await self._choose_baseline()
            if not self.stage.in_turn:
                for name in dict.fromkeys(contestant.system for contestant in self.record.contestants):
                    await self.stage.get(name)
                await self._measure_idle()
            for turn in self.record.plan:
                await self._take(turn)

    # the baseline's best settings

    @property
    def _screenings(self) -> int:
        """How many ways to run the baseline are tried; a single one needs not be."""
        count = len(self.record.candidates) + max(0, len(self.record.batches) - 1)
        return count if count > 1 else 0

    async def _choose_baseline(self) -> None:
        record, name = self.record, self._baseline_name
        record.baseline = record.candidates[0]
        if self._screenings:
            for baseline in record.candidates:
                await self._screen(baseline)
            best = max(record.screened, key=lambda each: each.score).baseline
            for batch in record.batches:
                if batch != best.batch:
                    await self._screen(replace(best, batch=batch))
            record.baseline = max(record.screened, key=lambda each: each.score).baseline
            self.schedule.say(f"baseline: {record.baseline.told}")
            if record.screened[-1].baseline != record.baseline:
                await self.stage.stop(name)
            else:  # it goes on running
                self.schedule.cancel(start_phase(name, self._screenings + self._starts()[name]))
        if name not in self.stage.up:
            self.stage.systems[name] = record.baseline.system(name)

    async def _screen(self, baseline: Baseline) -> None:
        name, number = self._baseline_name, len(self.record.screened)
        await self.stage.stop(name)
        self.stage.systems[name] = baseline.system(name)
        await self.stage.get(name)
        self.schedule.say(f"{SCREENING} {baseline.told}")
        self.record.screened.append(screened := Screened(baseline, []))
        for load in self.screening:
            turn = Turn(number, name, load.name)
            await self._measure(turn, load, self._screening_phase(number, load), screened.measurements)

    def _screening_phase(self, number: int, load: SystemLoad) -> str:
        return f"{SCREENING} {number + 1}/{self._screenings}, {load.name}"

    # turns

    async def _take(self, turn: Turn) -> None:
        contestant = next(each for each in self.record.contestants if each.name == turn.system)
        if contestant.system not in self.stage.up:
            self._settings.pop(contestant.system, None)
        running = await self.stage.get(contestant.system)
        if self.stage.in_turn and contestant.system not in self.record.idle:
            await self._measure_idle()
        prompts = await self._learned()
        if contestant.settings is not None and self._settings.get(contestant.system) != contestant.settings:
            assert self.plan.config.decode is not None
            await put_in_force(running, contestant.settings, self.plan.config.decode, prompts)
            self._settings[contestant.system] = contestant.settings
        await self._compare_answers(contestant, prompts)
        await self._measure(turn, self._load(turn.load), self._phase(turn), self.record.measurements)

    async def _measure(self, turn: Turn, load: SystemLoad, phase: str, into: list[Measurement]) -> None:
        name = next(each.system for each in self.record.contestants if each.name == turn.system)
        running = self.stage.up[name]
        window = Window(*self.stage.meters(name))
        prompts = await self._learned()
        seen = LoadTurn(running.endpoint, prompts, window, self.schedule, phase)
        measurement = Measurement(turn, seen.figures, {}, complete=False)
        into.append(measurement)
        try:
            await load.measure(seen)
            measurement.complete = True
        finally:
            exchanges = seen.run.exchanges
            measurement.outcomes = count_outcomes(exchanges)
            measurement.errors = different_errors(exchanges)
        measurement.tokens, measurement.generator = seen.tokens, window.generator
        measurement.cpu = window.measured if window.measured.seconds else None
        measurement.idle = window.others.total / window.seconds
        measurement.strangers = window.strangers / window.seconds if measurement.cpu else 0.0
        measurement.ttfts = [
            each.ttft for each in exchanges if each.ttft is not None and window.has(each.started)
        ]
        self.schedule.say(f"{phase}: {_line(measurement)}")

    async def _learned(self) -> Prompts:
        if self._prompts is None:
            baseline = await self.stage.get(self._baseline_name)
            self._prompts = await learn_prompts(baseline.endpoint, self.seed)
        return self._prompts

    async def _measure_idle(self) -> None:
        with self.schedule.phase("measuring the idle systems", self.settle + self.idle_seconds):
            await asyncio.sleep(self.settle)
            meters = {name: running.cpu_meter() for name, running in self.stage.up.items()}
            before = {name: meter.read() for name, meter in meters.items()}
            await asyncio.sleep(self.idle_seconds)
            for name, meter in meters.items():
                self.record.idle.setdefault(name, meter.read().since(before[name]))

    async def _compare_answers(self, contestant: Contestant, prompts: Prompts) -> None:
        """Once for each contestant. The baseline is the first: the others are compared with it."""
        if contestant.name in self._compared:
            return
        self._compared.add(contestant.name)
        endpoint = self.stage.up[contestant.system].endpoint
        with self.schedule.phase(_comparing(contestant), COMPARE_SECONDS):
            try:
                if self._reference is None:
                    self._reference = Reference.of(prompts)
                    await self._reference.learn(endpoint)
                else:
                    self.record.same[contestant.name] = await self._reference.compare(endpoint)
            finally:
                self.record.checks = count_outcomes(self._reference.exchanges if self._reference else ())

    # names

    @property
    def _baseline_name(self) -> str:
        return self.record.contestants[0].name

    def _load(self, name: str) -> SystemLoad:
        return next(load for load in self.record.loads if load.name == name)

    def _phase(self, turn: Turn) -> str:
        rounds = max(each.round for each in self.record.plan) + 1
        again = " again" if turn.control else ""
        return f"round {turn.round + 1}/{rounds}, {turn.load}: {turn.system}{again}"

    def _starts(self) -> dict[str, int]:
        """How often each system will be started for the alternation."""
        systems = {each.name: each.system for each in self.record.contestants}
        order = [systems[turn.system] for turn in self.record.plan]
        if not self.stage.in_turn:
            return dict.fromkeys(order, 1)
        changes = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
        return {name: changes.count(name) for name in dict.fromkeys(order)}


def _comparing(contestant: Contestant) -> str:
    return f"comparing the answers of {contestant.name}"


def _line(measurement: Measurement) -> str:
    """What is told of a measurement at once."""
    figures = measurement.figures
    told = [f"{figures[TOKENS]:.0f} tokens/s"] if TOKENS in figures else []
    if "TTFT p50" in figures:
        told.append(f"TTFT {1000 * figures['TTFT p50']:.0f} ms")
    if measurement.cpu_per_token:
        told.append(f"{sum(measurement.cpu_per_token.values()):.2f} {CPU}")
    if failed := measurement.outcomes.get("failed"):
        told.append(f"{failed} FAILED")
    return ", ".join(told)
