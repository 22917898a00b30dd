import pytest

from pdserve.frontend.admission.estimate import RequestEstimate


def test_nothing_is_known_at_first() -> None:
    estimate = RequestEstimate()
    assert estimate.seconds(None) == 0
    assert estimate.tokens(5) == 5


def test_it_learns_at_once_and_then_slowly() -> None:
    estimate = RequestEstimate()
    estimate.learn(11, ttft=0.5, decode_seconds=1.0)
    assert (estimate.output_tokens, estimate.ttft, estimate.itl) == (11, 0.5, 0.1)
    assert estimate.seconds(None) == pytest.approx(1.6)
    assert estimate.seconds(1) == pytest.approx(0.6)
    for _ in range(100):
        estimate.learn(11, 0.5, 1.0)
    estimate.learn(1, ttft=0.5, decode_seconds=0.0)
    assert 10 < estimate.output_tokens < 11
    for _ in range(200):
        estimate.learn(1, ttft=2.0, decode_seconds=0.0)
    assert estimate.output_tokens == pytest.approx(1, abs=0.1)
    assert estimate.seconds(100) == pytest.approx(2, abs=0.1)
