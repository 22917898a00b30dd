"""Judge a response against the expected tokens, and keep what is needed to trace a bad one."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdserve_bench.chaos.questions import Attempt

STAND_IN_WITHIN = 3.0
"""Seconds until other workers replace killed decode workers. Twice the longest pause without a fault is added."""


class Judgement(StrEnum):
    OK = "ok"
    FAILED = "failed"
    """An error status, an error in the stream, or an early end."""
    HUNG = "hung"
    WRONG = "wrong"
    APART = "apart"
    """Lost with its connection to the killed frontend."""


@dataclass(frozen=True)
class AttemptTrace:
    """Times are seconds since the fault began (without a fault, since the warm-up's end)."""

    fault: str
    result: Judgement
    request_id: str
    started: float
    ended: float
    differed: float | None
    """When the first wrong token arrived; None without one, or if not streamed."""
    first_difference: int | None
    """Index of the first wrong token; the number of tokens if they are right but too few."""
    stream: bool
    prefill: str
    instance: str
    """`prefill` and `instance` are response headers; empty without a response."""
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
    result: Judgement
    pause: float | None = None
    """Seconds of the longest wait for a token, including the first; None if not streamed."""
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
    if list(tokens) != list(expected[: len(tokens)]):
        return Judgement.WRONG
    if hung:
        return Judgement.HUNG
    return Judgement.FAILED if error or len(tokens) != len(expected) else Judgement.OK


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the first index at which the two differ, at most the length of the shorter one; None if they are equal."""
    for index, (token, right) in enumerate(zip(got, expected, strict=False)):
        if token != right:
            return index
    return None if len(got) == len(expected) else min(len(got), len(expected))


def too_long(pause: float, calm: float) -> str:
    """Return a sentence if other workers took over too late, else an empty text. `calm` is the longest pause without a
    fault."""
    bound = 2 * calm + STAND_IN_WITHIN
    return (
        f"a pause of {pause:.1f} s; other workers must take over within {bound:.1f} s"
        if pause > bound
        else ""
    )
