"""The contest: find the baseline's best settings, then measure all contestants in alternation.

The graph takes part under several live settings, which are in force before it is measured. `Record` has all that is
known at any moment, so that it can be shown when the contest is broken off.
"""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from pdserve.config.schema import Config, DecodeConfig
from pdserve.decode.policy import decide
from pdserve.decode.settings import LiveSettings
from pdserve.errors import Unavailable
from pdserve.plan.plan import Plan
from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Prompts, learn_prompts
from pdserve_bench.progress import Schedule
from pdserve_bench.systems.aggregated import Baseline
from pdserve_bench.systems.alternation import Turn
from pdserve_bench.systems.cpu import CpuMeter
from pdserve_bench.systems.identity import Reference, Sameness
from pdserve_bench.systems.loads import CPU, TOKENS, ClosedLoad, Measurement, Window, count_outcomes, measured
from pdserve_bench.systems.system import ALL_LOCAL, ALL_REMOTE, RunningSystem, Stage, System

GRAPH = "pdserve"
LOCAL, REMOTE_ONLY = f"{GRAPH} local", f"{GRAPH} remote"
_IN_FORCE_WITHIN = 20.0
"""seconds"""
_SHORT, _LONG = 8, 380
"""prompt tokens of the probes that show which settings are in force"""
_COMPARE_SECONDS = 4.0


@dataclass(frozen=True)
class Contestant:
    name: str
    system: str
    """that answers, by its name: several contestants may be one system under different settings"""
    told: str
    settings: Mapping[str, str] | None = None
    """live settings; None: it has none"""


def graph_contestants(config: Config) -> tuple[list[Contestant], list[str]]:
    """Return the graph's contestants: all local, all remote, and as it decides; and why any of them is left out."""
    decode = config.decode
    if decode is None or not decode.remote_prefill:
        told = "the graph of the file, which has no remote prefill"
        note = "The file's graph does not separate: there is one of it to measure."
        return [Contestant(GRAPH, GRAPH, told)], [note]
    remote = Contestant(REMOTE_ONLY, GRAPH, "every prompt is prefilled by a prefill worker", ALL_REMOTE)
    if not decode.conditional_disagg:
        note = "conditional-disagg is false in the file: the graph can be neither all local nor decide by itself."
        return [remote], [note]
    local = Contestant(LOCAL, GRAPH, "every prompt is prefilled where it is decoded", ALL_LOCAL)
    length, queue = decode.max_local_prefill_length, decode.max_prefill_queue_size
    rule = f"remote above {length} tokens while fewer than {queue} requests wait"
    rule = "the way that costs less" if decode.policy == "adaptive" else rule
    return [local, remote, Contestant(GRAPH, GRAPH, f"as it decides: {rule}", {})], []


@dataclass
class Screened:
    """The baseline under one of the settings that were tried."""

    baseline: Baseline
    measurements: list[Measurement] = field(default_factory=list)
    """under each of the loads for that"""

    @property
    def score(self) -> float:
        """More is better: tokens/s, the geometric mean over the loads."""
        values = [each.figures.get(TOKENS, 0.0) for each in self.measurements]
        return statistics.geometric_mean(values) if values and all(values) else 0.0


@dataclass
class Record:
    """What was found so far. The first contestant is the baseline."""

    contestants: Sequence[Contestant]
    loads: Sequence[ClosedLoad]
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
    """in order; the last may be broken off"""
    same: dict[str, Sameness] = field(default_factory=dict)
    """answers of each contestant, compared with the baseline's"""
    compared: list[Exchange] = field(default_factory=list)
    """the requests of that comparison"""
    notes: list[str] = field(default_factory=list)

    @property
    def screening(self) -> list[Measurement]:
        return [found for each in self.screened for found in each.measurements]

    @property
    def outcomes(self) -> dict[str, int]:
        """Counts of all requests by outcome."""
        total = count_outcomes(self.compared)
        for measurement in (*self.screening, *self.measurements):
            for outcome, count in measurement.outcomes.items():
                total[outcome] = total.get(outcome, 0) + count
        return total


