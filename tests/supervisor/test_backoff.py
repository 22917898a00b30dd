import pytest

from pdserve.supervisor.backoff import GiveUp, Life, Policy, Restart, decide
from pdserve.supervisor.process import Ended

POLICY = Policy(first=1, ceiling=30, healthy=60, failed_starts=3, crashes=6, window=600)


def lives(*each: tuple[float, bool], code: int = 1, gap: float = 1) -> list[Life]:
    """Lives in a row, as (seconds, became ready)."""
    found, clock = [], 0.0
    for seconds, ready in each:
        found.append(Life(clock, clock + seconds, ready, Ended(code)))
        clock += seconds + gap
    return found


SHORT, LONG, FAILED = (5.0, True), (90.0, True), (5.0, False)


@pytest.mark.parametrize(
    ("history", "decision"),
    [
        pytest.param(lives(SHORT), Restart(1), id="first crash"),
        pytest.param(lives(SHORT, SHORT), Restart(2), id="doubles"),
        pytest.param(lives(SHORT, SHORT, SHORT), Restart(4), id="doubles again"),
        pytest.param(lives(SHORT, SHORT, LONG), Restart(1), id="a healthy life ends the row"),
        pytest.param(lives(SHORT, LONG, SHORT), Restart(1), id="the row starts anew"),
        pytest.param(lives(FAILED, FAILED), Restart(2), id="a failed start counts like a crash"),
        pytest.param(lives(FAILED, FAILED, SHORT, FAILED, FAILED), Restart(16), id="it did start in between"),
        pytest.param(
            lives(FAILED, FAILED, FAILED), GiveUp("it failed to start 3 times in a row"), id="never starts"
        ),
        pytest.param(lives(*[SHORT] * 6), GiveUp("it ended 6 times within 600 s"), id="too often"),
        pytest.param(lives(*[SHORT] * 6, gap=200), Restart(30), id="often, but slowly"),
        pytest.param(lives(FAILED, code=2), GiveUp("its configuration is wrong"), id="wrong configuration"),
        pytest.param(lives(SHORT, code=2), Restart(1), id="code 2 of one that had been ready"),
        pytest.param(lives(SHORT, code=-9), Restart(1), id="killed"),
        pytest.param(lives(SHORT, code=0), Restart(1), id="ended by itself without an error"),
    ],
)
def test_decisions(history: list[Life], decision: Restart | GiveUp) -> None:
    assert decide(history, POLICY) == decision


def test_the_delay_has_a_ceiling() -> None:
    patient = Policy(crashes=100)
    assert decide(lives(*[SHORT] * 12), patient) == Restart(30)


def test_one_failed_start_may_be_too_many() -> None:
    assert decide(lives(FAILED), Policy(failed_starts=1)) == GiveUp("it failed to start once in a row")


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (-11, "killed by SIGSEGV"), (-60, "killed by signal 60")]
)
def test_an_end_says_how(code: int, text: str) -> None:
    assert str(Ended(code)) == text
