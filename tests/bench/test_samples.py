"""Percentiles, intervals, fits: against what is known of them."""

import pytest
from pdserve_bench.samples import falling, percentile, wilson


@pytest.mark.parametrize(
    ("count", "share", "found"),
    [
        (1, 0.0, 1),
        (1, 0.5, 1),
        (1, 1.0, 1),
        (2, 0.5, 1),
        (2, 0.51, 2),
        (10, 0.9, 9),
        (10, 0.91, 10),
        (100, 0.07, 7),  # 0.07 * 100 is more than 7
        (100, 0.56, 56),
        (100, 0.99, 99),
        (100, 1.0, 100),
        (100, 0.0, 1),
    ],
)
def test_percentiles_are_values_of_the_sample(count: int, share: float, found: int) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    assert percentile(values, share) == found


def test_percentiles_of_nothing() -> None:
    assert percentile([], 0.9) == 0.0


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [  # Wilson's formula at 1.96, as in the literature's tables
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_interval_is_wilsons(hits: int, count: int, low: float, high: float) -> None:
    assert wilson(hits, count, 1.96) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("values", "weights", "fitted"),
    [
        ([], [], []),
        ([1.0, 0.9, 0.1], [1, 1, 1], [1.0, 0.9, 0.1]),
        ([0.5, 1.0], [1, 1], [0.75, 0.75]),
        ([0.5, 1.0], [3, 1], [0.625, 0.625]),
        ([1.0, 0.2, 0.4, 0.6, 0.1], [1, 1, 1, 1, 1], [1.0, 0.4, 0.4, 0.4, 0.1]),
        ([0.0, 0.3, 0.6], [1, 1, 2], [0.375, 0.375, 0.375]),
    ],
)
def test_a_falling_fit_pools_what_rises(
    values: list[float], weights: list[float], fitted: list[float]
) -> None:
    assert falling(values, weights) == pytest.approx(fitted)
