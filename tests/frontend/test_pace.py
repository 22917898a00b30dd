import pytest

from pdserve.frontend.admission.pace import AdmissionRate


def test_it_knows_nothing_at_first() -> None:
    pace = AdmissionRate()
    pace.waiting(True, 10.0)
    assert pace.seconds(0, 10.0) == 0
    assert pace.seconds(100, 10.0) is None
    pace.turn(50, 10.5)
    assert pace.seconds(100, 10.5) is None  # a first turn may come at once


def test_it_is_turns_by_time_of_waiting() -> None:
    pace = AdmissionRate()
    for start in (0.0, 1000.0):  # between them nobody waited
        pace.waiting(True, start)
        for second in range(1, 11):
            pace.turn(50, start + second)
        pace.waiting(False, start + 10)
    assert pace.seconds(500, 5000.0) == pytest.approx(10, rel=0.05)


def test_a_burst_counts_the_wait_before_it() -> None:
    pace = AdmissionRate()
    pace.waiting(True, 0.0)
    for _ in range(40):
        pace.turn(1, 6.0)
    assert pace.seconds(40, 6.0) == pytest.approx(6, rel=0.1)


def test_it_forgets() -> None:
    pace = AdmissionRate()
    pace.waiting(True, 0.0)
    for tenth in range(600):
        pace.turn(10, tenth / 10)
    for second in range(60, 200):
        pace.turn(10, float(second))
    assert pace.seconds(100, 200.0) == pytest.approx(10, rel=0.15)


def test_it_slows_down_while_nothing_moves() -> None:
    pace = AdmissionRate()
    pace.waiting(True, 0.0)
    for second in range(1, 31):
        pace.turn(10, float(second))
    before, after = pace.seconds(10, 30.0), pace.seconds(10, 60.0)
    assert before is not None
    assert after is not None
    assert after > 1.5 * before