@dataclass
class Contest:
    plan: Plan
    record: Record
    stage: Stage
    schedule: Schedule
    systems: dict[str, System]
    """by name; the baseline is added when it is chosen"""
    screening: Sequence[ClosedLoad]
    """under which the baseline's settings are tried"""
    seed: int
    start_seconds: float
    """that a start takes, about"""
    _prompts: Prompts | None = None
    _reference: Reference | None = None
    _settings: dict[RunningSystem, Mapping[str, str]] = field(default_factory=dict)
    """those in force"""
    _starts: Counter[str] = field(default_factory=Counter)

    def announce(self) -> None:
        """All that is to come."""
        for number in range(self._screenings):
            for load in self.screening:
                self.schedule.announce(self._screening_phase(number, load), load.seconds)
        for name, starts in self._expected_starts().items():
            starts += self._screenings if name == self._baseline_name else 0
            for count in range(1, starts + 1):
                self.schedule.announce(_start_phase(name, count), self.start_seconds)
        for contestant in self.record.contestants:
            self.schedule.announce(_comparing(contestant), _COMPARE_SECONDS)
        for turn in self.record.plan:
            self.schedule.announce(self._phase(turn), self._load(turn).seconds)

    async def run(self) -> None:
        """Raises ConfigError and Unavailable. Cancelled, `record` has what there is."""
        async with self.stage:
            await self._choose_baseline()
            if not self.record.in_turn:
                for name in dict.fromkeys(contestant.system for contestant in self.record.contestants):
                    await self._running(name)
            for turn in self.record.plan:
                await self._take(turn)

    async def _running(self, name: str) -> RunningSystem:
        """Start the system where it does not run, in turn instead of the one that does."""
        if name in self.stage.up:
            return self.stage.up[name]
        if self.record.in_turn:
            await self.stage.stop(*self.stage.up)
        self._starts[name] += 1
        with self.schedule.phase(_start_phase(name, self._starts[name]), self.start_seconds):
            return await self.stage.start(name, self.systems[name])

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
            best = self._best()
            for batch in record.batches:
                if batch != best.batch:
                    await self._screen(replace(best, batch=batch))
            record.baseline = self._best()
            self.schedule.say(f"baseline: {record.baseline.told}")
            if record.screened[-1].baseline != record.baseline:
                await self.stage.stop(name)
            else:  # it goes on running
                self.schedule.cancel(_start_phase(name, self._screenings + self._expected_starts()[name]))
        self.systems[name] = record.baseline.system(name)

    def _best(self) -> Baseline:
        return max(self.record.screened, key=lambda each: each.score).baseline

    async def _screen(self, baseline: Baseline) -> None:
        name, number = self._baseline_name, len(self.record.screened)
        await self.stage.stop(name)
        self.systems[name] = baseline.system(name)
        await self._running(name)
        self.schedule.say(f"screening {baseline.told}")
        self.record.screened.append(screened := Screened(baseline))
        for load in self.screening:
            turn = Turn(number, name, load.name)
            await self._measure(screened.measurements, turn, name, load, self._screening_phase(number, load))

    def _screening_phase(self, number: int, load: ClosedLoad) -> str:
        return f"screening {number + 1}/{self._screenings}, {load.name}"

    # turns

    async def _take(self, turn: Turn) -> None:
        contestant = next(each for each in self.record.contestants if each.name == turn.system)
        running = await self._running(contestant.system)
        prompts = await self._learned()
        if contestant.settings is not None and self._settings.get(running) != contestant.settings:
            assert self.plan.config.decode is not None
            await put_in_force(running, contestant.settings, self.plan.config.decode, prompts)
            self._settings[running] = contestant.settings
        await self._compare_answers(contestant, running, prompts)
        load = self._load(turn)
        await self._measure(self.record.measurements, turn, contestant.system, load, self._phase(turn))

    async def _measure(
        self, found: list[Measurement], turn: Turn, system: str, load: ClosedLoad, phase: str
    ) -> None:
        """Adds the measurement also where it is broken off."""
        running, prompts = self.stage.up[system], await self._learned()
        others = CpuMeter.of(*(each.cpu_meter() for name, each in self.stage.up.items() if name != system))
        window, sent, complete = Window(running.cpu_meter(), others), list[Exchange](), False
        try:
            with self.schedule.phase(phase, load.seconds):
                await load.run(running.endpoint, prompts, window, sent)
            complete = True
        finally:
            found.append(measured(turn, window, sent, complete))
        self.schedule.say(f"{phase}: {_line(found[-1])}")

    async def _learned(self) -> Prompts:
        if self._prompts is None:
            baseline = await self._running(self._baseline_name)
            self._prompts = await learn_prompts(baseline.endpoint, self.seed)
        return self._prompts

    async def _compare_answers(
        self, contestant: Contestant, running: RunningSystem, prompts: Prompts
    ) -> None:
        """Once for each contestant. The baseline is the first: the others are compared with it."""
        if contestant.name in self.record.same or (
            self._reference is not None and contestant.name == self._baseline_name
        ):
            return
        with self.schedule.phase(_comparing(contestant), _COMPARE_SECONDS):
            if self._reference is None:
                self._reference = Reference.of(prompts, self.record.compared)
                await self._reference.learn(running.endpoint)
            else:
                self.record.same[contestant.name] = await self._reference.compare(running.endpoint)

    # names

    @property
    def _baseline_name(self) -> str:
        return self.record.contestants[0].name

    def _load(self, turn: Turn) -> ClosedLoad:
        return next(load for load in self.record.loads if load.name == turn.load)

    def _phase(self, turn: Turn) -> str:
        rounds = max(each.round for each in self.record.plan) + 1
        again = " again" if turn.control else ""
        return f"round {turn.round + 1}/{rounds}, {turn.load}: {turn.system}{again}"

    def _expected_starts(self) -> dict[str, int]:
        """How often each system will be started for the alternation."""
        systems = {each.name: each.system for each in self.record.contestants}
        order = [systems[turn.system] for turn in self.record.plan]
        if not self.record.in_turn:
            return dict.fromkeys(order, 1)
        return Counter(name for name, _ in groupby(order))


