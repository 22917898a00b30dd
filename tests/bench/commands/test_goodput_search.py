"""The goodput search against simulated servers with a known limit."""

import math
import random

import pytest
from pdserve_bench.goodput.search import TRIES, GoodputSearch

SEARCHES = 60
"""Number of searches for each steepness."""


class Curve:
    """A server where 90 % keep the SLO at `border` requests/s. The higher `steep`, the fewer keep it above `border`."""

    def __init__(self, border: float, steep: float) -> None:
        self.border, self._steep = border, steep

    def share(self, rate: float) -> float:
        return 1 / (1 + math.exp(min(700.0, math.log(rate / self.border) * self._steep - math.log(9))))

    def sample(self, rate: float, seconds: float, dice: random.Random) -> tuple[int, int]:
        requests = max(50, round(rate * seconds))
        return sum(dice.random() < self.share(rate) for _ in range(requests)), requests


def _searched(curve: Curve, search: GoodputSearch, seed: int = 1) -> list[float]:
    dice, rates = random.Random(seed), []
    while (rate := search.next()) is not None:
        rates.append(rate)
        search.tell(rate, *curve.sample(rate, 20, dice))
    return rates


@pytest.mark.parametrize(
    ("steep", "typical", "worst"), [(60, 0.045, 0.08), (20, 0.045, 0.1), (3, 0.17, 0.35)]
)
def test_the_goodput_is_found(steep: float, typical: float, worst: float) -> None:
    """If the share falls steeply, 19 of 20 searches err by less than half the precision, with few probes."""
    errors, probes, inside = [], [], 0
    for seed in range(SEARCHES):
        border = math.exp(random.Random(seed).uniform(math.log(0.3), math.log(60)))
        search = GoodputSearch(start=4.0)
        rates = _searched(Curve(border, steep), search, seed)
        assert search.found
        assert search.carried is not None
        assert search.broken is not None
        assert search.estimate is not None
        assert search.carried <= search.estimate <= search.broken <= 1.1001 * search.carried
        errors.append(abs(math.log(search.estimate / border)))
        probes.append(len(rates))
        low, high = search.interval
        inside += (low or 0) <= border <= (high or math.inf)
        assert max(map(rates.count, rates)) <= TRIES
    errors.sort()
    assert errors[int(0.95 * SEARCHES)] < typical
    assert errors[-1] < worst
    assert inside >= 0.9 * SEARCHES
    assert sum(probes) / SEARCHES < 12
    assert max(probes) <= 24


def test_a_search_ends_at_the_lowest_or_highest_rate() -> None:
    search = GoodputSearch(start=4.0, lowest=0.25)
    assert _searched(Curve(0.001, 60), search) == [4.0, 2.0, 1.0, 0.5, 0.25, 0.25]
    assert (search.carried, search.broken, search.estimate, search.found) == (None, 0.25, None, False)
    assert search.interval == (None, 0.25)
    search = GoodputSearch(start=4.0, highest=50.0)
    assert _searched(Curve(1e6, 60), search) == [4.0, 8.0, 16.0, 32.0, 50.0]
    assert (search.carried, search.broken, search.estimate, search.found) == (50.0, None, 50.0, False)


def test_a_disturbed_probe_is_overruled() -> None:
    """The first probe, at 4 requests/s, is disturbed; the server's limit is 10."""
    curve, search, dice = Curve(10, 60), GoodputSearch(start=4.0), random.Random(1)
    while (rate := search.next()) is not None:
        disturbed = search.probes == 0
        search.tell(rate, *((40, 80) if disturbed else curve.sample(rate, 20, dice)))
    assert search.estimate == pytest.approx(10, rel=0.1)


def test_outcomes_that_are_not_monotone_are_pooled() -> None:
    search = GoodputSearch(start=4.0)
    for rate, kept in ((2.0, 70), (3.0, 100), (4.0, 95), (8.0, 0)):
        search.tell(rate, kept, 100)
    assert (search.carried, search.broken) == (None, 2.0)  # 265 of 300 at the three rates below 8
    search.tell(2.0, 100, 100)
    search.tell(2.0, 100, 100)
    assert search.carried == 4.0


def test_probes_are_bounded_whatever_they_find() -> None:
    dice = random.Random(5)
    for _ in range(200):
        search = GoodputSearch(start=4.0, most=15)
        while (rate := search.next()) is not None:
            assert 0.05 <= rate <= 1000
            requests = dice.choice([0, 1, 30, 200])
            search.tell(rate, dice.randint(0, requests), requests)
        assert search.probes <= 15


def test_carried_and_broken_rates_are_probed_again_while_in_doubt() -> None:
    search = GoodputSearch(start=4.0, precision=0.5)
    search.tell(4.0, 92, 100)
    search.tell(5.5, 50, 100)
    assert search.next() == 5.5  # the broken rate, once more
    search.tell(5.5, 50, 100)
    assert search.next() == 4.0  # 92 of 100 leave a doubt
    assert list(search.interval) == [None, 5.5]
    search.tell(4.0, 93, 100)
    assert search.next() == 4.0
    search.tell(4.0, 97, 100)
    assert search.next() is None
    assert list(search.interval) == [4.0, 5.5]
