"""From what clients saw to the verdict, by tables."""

from dataclasses import replace

import pytest

from pdserve.chaos.score import (
    Leftovers,
    Result,
    Row,
    Seen,
    judge,
    longest_pause,
    passed,
    percentile,
    score,
)

RIGHT = (5, 6, 7)


@pytest.mark.parametrize(
    ("tokens", "error", "hung", "result"),
    [
        ([5, 6, 7], "", False, Result.OK),
        ([5, 6], "", False, Result.FAILED),  # too few
        ([5, 6, 7, 8], "", False, Result.WRONG),  # too many
        ([5, 6, 6], "", False, Result.WRONG),
        ([6, 7], "", False, Result.WRONG),  # one lost
        ([5, 5, 6, 7], "", False, Result.WRONG),  # one twice
        ([5, 6], "HTTP 503", False, Result.FAILED),
        ([], "HTTP 503", False, Result.FAILED),
        ([5, 6, 7], "no [DONE]", False, Result.FAILED),
        ([5, 9], "HTTP 503", False, Result.WRONG),  # an error does not excuse wrong tokens
        ([5], "no end", True, Result.HUNG),
        ([9], "no end", True, Result.WRONG),
    ],
)
def test_judge(tokens: list[int], error: str, hung: bool, result: Result) -> None:
    assert judge(tokens, RIGHT, error, hung) is result


@pytest.mark.parametrize(
    ("values", "share", "value"),
    [
        ([], 0.99, 0.0),
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0], 0.5, 1.0),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 1001)), 0.99, 990),
        ([9.0, 1.0, 5.0], 1.0, 9.0),
    ],
)
def test_percentile(values: list[float], share: float, value: float) -> None:
    assert percentile(values, share) == value


@pytest.mark.parametrize(
    ("arrivals", "ended", "pause"),
    [
        ([10.5, 10.6, 10.7], 10.7, 0.5),  # until the first token
        ([10.1, 12.1, 12.2], 12.2, 2.0),  # in the middle
        ([], 13.0, 3.0),  # nothing ever came
        ([10.1, 10.2], 19.0, 0.1),  # all tokens were there
    ],
)
def test_longest_pause(arrivals: list[float], ended: float, pause: float) -> None:
    assert longest_pause(10.0, arrivals, ended) == pytest.approx(pause)


def test_a_row_counts() -> None:
    seen = [
        Seen(Result.OK, 0.1),
        Seen(Result.OK, None),
        Seen(Result.FAILED, 0.4, "HTTP 503"),
        Seen(Result.FAILED, 0.3, "HTTP 503"),
        Seen(Result.HUNG, 60.0, "no end"),
        Seen(Result.WRONG, 0.1),
        Seen(Result.APART, 0.2, "connection: reset"),
    ]
    row = score("decode-kill", "decode-0-ab", seen, 2.5, Leftovers({"prefill-0": 3, "decode-1": 1}, 2, 40.0))
    assert row == Row(
        "decode-kill",
        "decode-0-ab",
        requests=7,
        failed=2,
        hung=1,
        wrong=1,
        apart=1,
        p99_pause=60.0,
        recovered=2.5,
        leaked=4,
        queued=2,
        freed=40.0,
        errors=("2 x HTTP 503", "1 x no end"),
    )


GOOD = Row("etcd-kill", requests=10, recovered=1.0)


@pytest.mark.parametrize(
    ("row", "good"),
    [
        (GOOD, True),
        (replace(GOOD, apart=3), True),
        (replace(GOOD, p99_pause=30.0, freed=31.0), True),
        (replace(GOOD, failed=1), False),
        (replace(GOOD, hung=1), False),
        (replace(GOOD, wrong=1), False),
        (replace(GOOD, leaked=1), False),
        (replace(GOOD, queued=1), False),
        (replace(GOOD, recovered=None), False),
        (replace(GOOD, requests=0), False),  # nothing was tested
        (Row("prefill-cut", skipped="needs root"), True),
    ],
)
def test_verdict(row: Row, good: bool) -> None:
    assert row.good is good
    assert passed([GOOD, row]) is good
