"""What every hop's benchmark is given, and what it gives back."""

import math
import statistics
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pdserve_bench.progress import Schedule
from pdserve_bench.report import Chart, Rows


@dataclass(frozen=True)
class HopOptions:
    folder: Path
    """for whatever it writes; each hop has one of its own, which is removed afterwards"""
    seconds: float = 2.5
    """of load for each figure in each round; a hop whose figures are steady sooner takes a part of it"""
    rounds: int = 3
    """how often each figure is measured, its baseline just before or just after it (`alternate`)"""
    seed: int = 1
    link: str = "1gbit"
    """rate of the link between two network namespaces over which KV is moved; a word of tc's"""


@dataclass
class HopSection:
    """A hop's part of the report."""

    tables: list[Rows] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """the raw figures of every round, for the JSON"""
    notes: list[str] = field(default_factory=list)
    """sentences on how to read the tables, and what disturbed the figures"""
    lead: str = ""
    """a sentence with its most important figures"""


class Hop(Protocol):
    """A module of this folder: `frontend`, `stream`, `queue`, `kv`."""

    def phases(self, options: HopOptions) -> Mapping[str, float]:
        """All that it goes through, with the expected seconds of each: announced to the schedule before any begins."""

    def measure(self, options: HopOptions, schedule: Schedule) -> AsyncGenerator[HopSection, None]:
        """An asynchronous generator: yields what is there by then, whenever something was added (as after each round),
        so that a run that is broken off shows it; the last is the whole. Goes through its phases with
        `schedule.phase`. Raises ConfigError and Unavailable where it cannot be measured here. Cancelled, it stops what
        it has started."""


def alternate(ours: str, baseline: str, round_number: int) -> tuple[str, str]:
    """In which order the two are measured in this round: what drifts meanwhile favours each as often as the other."""
    return (ours, baseline) if round_number % 2 == 0 else (baseline, ours)


def spread(samples: Sequence[float]) -> float:
    """Half of the way from the lowest to the highest, in % of the median: the noise behind a median of rounds. NaN of
    one round, which says nothing of it."""
    if len(samples) < 2:
        return math.nan
    middle = statistics.median(samples)
    return 50 * (max(samples) - min(samples)) / middle if middle else 0.0
