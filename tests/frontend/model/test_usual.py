import pytest

from pdserve.frontend.admission.estimate import Usual


def test_nothing_is_known_at_first() -> None:
    usual = Usual()
    assert usual.seconds(None) == 0
    assert usual.output(5) == 5


def test_it_learns_at_once_and_then_slowly() -> None:
    usual = Usual()
    usual.learn(11, first=0.5, rest=1.0)
    assert (usual.tokens, usual.first, usual.gap) == (11, 0.5, 0.1)
    assert usual.seconds(None) == pytest.approx(1.6)
    assert usual.seconds(1) == pytest.approx(0.6)
    for _ in range(100):
        usual.learn(11, 0.5, 1.0)
    usual.learn(1, first=0.5, rest=0.0)
    assert 10 < usual.tokens < 11
    for _ in range(200):
        usual.learn(1, first=2.0, rest=0.0)
    assert usual.tokens == pytest.approx(1, abs=0.1)
    assert usual.seconds(100) == pytest.approx(2, abs=0.1)