def _start_phase(name: str, count: int) -> str:
    return f"starting {name}" + (f" (start {count})" if count > 1 else "")


async def put_in_force(
    running: RunningSystem, settings: Mapping[str, str], config: DecodeConfig, prompts: Prompts
) -> None:
    """Apply the settings, and ask until a short and a long prompt are placed as they say, on as many requests in a row
    as there are decode workers. Under the policy `adaptive` either way is right. Raises Unavailable where they are not
    in time."""
    await running.apply(settings)
    live = LiveSettings(config)
    live.read(settings)
    deadline, right = time.monotonic() + _IN_FORCE_WITHIN, 0
    while right < 2 * config.count:
        tokens = (_SHORT, _LONG)[right % 2]
        probe = Exchange(running.endpoint.body(prompts.of(tokens), 2))
        await running.endpoint.ask(probe, _IN_FORCE_WITHIN)
        expected = decide(probe.prompt_tokens or tokens, 0, 0, 1, True, live.current).mode
        adaptive = live.current.policy == "adaptive"
        if not probe.error and (adaptive or probe.prefill == expected):
            right += 1
            continue
        if time.monotonic() > deadline:
            went = f"a prompt of {probe.prompt_tokens} tokens went {probe.prefill or 'nowhere'}"
            raise Unavailable(
                f"{running.endpoint.url}: the live settings {dict(settings)} are not in force: {probe.error or went}."
            )
        right = 0
        await asyncio.sleep(0.1)


def _comparing(contestant: Contestant) -> str:
    return f"comparing the answers of {contestant.name}"


def _line(measurement: Measurement) -> str:
    """What is told of a measurement at once."""
    figures = measurement.figures
    told = [f"{figures[TOKENS]:.0f} tokens/s"] if TOKENS in figures else []
    told += [f"TTFT {1000 * figures['TTFT p50']:.0f} ms"] if "TTFT p50" in figures else []
    if measurement.cpu_per_token:
        told.append(f"{sum(measurement.cpu_per_token.values()):.2f} {CPU}")
    if failed := measurement.outcomes.get("failed"):
        told.append(f"{failed} FAILED")
    return ", ".join(told)
