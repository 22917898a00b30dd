"""How the scorecard of `pdserve chaos` looks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve_bench.chaos.score import Row

COLUMNS = (
    "fault",
    "requests",
    "failed",
    "hung",
    "wrong",
    "p99 pause",
    "recovered",
    "freed",
    "leaked",
    "apart",
    "",
)


def scorecard(rows: "list[Row]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True, justify="left" if column in ("fault", "") else "right")
    for row in rows:
        table.add_row(
            *cells(row), style=None if row.good and not row.skipped else "yellow" if row.good else "red"
        )
    return table


def cells(row: "Row") -> tuple[str, ...]:
    if row.skipped:
        return row.fault, *[""] * 9, "skipped"
    numbers = (row.requests, row.failed, row.hung, row.wrong)
    recovered = "never" if row.recovered is None else f"{row.recovered:.1f} s"
    ghosts = f"{row.queued} queued" if row.queued else ""
    return (
        row.fault,
        *map(str, numbers),
        f"{row.p99_pause:.2f} s",
        recovered,
        f"{row.freed:.1f} s",
        str(row.leaked),
        str(row.apart or ""),
        ghosts or ("" if row.good else "BAD"),
    )


def line(row: "Row") -> str:
    """The row in words, what is zero left out."""
    if row.skipped:
        return f"{row.fault}: skipped"
    bad = {"failed": row.failed, "hung": row.hung, "wrong": row.wrong}
    bad |= {"blocks leaked": row.leaked, "still queued": row.queued, "apart": row.apart}
    told = [f"{row.requests} requests", *(f"{count} {name}" for name, count in bad.items() if count)]
    told += [f"p99 pause {row.p99_pause:.2f} s (longest: {row.slowest})", f"KV free after {row.freed:.1f} s"]
    return f"{row.fault}: {'ok' if row.good else 'NOT GOOD'}: {', '.join(told)}"


def verdict(rows: "list[Row]", complete: bool) -> str:
    """A line or some in words; what was skipped, with the reason."""
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
