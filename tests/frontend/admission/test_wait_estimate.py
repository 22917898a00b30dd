import pytest

from pdserve.frontend.admission.wait_estimate import (
    AdmissionRate,
    RequestEstimate,
    retry_after,
    seconds_of_turns,
    seconds_too_late,
)


def test_an_estimate_learns_at_once_and_then_slowly() -> None:
    estimate = RequestEstimate()
    assert (estimate.seconds(None), estimate.tokens(5)) == (0, 5), "nothing is known"
    estimate.record(11, ttft=0.5, decode_seconds=1.0)
    assert (estimate.output_tokens, estimate.ttft, estimate.itl) == (11, 0.5, 0.1)
    assert estimate.seconds(None) == pytest.approx(1.6)
    assert estimate.seconds(1) == pytest.approx(0.6)
    for _ in range(100):
        estimate.record(11, 0.5, 1.0)
    estimate.record(1, ttft=0.5, decode_seconds=0.0)
    assert 10 < estimate.output_tokens < 11
    for _ in range(200):
        estimate.record(1, ttft=2.0, decode_seconds=0.0)
    assert estimate.output_tokens == pytest.approx(1, abs=0.1)
    assert estimate.seconds(100) == pytest.approx(2, abs=0.1)


def test_the_rate_is_unknown_at_first() -> None:
    rate = AdmissionRate()
    rate.set_waiting(True, 10.0)
    assert rate.seconds(0, 10.0) == 0
    assert rate.seconds(100, 10.0) is None
    rate.admitted(50, 10.5)
    # the first admission tells no rate: the request may not have waited
    assert rate.seconds(100, 10.5) is None


def test_the_rate_is_tokens_per_second_while_requests_wait() -> None:
    rate = AdmissionRate()
    for start in (0.0, 1000.0):  # between them no request waited
        rate.set_waiting(True, start)
        for second in range(1, 11):
            rate.admitted(50, start + second)
        rate.set_waiting(False, start + 10)
    assert rate.seconds(500, 5000.0) == pytest.approx(10, rel=0.05)


def test_a_burst_counts_the_wait_before_it() -> None:
    rate = AdmissionRate()
    rate.set_waiting(True, 0.0)
    for _ in range(40):
        rate.admitted(1, 6.0)
    assert rate.seconds(40, 6.0) == pytest.approx(6, rel=0.1)


def test_the_rate_follows_the_newest_admissions() -> None:
    rate = AdmissionRate()
    rate.set_waiting(True, 0.0)
    for tenth in range(600):
        rate.admitted(10, tenth / 10)
    for second in range(60, 200):
        rate.admitted(10, float(second))
    assert rate.seconds(100, 200.0) == pytest.approx(10, rel=0.15)


def test_the_rate_falls_while_nothing_is_admitted() -> None:
    rate = AdmissionRate()
    rate.set_waiting(True, 0.0)
    for second in range(1, 31):
        rate.admitted(10, float(second))
    before, after = rate.seconds(10, 30.0), rate.seconds(10, 60.0)
    assert before is not None
    assert after is not None
    assert after > 1.5 * before


@pytest.mark.parametrize(
    ("wait", "left", "run", "max_wait", "expected"),
    [
        (29, 600, 2, 30, 0),
        (35, 600, 2, 30, 5),
        (4, 10, 2, 30, 0),  # the wait may take half of the 8 s to spare
        (5, 10, 2, 30, 1),
        (1, 10, 20, 30, 1),  # 20 s do not fit into 10 s
        (0, 10, 20, 30, 0),  # the next request is never refused
    ],
)
def test_seconds_too_late(wait: float, left: float, run: float, max_wait: float, expected: float) -> None:
    assert seconds_too_late(wait, left, run, max_wait) == expected


@pytest.mark.parametrize(
    ("turns", "running", "run", "expected"),
    [(80, 40, 12.0, 24.0), (1, 40, 12.0, 0.3), (0, 40, 12.0, 0.0), (80, 0, 12.0, None), (80, 40, 0.0, None)],
)
def test_turns_take_as_long_as_running_requests(
    turns: int, running: int, run: float, expected: float | None
) -> None:
    assert seconds_of_turns(turns, running, run) == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    ("late", "now", "expected"),
    [(991.0, 25.0, 25.0), (20.0, 25.0, 20.0), (991.0, None, 991.0), (991.0, 0.0, 1.0), (0.2, 0.1, 1.0)],
)
def test_retry_after_is_the_shorter_time_and_at_least_a_second(
    late: float, now: float | None, expected: float
) -> None:
    assert retry_after(late, now) == expected
