import pytest

from pdserve.supervisor.backoff import GiveUp, Life, Policy, Restart, decide
from pdserve.supervisor.process import Ended

POLICY = Policy(first=1, ceiling=30, healthy=60, failed_starts=3, kills=6)


def lives(*each: tuple[float, bool], code: int = 1, gap: float = 1) -> list[Life]:
    """Lives in a row, as (seconds, became ready)."""
    found, clock = [], 0.0
    for seconds, ready in each:
        found.append(Life(clock, clock + seconds, ready, Ended(code)))
        clock += seconds + gap
    return found


SHORT, LONG, FAILED = (5.0, True), (90.0, True), (5.0, False)
LATER = {"was_ready": True, "role_was_ready": True}
SIBLING = {"was_ready": False, "role_was_ready": True}


@pytest.mark.parametrize(
    ("history", "decision"),
    [
        pytest.param(lives(SHORT), Restart(1), id="first crash"),
        pytest.param(lives(SHORT, SHORT), Restart(2), id="doubles"),
        pytest.param(lives(SHORT, SHORT, SHORT), Restart(4), id="doubles again"),
        pytest.param(lives(SHORT, SHORT, LONG), Restart(1), id="a healthy life ends the row"),
        pytest.param(lives(SHORT, LONG, SHORT), Restart(1), id="the row starts anew"),
        pytest.param(lives(FAILED, FAILED), Restart(2), id="a failed start counts like a crash"),
        pytest.param(
            lives(*[FAILED] * 40), Restart(30), id="it was ready long ago: for ever, at the ceiling"
        ),
        pytest.param(lives(*[SHORT] * 40), Restart(30), id="crashes for ever, too"),
        pytest.param(lives(FAILED, code=2), Restart(1), id="its configuration was right once"),
        pytest.param(lives(*[SHORT] * 9, code=-9), Restart(1), id="killed: nothing to wait for"),
        pytest.param(lives(*[FAILED] * 9, code=-9), Restart(1), id="killed while it starts"),
        pytest.param(lives(SHORT, SHORT, code=0), Restart(1), id="told to end by somebody"),
        pytest.param(lives(SHORT, SHORT, code=-11), Restart(2), id="a crash of its own is none of these"),
    ],
)
def test_one_that_was_ready_is_started_again_whatever_comes(history: list[Life], decision: Restart) -> None:
    assert decide(history, POLICY, **LATER) == decision


@pytest.mark.parametrize(
    ("history", "decision"),
    [
        pytest.param(lives(FAILED, FAILED), Restart(2), id="two failed starts"),
        pytest.param(
            lives(FAILED, FAILED, FAILED), GiveUp("it failed to start 3 times in a row"), id="never starts"
        ),
        pytest.param(lives(FAILED, code=2), GiveUp("its configuration is wrong"), id="wrong configuration"),
        pytest.param(lives(*[FAILED] * 5, code=-9), Restart(1), id="killed while it starts"),
        pytest.param(
            lives(*[FAILED] * 6, code=-9),
            GiveUp("it was ended 6 times while it started"),
            id="again and again",
        ),
    ],
)
def test_one_of_a_role_that_was_never_ready_may_be_given_up(
    history: list[Life], decision: Restart | GiveUp
) -> None:
    assert decide(history, POLICY) == decision


def test_kills_are_no_failed_starts() -> None:
    killed = lives(FAILED, FAILED, code=-9)
    assert decide([*killed, *lives(FAILED, FAILED)], POLICY) == Restart(2)
    assert isinstance(decide([*killed, *lives(FAILED, FAILED, FAILED)], POLICY), GiveUp)


def test_a_worker_that_never_starts_beside_others_that_do_is_tried_for_ever() -> None:
    assert decide(lives(*[FAILED] * 30), POLICY, **SIBLING) == Restart(30)
    assert decide(lives(FAILED, code=2), POLICY, **SIBLING) == GiveUp("its configuration is wrong")


def test_the_delay_has_a_ceiling() -> None:
    assert decide(lives(*[SHORT] * 12), Policy(), **LATER) == Restart(30)


def test_one_failed_start_may_be_too_many() -> None:
    assert decide(lives(FAILED), Policy(failed_starts=1)) == GiveUp("it failed to start once in a row")


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (-11, "killed by SIGSEGV"), (-60, "killed by signal 60")]
)
def test_an_end_says_how(code: int, text: str) -> None:
    assert str(Ended(code)) == text
