"""Running means of prefill times: outliers and decay."""

import pytest

from pdserve.process.learned import HALF_LIFE, LearnedMean, PrefillSpeed, decayed


@pytest.mark.parametrize(
    ("measured", "value"),
    [
        ([1.0, 2.0], 1.2),
        ([1.0, 9.0], 1.0),
        ([1.0, 9.0, 1.0, 9.0], 1.0),
        ([1.0, 9.0, 8.0], 8.0),
        ([1.0, 0.1], 0.1),
    ],
    ids=["mean", "one outlier", "two outliers apart", "it got slow", "it got fast"],
)
def test_an_outlier_is_ignored_and_a_change_is_learned(measured: list[float], value: float) -> None:
    mean = LearnedMean()
    for number, each in enumerate(measured):
        mean.learn(each, float(number))
    assert mean.value == pytest.approx(value)
    assert mean.at == len(measured) - 1


@pytest.mark.parametrize(
    ("prompts", "tolerance"),
    [
        ([(1000, 5.0, 6.0), (1000, 10.0, 11.0)], 0.0),
        ([(1000, 10.0 * pair, 10.0 * pair + end) for pair in range(10) for end in (1.5, 2.0)], 0.3),
        ([(1000, 0.0, float(number)) for number in range(1, 100)], 0.0),
        ([(1000, 0.0, 1.0), (10, 5.0, 5.5)], 0.0),
    ],
    ids=[
        "single",
        "two at a time",
        "all started together",
        "a short prompt",
    ],
)
def test_the_seconds_per_prompt_token_are_learned(
    prompts: list[tuple[int, float, float]], tolerance: float
) -> None:
    speed = PrefillSpeed()
    for prompt in prompts:
        speed.done(*prompt)
    assert speed.token_seconds.value == pytest.approx(0.001, rel=tolerance or None)


@pytest.mark.parametrize(
    ("value", "age", "other", "expected"),
    [
        (None, 0.0, None, None),
        (None, 0.0, 2.0, 2.0),
        (1.0, 99.0, 2.0, 1.0),
        (5.0, 0.0, 1.0, 5.0),
        (5.0, HALF_LIFE, 1.0, 3.0),
        (5.0, 100 * HALF_LIFE, 1.0, 1.0),
    ],
)
def test_a_slow_value_decays_to_the_other_value(
    value: float | None, age: float, other: float | None, expected: float | None
) -> None:
    assert decayed(value, age, other) == (expected if expected is None else pytest.approx(expected))
