"""A report in the terminal, or as plain text in a pipe."""

import re
import sys
import textwrap
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve_bench.report import BROKEN_OFF, Report, Rows

PIPE_WIDTH = 110
"""columns of text"""
_LINE = 100
"""columns of a sentence in a wide terminal"""
_NAME, _TEXT = 32, 20
"""columns that the first column, or another one of texts, may be folded to before the table is cut in two"""
_BETWEEN, _CLOSE = 3, 2
"""columns between two columns; what `rich` makes of its padding"""


def show_report(report: Report) -> None:
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, emoji=False, width=None if terminal else PIPE_WIDTH)
    for rows in report.tables:
        if rows.title:
            _say(console, rows.title, "bold")
        for part in _tables(rows, console.width):
            console.print(part)
            console.print()
        if rows.note:
            _say(console, rows.note)
            console.print()
    for note in report.notes:
        _say(console, note)
    if report.notes:
        console.print()
    if not report.complete:
        _say(console, BROKEN_OFF, "bold yellow")
    if report.verdict:
        _say(console, report.verdict, "bold")
    if report.lead:
        _say(console, report.lead, "" if report.verdict else "bold")


def printable(text: str) -> str:
    """Replace control characters, which could write anywhere on a terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence; in a pipe in one line, so that it can be searched for."""
    if console.is_terminal:
        console.print(Text(printable(text), style), width=min(console.width, _LINE))
    else:
        console.print(Text(printable(text)), soft_wrap=True)


def _tables(rows: Rows, width: int) -> list[Table]:
    """One table. Where it does not fit, the names of columns are folded, then the columns stand closer; where that is
    not enough, its columns are in several tables, each with the first column."""
    cells = [
        [printable(column.told(cell)) for column, cell in zip(rows.columns, row, strict=True)]
        for row in rows.rows
    ]
    names = [printable(column.name) for column in rows.columns]
    widest = [max((cell_len(row[place]) for row in cells), default=0) for place in range(len(names))]
    full = [max(_width(name), most) for name, most in zip(names, widest, strict=True)]
    if len(_parts(full, width, _BETWEEN)) <= 1:
        return [_table(rows, names, cells, range(len(names)), _BETWEEN)]
    names = [_folded(name, most) for name, most in zip(names, widest, strict=True)]
    least = [
        max(_width(name), most if column.numeric else min(most, _TEXT if place else _NAME))
        for place, (name, most, column) in enumerate(zip(names, widest, rows.columns, strict=True))
    ]
    between = _BETWEEN if len(_parts(least, width, _BETWEEN)) == 1 else _CLOSE
    return [_table(rows, names, cells, part, between) for part in _parts(least, width, between)]


def _parts(widths: Sequence[int], width: int, between: int) -> list[list[int]]:
    """Places of columns: as few tables as it takes."""
    parts, used = [[0]] if widths else [], sum(widths[:1])
    for place in range(1, len(widths)):
        if used + between + widths[place] > width - 2 and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0]
        parts[-1].append(place)
        used += between + widths[place]
    return parts


def _table(
    rows: Rows, names: Sequence[str], cells: Sequence[Sequence[str]], part: Sequence[int], between: int
) -> Table:
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=between == _CLOSE)
    for place in part:
        numeric = rows.columns[place].numeric
        made.add_column(
            Text(names[place]),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    for number, row in enumerate(cells):
        made.add_row(*(Text(row[place]) for place in part), style="bold" if number == rows.best else None)
    return made


def _width(name: str) -> int:
    return max(map(cell_len, name.split("\n")))


def _folded(name: str, widest: int) -> str:
    """Break the name into as many lines as it takes to be no wider than the cells, between words."""
    longest = max(map(cell_len, re.split(r"\s+", name)))
    return "\n".join(textwrap.wrap(name, max(widest, longest, 7), break_long_words=False)) or name
