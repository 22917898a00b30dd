"""Where the ticks of an axis are."""

import math
from collections.abc import Sequence

from pdserve_bench.report.lettering import SMALL, number, width


def decades(low: float, high: float, unit: str, inches: float) -> list[float]:
    """Ticks of a logarithmic axis: as many in each decade as there is room for. `inches` is what its labels
    have side by side."""
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 8 and apart(ticks, (low, high), unit, True, inches) == ticks:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 8)]


def apart(
    ticks: Sequence[float], view: tuple[float, float], unit: str, log: bool, inches: float
) -> list[float]:
    """Those of the ticks of a horizontal axis whose labels do not touch."""
    kept: list[float] = []
    end = -math.inf
    for tick in ticks:
        at, half = share(tick, view, log) * inches, width(number(tick, unit, 4), SMALL) / 2
        if at - half > end + 0.08:
            kept.append(tick)
            end = at + half
    return kept


def share(value: float, view: tuple[float, float], log: bool) -> float:
    """How far along the axis it is: 0 to 1."""
    low, high = view
    return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
