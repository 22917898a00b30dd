"""Medians over rounds, ratios to the baseline pair by pair, and the noise of the baseline against itself. Pure."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve_bench.samples import median_ratio
from pdserve_bench.systems.alternation import Turn, complete_rounds
from pdserve_bench.systems.measurement import CPU, Measurement

ALL, LOAD_GENERATOR = "all", "load generator"


@dataclass(frozen=True)
class Noise:
    """Of a figure of the baseline: its second turn of a round over its first."""

    ratios: Sequence[float]

    @property
    def width(self) -> float:
        """The largest factor, either way, that was seen between two turns of the same thing; 1: none. Infinite where
        nothing is known."""
        return max(
            (max(ratio, 1 / ratio) if ratio > 0 else math.inf for ratio in self.ratios), default=math.inf
        )


@dataclass(frozen=True)
class Compared:
    """A figure of a contestant under a load, over the complete rounds."""

    median: float
    low: float
    """the smallest and the largest of the rounds"""
    high: float
    ratio: float | None = None
    """the median of its ratios to the baseline's, round by round; None: it is the baseline, or that was 0"""
    ratios: Sequence[float] = ()
    beyond_noise: bool = False
    """the ratio is farther from 1 than the baseline's from itself, and all rounds are on the same side"""


class Figures:
    """Of all measurements, as far as their rounds are complete for a load."""

    def __init__(self, plan: Sequence[Turn], measurements: Iterable[Measurement], baseline: str) -> None:
        self.baseline = baseline
        self._of = {found.turn: found for found in measurements if found.complete}
        loads = dict.fromkeys(turn.load for turn in plan)
        self.rounds = {load: complete_rounds(plan, self._of.keys(), load) for load in loads}
        """that are complete, of each load"""

    def measured(self, system: str, load: str) -> list[Measurement]:
        """In complete rounds; of the baseline both turns of each."""
        return [
            found
            for turn, found in self._of.items()
            if turn.system == system and turn.load == load and turn.round in self.rounds[load]
        ]

    def values(self, system: str, load: str, figure: str) -> list[float]:
        """One for each round; of the baseline the mean of its turns. Empty where there is no such figure."""
        found = []
        for number in self.rounds[load]:
            turns = [each for each in self.measured(system, load) if each.turn.round == number]
            values = [value for each in turns if (value := figure_of(each, figure)) is not None]
            if not values:
                return []
            found.append(statistics.fmean(values))
        return found

    def noise(self, load: str, figure: str) -> Noise:
        ratios = []
        for number in self.rounds[load]:
            turns = {
                each.turn.control: figure_of(each, figure)
                for each in self.measured(self.baseline, load)
                if each.turn.round == number
            }
            first, again = turns.get(False), turns.get(True)
            if first and again is not None:
                ratios.append(again / first)
        return Noise(ratios)

    def compare(self, system: str, load: str, figure: str) -> Compared | None:
        """None where there is no such figure."""
        ours = self.values(system, load, figure)
        if not ours:
            return None
        plain = Compared(statistics.median(ours), min(ours), max(ours))
        base = self.values(self.baseline, load, figure)
        if system == self.baseline or len(base) != len(ours) or not all(base):
            return plain
        ratios = [a / b for a, b in zip(ours, base, strict=True)]
        ratio = median_ratio(ours, base)
        return Compared(
            plain.median,
            plain.low,
            plain.high,
            ratio,
            ratios,
            beyond(ratio, ratios, self.noise(load, figure)),
        )


def beyond(ratio: float, ratios: Sequence[float], noise: Noise) -> bool:
    """Whether such a ratio says something."""
    apart = ratio > noise.width or ratio < 1 / noise.width
    return apart and (all(each > 1 for each in ratios) or all(each < 1 for each in ratios))


def figure_of(measurement: Measurement, figure: str) -> float | None:
    """Also the CPU seconds per 1,000 tokens, of all processes together."""
    if figure == CPU:
        return sum(measurement.cpu_per_token.values()) if measurement.cpu_per_token else None
    return measurement.figures.get(figure)


def cpu_by_process(measurements: Iterable[Measurement]) -> dict[str, float]:
    """Median CPU seconds per 1,000 output tokens, the largest first; then of all processes together, and last of the
    load generator, which is in no sum. Empty where nothing is known."""
    found = [each for each in measurements if each.tokens]
    spent = [each.cpu_per_token for each in found if each.cpu_per_token]
    labels = dict.fromkeys(label for each in spent for label in each)
    medians = {label: statistics.median(each.get(label, 0.0) for each in spent) for label in labels}
    medians = dict(sorted(medians.items(), key=lambda item: -item[1]))
    if medians:
        medians[ALL] = statistics.median(sum(each.values()) for each in spent)
    if found:
        medians[LOAD_GENERATOR] = statistics.median(1000 * each.generator / each.tokens for each in found)
    return medians
