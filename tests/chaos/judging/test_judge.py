"""How chaos judges a request's tokens, error and pauses."""

import pytest
from pdserve_bench.chaos.judge import Judgement, first_difference, judge, too_long, trace
from pdserve_bench.chaos.questions import Attempt, Case

RIGHT = (5, 6, 7)


@pytest.mark.parametrize(
    ("tokens", "error", "hung", "result"),
    [
        ([5, 6, 7], "", False, Judgement.OK),
        ([5, 6], "", False, Judgement.FAILED),  # too few
        ([5, 6, 7, 8], "", False, Judgement.WRONG),  # too many
        ([5, 6, 6], "", False, Judgement.WRONG),
        ([6, 7], "", False, Judgement.WRONG),  # one token lost
        ([5, 5, 6, 7], "", False, Judgement.WRONG),  # one token twice
        ([5, 6], "HTTP 503", False, Judgement.FAILED),
        ([], "HTTP 503", False, Judgement.FAILED),
        ([5, 6, 7], "no [DONE]", False, Judgement.FAILED),
        ([5, 9], "HTTP 503", False, Judgement.WRONG),  # an error does not excuse wrong tokens
        ([5], "no end", True, Judgement.HUNG),
        ([9], "no end", True, Judgement.WRONG),
    ],
)
def test_judge(tokens: list[int], error: str, hung: bool, result: Judgement) -> None:
    assert judge(tokens, RIGHT, error, hung) is result


@pytest.mark.parametrize(
    ("arrivals", "ended", "pause"),
    [
        ([10.5, 10.6, 10.7], 10.7, 0.5),  # until the first token
        ([10.1, 12.1, 12.2], 12.2, 2.0),  # in the middle
        ([], 13.0, 3.0),  # no token came
        ([10.1, 10.2], 19.0, 0.1),  # all tokens had come before the end
    ],
)
def test_longest_pause(arrivals: list[float], ended: float, pause: float) -> None:
    attempt = Attempt(started=10.0, arrivals=arrivals, ended=ended, case=Case((1,), 1, True))
    assert attempt.longest_wait == pytest.approx(pause)


@pytest.mark.parametrize(("pause", "amiss"), [(1.4, False), (4.9, False), (5.1, True), (17.0, True)])
def test_a_pause_above_the_bound_of_5_s_is_too_long(pause: float, amiss: bool) -> None:
    assert bool(too_long(pause, calm=1.0)) is amiss


@pytest.mark.parametrize(
    ("got", "index"), [((5, 6, 7), None), ((5, 9, 7), 1), ((9,), 0), ((5, 6), 2), ((), 0), ((5, 6, 7, 8), 3)]
)
def test_first_difference(got: tuple[int, ...], index: int | None) -> None:
    assert first_difference(got, RIGHT) == index


@pytest.mark.parametrize(
    ("got", "error", "result", "differed", "told"),
    [
        ((5, 9), "", Judgement.WRONG, 1.5, "token 1 of 3 is 9, not 6 (at 1.5 s)"),
        ((5, 6, 7, 8), "", Judgement.WRONG, 3.5, "token 3 of 3 is 8, not the end (at 3.5 s)"),
        ((5, 6), "HTTP 503", Judgement.FAILED, None, "HTTP 503, after 2 of 3 tokens"),
        ((5,), "", Judgement.FAILED, None, "ended early, after 1 of 3 tokens"),
    ],
)
def test_a_trace_says_what_went_wrong(
    got: tuple[int, ...], error: str, result: Judgement, differed: float | None, told: str
) -> None:
    attempt = Attempt(
        request_id="chaos-ab",
        case=Case((1, 2), 3, True, RIGHT, "salt"),
        started=99.0,
        ended=104.0,
        tokens=list(got),
        arrivals=[100.5 + n for n in range(len(got))],
        prefill="remote",
        instance="decode-0-cc",
        error=error,
    )
    found = trace(attempt, result, "decode-kill", began=100.0)
    assert (found.started, found.ended, found.differed) == (-1.0, 4.0, differed)
    assert (found.prompt, found.expected, found.got, found.cache_salt) == ((1, 2), RIGHT, got, "salt")
    assert str(found) == (
        f"{result}: chaos-ab (2 tokens, streamed, remote, decode-0-cc, from -1.0 s to 4.0 s): {told}"
    )
