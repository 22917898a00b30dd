"""What many samples say in one figure."""

import math
from collections.abc import Iterable, Sequence

CONFIDENCE = 1.645
"""standard deviations of the normal distribution: 90 % between plus and minus, 95 % on one side"""


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is not exceeded by `share` of them; 0 where there are no values."""
    ordered = sorted(values)
    place = math.ceil(share * len(ordered) - 1e-9)  # 0.07 * 100 is a little more than 7
    return ordered[max(0, place - 1)] if ordered else 0.0


def wilson(hits: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Between which shares the true one lies, of which `hits` of `count` independent samples are known: Wilson's
    interval (1927), which is right for few samples and near 0 and 1 too. (0, 1) of no samples."""
    if not count:
        return 0.0, 1.0
    square, share = confidence**2, hits / count
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = (
        confidence / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The sequence nearest to `values` (weighted least squares) that never rises: neighbours that do are pooled into
    their mean (pool adjacent violators). Weights are more than 0."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] < value:
            before, heavy, many = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, count = heavy + weight, many + count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
