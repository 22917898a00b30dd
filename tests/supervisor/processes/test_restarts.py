import pytest

from pdserve.supervisor.processes.child import Exit
from pdserve.supervisor.processes.restarts import NoRestart, PastRun, Restart, RestartPolicy, decide

POLICY = RestartPolicy(first=1, ceiling=30, healthy=60, failed_starts=3, kills=6)


def runs(*seconds_and_ready: tuple[float, bool], code: int = 1) -> list[PastRun]:
    """Runs in a row, as (seconds, became ready)."""
    return [PastRun(seconds, ready, Exit(code)) for seconds, ready in seconds_and_ready]


SHORT, LONG, FAILED = (5.0, True), (90.0, True), (5.0, False)
KILLED = runs(FAILED, FAILED, code=-9)
WRONG = NoRestart("its configuration is wrong")


@pytest.mark.parametrize(
    ("history", "decision"),
    [
        pytest.param(runs(SHORT), Restart(1), id="first crash"),
        pytest.param(runs(SHORT, SHORT, SHORT), Restart(4), id="doubles"),
        pytest.param(runs(SHORT, SHORT, LONG), Restart(1), id="a healthy run ends the series"),
        pytest.param(runs(SHORT, LONG, SHORT), Restart(1), id="a new series after a healthy run"),
        pytest.param(runs(*[FAILED] * 40), Restart(30), id="40 failed starts: at the ceiling"),
        pytest.param(runs(FAILED, code=2), Restart(1), id="its configuration was right once"),
        pytest.param(runs(*[SHORT] * 9, code=-9), Restart(1), id="killed: the pause does not grow"),
        pytest.param(runs(SHORT, SHORT, code=0), Restart(1), id="told to end by an operator"),
        pytest.param(runs(SHORT, SHORT, code=-11), Restart(2), id="a crash doubles the pause"),
    ],
)
def test_a_process_that_was_ready_is_always_started_again(history: list[PastRun], decision: Restart) -> None:
    assert decide(history, POLICY, was_ready=True, kind_was_ready=True) == decision


@pytest.mark.parametrize(
    ("history", "decision"),
    [
        pytest.param(runs(FAILED, FAILED), Restart(2), id="two failed starts"),
        pytest.param(runs(*[FAILED] * 5, code=-9), Restart(1), id="killed while it starts"),
        pytest.param(runs(*[FAILED] * 5, code=137), Restart(1), id="its engine is killed while it starts"),
        pytest.param(
            runs(*[FAILED] * 6, code=-9),
            NoRestart("it was ended 6 times while it started"),
            id="killed too often",
        ),
        pytest.param([*KILLED, *runs(FAILED, FAILED)], Restart(2), id="kills are no failed starts"),
    ],
)
def test_a_role_that_was_never_ready_may_be_given_up(
    history: list[PastRun], decision: Restart | NoRestart
) -> None:
    assert decide(history, POLICY) == decision


def test_a_role_that_was_ready_is_given_up_only_if_wrongly_configured() -> None:
    assert decide(runs(*[FAILED] * 30), POLICY, kind_was_ready=True) == Restart(30)
    assert decide(runs(FAILED, code=2), POLICY, kind_was_ready=True) == WRONG


def test_an_exit_by_a_signal_without_a_name_has_its_number() -> None:
    assert str(Exit(-60)) == "killed by signal 60"
