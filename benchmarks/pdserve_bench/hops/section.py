"""What every hop's benchmark is given, and what it gives back."""

import math
import statistics
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pdserve_bench.progress import Schedule
from pdserve_bench.report import Column, Report, Rows, Series
from pdserve_bench.samples import median_ratio


@dataclass(frozen=True)
class HopOptions:
    folder: Path
    """for whatever it writes; each hop has one of its own, which is removed afterwards"""
    seconds: float = 2.5
    """of load for each figure in each round; a hop whose figures are steady sooner takes a part of it"""
    rounds: int = 3
    """how often each figure is measured, its baseline just before or just after it (`alternate`)"""
    seed: int = 1


class MeasuredHop(Protocol):
    """A module of this folder: `frontend`, `stream`."""

    def phases(self, options: HopOptions) -> Mapping[str, float]:
        """All that it goes through, with the expected seconds of each: announced to the schedule before any begins."""

    def measure(self, options: HopOptions, schedule: Schedule) -> AsyncGenerator[Report, None]:
        """Yield the hop's part of the report as it is by then, whenever something was added (as after each round),
        so that a run that is broken off shows it; the last is the whole. Goes through its phases with
        `schedule.phase`. Raises ConfigError and Unavailable where it cannot be measured here. Cancelled, it stops what
        it has started."""


SPREAD = Column("±, %", ".0f")


def alternate(ours: str, baseline: str, round_number: int) -> tuple[str, str]:
    """Return the order in which the two are measured in this round: what drifts meanwhile favours each as often as the
    other."""
    return (ours, baseline) if round_number % 2 == 0 else (baseline, ours)


def spread(samples: Sequence[float]) -> float:
    """Half of the way from the lowest to the highest, in % of the median: the noise behind a median of rounds. NaN of
    one round, which says nothing of it."""
    if len(samples) < 2:
        return math.nan
    middle = statistics.median(samples)
    return 50 * (max(samples) - min(samples)) / middle if middle else 0.0


class HopTurn(Protocol):
    """One measurement of one system."""

    @property
    def system(self) -> str: ...

    @property
    def case(self) -> Any:
        """what it was measured with; cases can be sorted"""


T = TypeVar("T", bound=HopTurn)


@dataclass(frozen=True)
class Pair:
    """A figure of ours and of the baseline, of each round."""

    ours: Sequence[float]
    baseline: Sequence[float]

    @classmethod
    def of(
        cls, turns: Sequence[T], case: object, names: tuple[str, str], figure: Callable[[T], float]
    ) -> Self:
        """`names`: of ours and of the baseline."""
        mine = [turn for turn in turns if turn.case == case]
        return cls(*([figure(turn) for turn in mine if turn.system == name] for name in names))

    def cells(self) -> list[Any]:
        """Our median, its spread, the baseline's median, and the median of the ratios of each round. In a round that
        was broken off the second of the two is missing."""
        if not self.ours or not self.baseline:
            return [statistics.median(self.ours) if self.ours else None, None, None, None]
        rounds = min(len(self.ours), len(self.baseline))
        ratio = median_ratio(self.ours[:rounds], self.baseline[:rounds]) if all(self.baseline) else None
        return [statistics.median(self.ours), spread(self.ours), statistics.median(self.baseline), ratio]


def table(
    title: str,
    turns: Sequence[T],
    names: tuple[str, str],
    case_columns: Mapping[Column, Callable[[Any], Any]],
    compared: tuple[Column, Callable[[T], float]],
    ours: Mapping[Column, Callable[[T], float]] | None = None,
    note: str = "",
) -> Rows:
    """A row for each case: what `case_columns` make of it, a figure of ours and of the baseline, and more of ours."""
    (column, figure), ours = compared, ours or {}
    columns = [column, SPREAD, Column(names[1], column.spec), Column("ratio", ".2f")]
    rows = []
    for case in cases(turns):
        more = [Pair.of(turns, case, names, of).cells()[0] for of in ours.values()]
        pair = Pair.of(turns, case, names, figure)
        rows.append([*(of(case) for of in case_columns.values()), *pair.cells(), *more])
    return Rows(title, [*case_columns, *columns, *ours], rows, note)


def compared(
    turns: Sequence[T], names: tuple[str, str], figure: Callable[[T], float], label: Callable[[Any], Any]
) -> list[Series]:
    """Return the series of a chart: medians over the cases, with whiskers from the lowest round to the highest."""
    found = []
    for at, name in enumerate(names):
        samples: dict[Any, list[float]] = {}
        for turn in sorted((turn for turn in turns if turn.system == name), key=lambda turn: turn.case):
            samples.setdefault(label(turn.case), []).append(figure(turn))
        low, middle, high = ([of(each) for each in samples.values()] for of in (min, statistics.median, max))
        found.append(Series(name, list(samples), middle, low, high, baseline=at == 1))
    return found


def cases(turns: Sequence[T]) -> list[Any]:
    return sorted({turn.case for turn in turns})
