"""What both hops have in common: options, one measurement of one system, and the table of ours against a baseline."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve_bench.report import Cell, Chart, Column, Report, Rows, Series
from pdserve_bench.samples import median_ratio


@dataclass(frozen=True)
class HopOptions:
    folder: Path
    """for what it writes; each hop has one of its own, which is removed afterwards"""
    seconds: float = 2.5
    """of load for each figure in each round"""
    rounds: int = 3
    """how often each figure is measured, its baseline just before or just after it (`alternate`)"""
    seed: int = 1


@dataclass(frozen=True)
class HopTurn:
    system: str
    case: int
    """streams, or requests in a message"""
    figures: Mapping[str, float]


def alternate(names: tuple[str, str], round_number: int) -> tuple[str, str]:
    """Return the order in which the two are measured in this round: a drift of the machine favours each as often as the
    other."""
    return names if round_number % 2 == 0 else names[::-1]


def spread(samples: Sequence[float]) -> float:
    """Half of the way from the lowest to the highest, in % of the median; NaN of a single round."""
    if len(samples) < 2:
        return math.nan
    middle = statistics.median(samples)
    return 50 * (max(samples) - min(samples)) / middle if middle else 0.0


def figures(turns: Sequence[HopTurn], system: str, case: int, name: str) -> list[float]:
    """One of each round."""
    return [turn.figures[name] for turn in turns if (turn.system, turn.case) == (system, case)]


def section(
    turns: Sequence[HopTurn],
    names: tuple[str, str],
    title: str,
    case_name: str,
    compared: str,
    others: Sequence[Column] = (),
    note: str = "",
) -> Report:
    """A row for each case: the figure `compared` of ours and of the baseline (`names`), its ratio, and more of ours. In
    a round that was broken off the second of the two is missing."""
    rows: list[list[Cell]] = []
    curves: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    for case in sorted({turn.case for turn in turns}):
        mine, theirs = (figures(turns, name, case, compared) for name in names)
        if not mine or not theirs:
            continue
        rounds = min(len(mine), len(theirs))
        ratio = median_ratio(mine[:rounds], theirs[:rounds]) if all(theirs) else None
        more = [statistics.median(figures(turns, names[0], case, each.name)) for each in others]
        rows.append([case, statistics.median(mine), spread(mine), statistics.median(theirs), ratio, *more])
        curves[names[0]][case], curves[names[1]][case] = mine, theirs
    columns = [Column(case_name, ","), Column(f"{names[0]}, us", ".1f"), Column("±, %", ".0f")]
    columns += [Column(f"{names[1]}, us", ".1f"), Column("ratio", ".2f"), *others]
    series = [
        Series(
            name, list(curve), [statistics.median(each) for each in curve.values()], baseline=name == names[1]
        )
        for name, curve in curves.items()
    ]
    chart = Chart(title, "lines", case_name, "us", series, log=True, better="lower")
    raw = [asdict(turn) for turn in turns]
    return Report("", tables=[Rows(title, columns, rows, note)], charts=[chart], data={"turns": raw})
