"""From what the clients saw to a row of the scorecard, and to the verdict: pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Result(StrEnum):
    OK = "ok"
    FAILED = "failed"
    """an error status, an error in the stream, or an end before the end"""
    HUNG = "hung"
    """no end within the client's patience"""
    WRONG = "wrong"
    """tokens other than those of the undisturbed graph"""
    APART = "apart"
    """its connection was one to the frontend that was killed"""


@dataclass(frozen=True)
class Seen:
    """One request, as its client saw it."""

    result: Result
    pause: float | None = None
    """seconds of the longest wait for a token, the first one included; None where it was not streamed"""
    error: str = ""


@dataclass(frozen=True)
class Leftovers:
    """What a graph without requests still holds."""

    blocks: Mapping[str, int]
    """KV blocks by instance, of those that hold any"""
    queued: int
    """prefill requests"""
    seconds: float
    """how long it was looked for"""


@dataclass(frozen=True)
class Row:
    """One line of the scorecard. What was skipped has a reason, and no numbers."""

    fault: str
    victim: str = ""
    requests: int = 0
    failed: int = 0
    hung: int = 0
    wrong: int = 0
    apart: int = 0
    """requests whose connection was to the killed frontend: nobody can save them"""
    p99_pause: float = 0.0
    """seconds"""
    recovered: float | None = None
    """seconds from the end of the fault until all were registered again and remote prefill happened; None:
    not within the bound"""
    leaked: int = 0
    """KV blocks that were still held when the last request had ended long ago, leases included"""
    queued: int = 0
    """prefill requests that were still in the queue then"""
    freed: float = 0.0
    """seconds from the last request's end until no block was held"""
    skipped: str = ""
    errors: tuple[str, ...] = ()
    """what failed requests said, the most frequent first"""

    @property
    def good(self) -> bool:
        dropped = self.failed or self.hung or self.wrong or self.leaked or self.queued
        return bool(self.skipped) or (not dropped and self.requests > 0 and self.recovered is not None)


def score(fault: str, victim: str, seen: Sequence[Seen], recovered: float | None, left: Leftovers) -> Row:
    counts = Counter(one.result for one in seen)
    errors = Counter(one.error for one in seen if one.error and one.result is not Result.APART)
    return Row(
        fault=fault,
        victim=victim,
        requests=len(seen),
        failed=counts[Result.FAILED],
        hung=counts[Result.HUNG],
        wrong=counts[Result.WRONG],
        apart=counts[Result.APART],
        p99_pause=percentile([one.pause for one in seen if one.pause is not None], 0.99),
        recovered=recovered,
        leaked=sum(left.blocks.values()),
        queued=left.queued,
        freed=left.seconds,
        errors=tuple(f"{count} x {text}" for text, count in errors.most_common(5)),
    )


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is not exceeded by `share` of them; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def judge(tokens: Sequence[int], expected: Sequence[int], error: str, hung: bool) -> Result:
    """What a request came to that was not on the killed frontend's connections. Tokens that are wrong count as
    wrong however it ended."""
    if list(tokens) != list(expected[: len(tokens)]):
        return Result.WRONG
    if hung:
        return Result.HUNG
    return Result.FAILED if error or len(tokens) != len(expected) else Result.OK


def longest_pause(started: float, arrivals: Sequence[float], ended: float) -> float:
    """`ended` counts where no token ever came: then all of it was waiting."""
    times = [started, *(arrivals or [ended])]
    return max(after - before for before, after in pairwise(times))


def passed(rows: Iterable[Row]) -> bool:
    return all(row.good for row in rows)
