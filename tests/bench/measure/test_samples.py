"""Percentiles, intervals, fits and arrivals against known values."""

import statistics
from itertools import pairwise

import pytest
from pdserve_bench.measure.load import arrivals
from pdserve_bench.measure.samples import falling, percentile, wilson


@pytest.mark.parametrize(
    ("count", "share", "found"),
    [
        (0, 0.9, 0),
        (1, 0.0, 1),
        (2, 0.51, 2),
        (100, 0.07, 7),  # as floats, 0.07 * 100 is more than 7
        (100, 0.99, 99),
        (100, 1.0, 100),
    ],
)
def test_percentiles_are_values_of_the_sample(count: int, share: float, found: int) -> None:
    assert percentile([float(value) for value in range(count, 0, -1)], share) == found


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [  # Wilson's formula at 1.96, as in the literature's tables
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_interval_is_wilsons(hits: int, count: int, low: float, high: float) -> None:
    assert wilson(hits, count, 1.96) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("values", "weights", "fitted"),
    [
        ([], [], []),
        ([0.5, 1.0], [3, 1], [0.625, 0.625]),
        ([1.0, 0.2, 0.4, 0.6, 0.1], [1, 1, 1, 1, 1], [1.0, 0.4, 0.4, 0.4, 0.1]),
    ],
)
def test_a_falling_fit_pools_values_that_rise(
    values: list[float], weights: list[float], fitted: list[float]
) -> None:
    assert falling(values, weights) == pytest.approx(fitted)


def test_arrivals_are_poisson() -> None:
    """The count's variance equals the count's mean, and the waits are exponential."""
    runs = [list(arrivals(40.0, 3.0, seed)) for seed in range(20)]
    assert runs[7] == list(arrivals(40.0, 3.0, 7))
    numbers = [len(times) for times in runs]
    assert statistics.fmean(numbers) == pytest.approx(120, abs=3.3 * (120 / 20) ** 0.5)
    assert 0.35 < statistics.variance(numbers) / 120 < 2.2  # chi square of 19 degrees: 0.1 % on each side
    waits = [after - before for times in runs for before, after in pairwise(times)]
    assert statistics.fmean(waits) == pytest.approx(1 / 40, rel=0.1)
    assert statistics.median(waits) == pytest.approx(0.6931 / 40, rel=0.1)
