"""Load: arrivals at random."""

import statistics
from itertools import pairwise

import pytest
from pdserve_bench.load import arrivals


def test_arrivals_are_poisson() -> None:
    """Their number has the variance of its mean, and the waits between them are exponential."""
    runs = [list(arrivals(40.0, 3.0, seed)) for seed in range(20)]
    numbers = [len(times) for times in runs]
    assert statistics.fmean(numbers) == pytest.approx(120, abs=3.3 * (120 / 20) ** 0.5)
    assert 0.35 < statistics.variance(numbers) / 120 < 2.2  # chi square of 19 degrees: 0.1 % on each side
    waits = [after - before for times in runs for before, after in pairwise(times)]
    assert statistics.fmean(waits) == pytest.approx(1 / 40, rel=0.1)
    assert statistics.median(waits) == pytest.approx(0.6931 / 40, rel=0.1)


def test_a_seed_says_when_requests_arrive() -> None:
    first, same, other = (list(arrivals(30.0, 1.0, seed)) for seed in (1, 1, 2))
    assert first == same
    assert first != other
