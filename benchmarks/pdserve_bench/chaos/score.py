"""From what came of the requests to a row of the scorecard, and to the verdict: pure."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pdserve_bench.chaos.verdict import Result, Seen, Trace


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
    slowest: str = ""
    """id of the request with the longest pause"""
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
    held: Mapping[str, int] = field(default_factory=dict)
    """the leaked blocks by instance"""
    traces: tuple[Trace, ...] = ()
    """of every request that failed, hung or was answered wrongly"""
    amiss: tuple[str, ...] = ()
    """what went wrong besides, a sentence each"""

    @property
    def good(self) -> bool:
        dropped = self.failed or self.hung or self.wrong or self.leaked or self.queued or self.amiss
        return bool(self.skipped) or (not dropped and self.requests > 0 and self.recovered is not None)


def score(
    fault: str,
    victim: str,
    seen: Sequence[Seen],
    recovered: float | None,
    left: Leftovers,
    amiss: Sequence[str] = (),
) -> Row:
    counts = Counter(one.result for one in seen)
    traces = tuple(one.trace for one in seen if one.trace)
    slowest = max(seen, key=lambda one: one.pause or 0.0, default=None)
    errors = Counter(one.error for one in traces if one.error)
    return Row(
        fault=fault,
        victim=victim,
        requests=len(seen),
        failed=counts[Result.FAILED],
        hung=counts[Result.HUNG],
        wrong=counts[Result.WRONG],
        apart=counts[Result.APART],
        p99_pause=percentile([one.pause for one in seen if one.pause is not None], 0.99),
        slowest=slowest.request_id if slowest else "",
        recovered=recovered,
        leaked=sum(left.blocks.values()),
        queued=left.queued,
        freed=left.seconds,
        errors=tuple(f"{count} x {text}" for text, count in errors.most_common(5)),
        held=left.blocks,
        traces=traces,
        amiss=tuple(amiss),
    )


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is not exceeded by `share` of them; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def passed(rows: Sequence[Row]) -> bool:
    """Nothing was dropped, and something was tried."""
    return all(row.good for row in rows) and any(row.victim for row in rows)


def as_json(rows: Sequence[Row], complete: bool) -> str:
    """A row per line. Rows that are good are not enough where the run was broken off."""
    lines = (json.dumps({**asdict(row), "good": row.good}) for row in rows)
    good = json.dumps(complete and passed(rows))
    return f'{{"good": {good}, "complete": {json.dumps(complete)}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"
