"""What many samples say in one figure."""

import math
import statistics
from collections.abc import Iterable, Sequence


def percentile(values: Iterable[float], share: float, none: float = 0.0) -> float:
    """The smallest value that is not exceeded by `share` of them; `none` where there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else none


def median_ratio(ours: Sequence[float], baseline: Sequence[float]) -> float:
    """The median of the ratios pair by pair: what slows the machine for a while slows both of a pair."""
    return statistics.median(a / b for a, b in zip(ours, baseline, strict=True))
