"""The multi-round workload: when users join and ask, what they say, and what is reported of it."""

from itertools import takewhile

import pytest
from pdserve_bench.multi_round.pacing import Pacing


def _asked(pacing: Pacing, seconds: float, seed: int = 1) -> list[float]:
    """When each question is due."""
    visits = takewhile(lambda visit: visit.at < seconds, pacing.visits(seed))
    due = (
        visit.at + number * pacing.interval
        for visit in visits
        for number in range(pacing.rounds - visit.first_round + 1)
    )
    return sorted(moment for moment in due if moment < seconds)


@pytest.mark.parametrize(
    ("pacing", "interval", "joining", "rate"),
    [
        (Pacing(20, 3, 10), 2.0, 0.2, 15.0),
        (Pacing(10, 2, 1), 10.0, 1.0, 2.0),
        (Pacing(20, 6, 2), 10.0, 2.5, 2.4),
        (Pacing(5, 1, 3), 5 / 3, 1 / 3, 3.0),
    ],
    ids=str,
)
def test_users_join_as_often_as_places_become_free(
    pacing: Pacing, interval: float, joining: float, rate: float
) -> None:
    assert (pacing.interval, pacing.joining, pacing.rate) == pytest.approx((interval, joining, rate))
    asked = _asked(pacing, 120)
    first, second = (sum(start <= moment < start + 60 for moment in asked) for start in (0, 60))
    assert first == pytest.approx(60 * rate, abs=2 * pacing.rounds)
    assert second == pytest.approx(60 * rate, abs=2 * pacing.rounds)


def test_as_many_users_as_were_asked_for_are_there_at_all_times() -> None:
    pacing = Pacing(20, 3, 10)
    visits = list(takewhile(lambda visit: visit.at < 40, pacing.visits(7)))
    stays = [(visit.at, visit.at + (pacing.rounds - visit.first_round) * pacing.interval) for visit in visits]
    for moment in range(4, 36):  # before, those that were there already have not asked yet
        assert sum(came <= moment <= left for came, left in stays) == pytest.approx(20, abs=3)
    assert [visit.user for visit in visits] == list(range(1, len(visits) + 1))
    assert [visit.at for visit in visits] == sorted(visit.at for visit in visits)


def test_a_load_is_scaled_by_the_number_of_its_users() -> None:
    for rate in (0.5, 3.0, 40.0):
        scaled = Pacing(20, 3, 10).scaled(rate)
        assert scaled.rate == pytest.approx(rate)
        assert scaled.interval == pytest.approx(2.0)
        assert len(_asked(scaled, 100)) == pytest.approx(100 * rate, abs=6)


def test_a_seed_says_when_users_join() -> None:
    pacing = Pacing(20, 3, 10)
    assert _asked(pacing, 20, seed=1) == _asked(pacing, 20, seed=1)
    assert _asked(pacing, 20, seed=1) != _asked(pacing, 20, seed=2)
