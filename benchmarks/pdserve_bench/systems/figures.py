"""Medians over rounds, ratios to the baseline round by round, and the noise of the baseline against itself. Pure."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve_bench.samples import median_ratio
from pdserve_bench.systems.alternation import Turn, complete_rounds
from pdserve_bench.systems.loads import CPU, Measurement

ALL, LOAD_GENERATOR = "all", "load generator"
_STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""quantiles of Student's t distribution by its degrees of freedom: 95 % between plus and minus"""


@dataclass(frozen=True)
class Compared:
    """A figure of a contestant under a load, over the complete rounds."""

    median: float
    ratio: float | None = None
    """the median of its ratios to the baseline's, round by round; None: it is the baseline, or that was 0"""
    ratios: Sequence[float] = ()
    beyond_noise: bool = False


class Figures:
    """What all measurements say, as far as their rounds are complete for a load."""

    def __init__(self, plan: Sequence[Turn], measurements: Iterable[Measurement], baseline: str) -> None:
        self.baseline = baseline
        self._of = {found.turn: found for found in measurements if found.complete}
        loads = dict.fromkeys(turn.load for turn in plan)
        self.rounds = {load: complete_rounds(plan, self._of.keys(), load) for load in loads}
        """that are complete, of each load"""

    def measured(self, system: str, load: str) -> list[Measurement]:
        """Return the measurements of complete rounds; of the baseline both turns of each."""
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

    def noise(self, load: str, figure: str) -> list[float]:
        """The baseline's second turn of a round over its first."""
        ratios = []
        for number in self.rounds[load]:
            first, again = (
                figure_of(self._of[Turn(number, self.baseline, load, control)], figure)
                for control in (False, True)
            )
            if first and again:
                ratios.append(again / first)
        return ratios

    def compare(self, system: str, load: str, figure: str) -> Compared | None:
        """None where there is no such figure."""
        ours = self.values(system, load, figure)
        if not ours:
            return None
        median = statistics.median(ours)
        base = self.values(self.baseline, load, figure)
        if system == self.baseline or len(base) != len(ours) or not all(base):
            return Compared(median)
        ratios = [a / b for a, b in zip(ours, base, strict=True)]
        is_beyond = beyond(ratios, self.noise(load, figure))
        return Compared(median, median_ratio(ours, base), ratios, is_beyond)


def beyond(ratios: Sequence[float], noise: Sequence[float]) -> bool:
    """Whether such ratios say something: they are all on one side of 1, and their mean is farther from it than the
    baseline from itself explains (95 %, Student's t, logarithms). A turn that varies by s has noise of variance 2 s^2,
    and a ratio to the mean of two turns has 1.5 s^2."""
    if not noise or min(ratios) <= 0 or min(ratios) <= 1 <= max(ratios):
        return False
    spread = math.sqrt(statistics.fmean(math.log(each) ** 2 for each in noise) / 2)
    bound = _STUDENT[min(len(noise), len(_STUDENT) - 1)] * spread * math.sqrt(1.5 / len(ratios))
    return abs(statistics.fmean(map(math.log, ratios))) > bound


def figure_of(measurement: Measurement, figure: str) -> float | None:
    """Return a figure of a measurement, also the CPU seconds per 1,000 tokens of all processes together."""
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
