import pytest

from pdserve.decode.patience import FIRST_GUESS, FLOOR, SLACK, Patience


def test_before_the_first_answer_a_slow_machine_is_assumed() -> None:
    assert Patience().bound(1000, 0, 1) == FLOOR + SLACK * 1000 / FIRST_GUESS


@pytest.mark.parametrize(
    ("tokens", "depth", "workers", "seconds"),
    [
        (0, 0, 1, 0.0),
        (1000, 0, 1, 1.0),
        (5000, 0, 1, 5.0),
        (1000, 3, 1, 4.0),
        (1000, 3, 3, 2.0),
        (1000, 3, 0, 4.0),
    ],
)
def test_the_bound_grows_with_the_prompt_and_the_queue(
    tokens: int, depth: int, workers: int, seconds: float
) -> None:
    patience = Patience()
    patience.observe(1000, 1.0)
    assert patience.bound(tokens, depth, workers) == pytest.approx(FLOOR + SLACK * seconds)


def test_it_follows_the_workers_speed() -> None:
    patience = Patience()
    patience.observe(1000, 1.0)
    before = patience.bound(1000, 0, 1)
    for _ in range(50):
        patience.observe(1000, 0.1)
    assert patience.bound(1000, 0, 1) == pytest.approx(FLOOR + SLACK * 0.1, rel=0.01)
    assert patience.bound(1000, 0, 1) < before
    patience.observe(1000, 0.0)  # a clock without resolution says nothing
    assert patience.bound(1000, 0, 1) == pytest.approx(FLOOR + SLACK * 0.1, rel=0.01)
