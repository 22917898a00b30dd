"""What came of a request, as its client saw it, and all that is needed to trace one that went amiss."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdserve_bench.chaos.questions import Attempt

STAND_IN_WITHIN = 3.0
"""seconds"""


class Judgement(StrEnum):
    OK = "ok"
    FAILED = "failed"
    """an error status, an error in the stream, or an end before the end"""
    HUNG = "hung"
    WRONG = "wrong"
    APART = "apart"
    """its connection was one to the frontend that was killed"""


@dataclass(frozen=True)
class AttemptTrace:
    """Times are seconds after the fault began, negative before it; in a row without a fault, after the load did."""

    fault: str
    result: Judgement
    request_id: str
    started: float
    ended: float
    differed: float | None
    """when the first token came that is another one; None where none is, or where it was not streamed"""
    first_difference: int | None
    """index in the output; where the answer is right so far but too short, its length"""
    stream: bool
    prefill: str
    instance: str
    """these two are the response headers; empty where no answer began"""
    cache_salt: str
    error: str
    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    got: tuple[int, ...]

    def __str__(self) -> str:
        way = "streamed" if self.stream else "whole"
        via = f"{self.prefill or 'no answer'}, {self.instance or 'no instance'}"
        asked = f"{len(self.prompt)} tokens, {way}, {via}, from {self.started:.1f} s to {self.ended:.1f} s"
        return f"{self.result}: {self.request_id} ({asked}): {self._what()}"

    def _what(self) -> str:
        if self.result is not Judgement.WRONG:
            return f"{self.error or 'ended early'}, after {len(self.got)} of {len(self.expected)} tokens"
        at = self.first_difference
        assert at is not None
        right = self.expected[at] if at < len(self.expected) else "the end"
        when = "" if self.differed is None else f" (at {self.differed:.1f} s)"
        return f"token {at} of {len(self.expected)} is {self.got[at]}, not {right}{when}"


@dataclass(frozen=True)
class Seen:
    """A request's row in the judgement of a fault."""

    result: Judgement
    pause: float | None = None
    """seconds of the longest wait for a token, the first one included; None where it was not streamed"""
    trace: AttemptTrace | None = None
    request_id: str = ""


def trace(attempt: Attempt, result: Judgement, fault: str, began: float) -> AttemptTrace:
    at = first_difference(attempt.tokens, attempt.case.expected)
    seen = at is not None and at < len(attempt.arrivals)
    return AttemptTrace(
        fault=fault,
        result=result,
        request_id=attempt.request_id,
        started=round(attempt.started - began, 3),
        ended=round(attempt.ended - began, 3),
        differed=round(attempt.arrivals[at] - began, 3) if at is not None and seen else None,
        first_difference=at,
        stream=attempt.case.stream,
        prefill=attempt.prefill,
        instance=attempt.instance,
        cache_salt=attempt.case.salt,
        error=attempt.error,
        prompt=attempt.case.prompt,
        expected=attempt.case.expected,
        got=tuple(attempt.tokens),
    )


def judge(tokens: Sequence[int], expected: Sequence[int], error: str, hung: bool) -> Judgement:
    """Judge a request that was not on the killed frontend's connections. Tokens that are wrong count as wrong however
    the request ended."""
    if list(tokens) != list(expected[: len(tokens)]):
        return Judgement.WRONG
    if hung:
        return Judgement.HUNG
    return Judgement.FAILED if error or len(tokens) != len(expected) else Judgement.OK


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the index where they differ, or the shorter one ends; None where they are the same."""
    for index, (token, right) in enumerate(zip(got, expected, strict=False)):
        if token != right:
            return index
    return None if len(got) == len(expected) else min(len(got), len(expected))


def too_long(pause: float, calm: float) -> str:
    """What is amiss where decode workers were killed and others, or prefill workers that stand in, are there; empty if
    nothing is. `calm`: the longest pause without a fault."""
    bound = 2 * calm + STAND_IN_WITHIN
    return f"a pause of {pause:.1f} s; {bound:.1f} s may pass until others go on" if pause > bound else ""
