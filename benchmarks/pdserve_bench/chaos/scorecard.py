"""The scorecard of `pdserve chaos`: a row for each fault, and the verdict; as table and as JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from pdserve.observe.tables import table
from pdserve_bench.chaos.judge import AttemptTrace, Judgement, Seen
from pdserve_bench.graphs.watch import Leftovers
from pdserve_bench.measure.samples import percentile

_COUNTS = ("requests", "failed", "hung", "wrong")
COLUMNS = ("fault", *_COUNTS, "p99 pause", "recovered", "freed", "leaked", "apart", "")


@dataclass(frozen=True)
class Row:
    """One row. A skipped fault has a reason and no numbers."""

    fault: str
    victim: str = ""
    requests: int = 0
    failed: int = 0
    hung: int = 0
    wrong: int = 0
    apart: int = 0
    """Requests lost with their connections to the killed frontend. Nothing can save these."""
    p99_pause: float = 0.0
    """Seconds."""
    slowest: str = ""
    recovered: float | None = None
    """Seconds from the fault's end until the graph was complete and prefilled remotely; None if too late."""
    leaked: int = 0
    """KV blocks still held at the end of the wait that follows the load."""
    queued: int = 0
    """Prefill requests still queued at the end of that wait."""
    freed: float = 0.0
    """Seconds from the last request's end until no block was held."""
    left_out: int = 0
    """First row only: prompts not used because their output depends on the batch."""
    skipped: str = ""
    errors: tuple[str, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    traces: tuple[AttemptTrace, ...] = ()
    amiss: tuple[str, ...] = ()
    """Other failures, a sentence each."""

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
    counts = Counter(request.result for request in seen)
    traces = tuple(request.trace for request in seen if request.trace)
    slowest = max(seen, key=lambda request: request.pause or 0.0, default=None)
    errors = Counter(trace.error for trace in traces if trace.error)
    return Row(
        fault=fault,
        victim=victim,
        requests=len(seen),
        failed=counts[Judgement.FAILED],
        hung=counts[Judgement.HUNG],
        wrong=counts[Judgement.WRONG],
        apart=counts[Judgement.APART],
        p99_pause=percentile([request.pause for request in seen if request.pause is not None], 0.99),
        slowest=slowest.request_id if slowest else "",
        recovered=recovered,
        leaked=sum(left.blocks.values()),
        queued=left.queued,
        freed=left.seconds,
        errors=tuple(f"{count} x {text}" for text, count in errors.most_common(5)),
        held=left.blocks,
        traces=traces,
        amiss=(*amiss, *left.amiss),
    )


def passed(rows: Sequence[Row]) -> bool:
    """Whether at least one fault was tried and all rows are good."""
    return all(row.good for row in rows) and any(row.victim for row in rows)


def as_json(rows: Sequence[Row], complete: bool) -> str:
    """One line per row. The outer `good` is false if the run was interrupted."""
    lines = (json.dumps({**asdict(row), "good": row.good}) for row in rows)
    good = json.dumps(complete and passed(rows))
    return f'{{"good": {good}, "complete": {json.dumps(complete)}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"


# output


def scorecard(rows: Sequence[Row]) -> Table:
    shown = table(*COLUMNS, numbers=COLUMNS[1:-1], collapse_padding=True)
    for row in rows:
        style = None if row.good and not row.skipped else "yellow" if row.good else "red"
        shown.add_row(*cells(row), style=style)
    return shown


def cells(row: Row) -> tuple[str, ...]:
    if row.skipped:
        return row.fault, *[""] * 9, "skipped"
    numbers = (row.requests, row.failed, row.hung, row.wrong)
    recovered = "never" if row.recovered is None else f"{row.recovered:.1f} s"
    queued = f"{row.queued} queued" if row.queued else ""
    return (
        row.fault,
        *map(str, numbers),
        f"{row.p99_pause:.2f} s",
        recovered,
        f"{row.freed:.1f} s",
        str(row.leaked),
        str(row.apart or ""),
        queued or ("" if row.good else "BAD"),
    )


def line(row: Row) -> str:
    found = zip(COLUMNS[1:], cells(row)[1:], strict=True)
    said = ", ".join(f"{name} {cell}".strip() for name, cell in found if cell not in ("", "0"))
    return f"{row.fault}: {said}" + (f" (longest: {row.slowest})" if row.slowest else "")


def verdict(rows: Sequence[Row], complete: bool) -> str:
    faults = [row for row in rows if row.victim]
    lines = [f"{row.fault} skipped: {row.skipped}" for row in rows if row.skipped]
    lines += [f"{row.fault}: {sentence}" for row in rows for sentence in row.amiss]
    bad = [row.fault for row in rows if not row.good]
    asked = f"{len(faults)} faults, {sum(row.requests for row in rows)} requests"
    if bad:
        lines.append(f"{asked}: NOT GOOD: {', '.join(bad)}.")
    else:
        lines.append(f"{asked}: nothing dropped." if faults else "No fault was tried.")
    if not complete:
        lines.append("Broken off: not all faults were tried.")
    return "\n".join(lines)
