"""Statistics: percentiles, confidence intervals of shares, monotone regression."""

import math
from collections.abc import Iterable, Sequence

CONFIDENCE = 1.645
"""Standard deviations of the normal distribution: 90 % two-sided, 95 % one-sided."""


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    place = math.ceil(share * len(ordered) - 1e-9)  # 0.07 * 100 > 7 in floating point
    return ordered[max(0, place - 1)] if ordered else 0.0


def wilson(hits: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the confidence interval of a share, given `hits` of `count` independent samples: Wilson's interval (1927),
    which also holds for few samples and near 0 and 1. (0, 1) without samples."""
    if not count:
        return 0.0, 1.0
    square, share = confidence**2, hits / count
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = (
        confidence / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-increasing sequence nearest to `values` (weighted pool adjacent violators); weights > 0."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] < value:
            before, heavy, many = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, count = heavy + weight, many + count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
