"""What is learned of prefills, and for how long it is believed."""

import pytest

from pdserve.process.learned import HALF_LIFE, LearnedMean, PrefillSpeed, revised


@pytest.mark.parametrize(
    ("measured", "value"),
    [
        ([1.0], 1.0),
        ([1.0, 2.0], 1.2),
        ([1.0, 9.0], 1.0),
        ([1.0, 9.0, 1.0], 1.0),
        ([1.0, 9.0, 1.0, 9.0], 1.0),
        ([1.0, 9.0, 8.0], 8.0),
        ([1.0, 0.1], 0.1),
    ],
    ids=["first", "mean", "mishap", "mishap over", "two mishaps", "it got slow", "it got fast"],
)
def test_a_mishap_is_not_believed_and_a_change_is(measured: list[float], value: float) -> None:
    mean = LearnedMean()
    for number, each in enumerate(measured):
        mean.learn(each, float(number))
    assert mean.value == pytest.approx(value)
    assert mean.at == len(measured) - 1


def test_the_speed_of_single_prompts() -> None:
    speed = PrefillSpeed()
    speed.done(1000, 5.0, 6.0)
    speed.done(1000, 10.0, 11.0)
    assert speed.token_seconds.value == pytest.approx(0.001)


def test_prompts_that_waited_for_each_other_are_measured_together() -> None:
    """The second of each pair was half computed when the first was done."""
    speed = PrefillSpeed()
    for pair in range(10):
        speed.done(1000, 10.0 * pair, 10.0 * pair + 1.5)
        speed.done(1000, 10.0 * pair, 10.0 * pair + 2.0)
    assert speed.token_seconds.value == pytest.approx(0.001, rel=0.3)


def test_without_a_pause_a_row_is_measured_from_its_middle() -> None:
    speed = PrefillSpeed()
    for number in range(1, 100):
        speed.done(1000, 0.0, float(number))
    assert speed.token_seconds.value == pytest.approx(0.001)


def test_short_prompts_say_little_of_long_ones() -> None:
    speed = PrefillSpeed()
    speed.done(1000, 0.0, 1.0)
    speed.done(10, 5.0, 5.5)
    assert speed.token_seconds.value == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("value", "age", "other", "expected"),
    [
        (None, 0.0, None, None),
        (None, 0.0, 2.0, 2.0),
        (1.0, 99.0, None, 1.0),
        (1.0, 99.0, 2.0, 1.0),
        (5.0, 0.0, 1.0, 5.0),
        (5.0, HALF_LIFE, 1.0, 3.0),
        (5.0, 100 * HALF_LIFE, 1.0, 1.0),
    ],
)
def test_slow_estimates_recover_with_time(
    value: float | None, age: float, other: float | None, expected: float | None
) -> None:
    assert revised(value, age, other) == (expected if expected is None else pytest.approx(expected))
