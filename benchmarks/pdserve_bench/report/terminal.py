"""A report in the terminal, or as plain text in a pipe."""

import sys
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve_bench.report import BROKEN_OFF, Column, Report, Rows

PIPE_WIDTH = 110
"""columns of a table, where its figures fit"""
_NAME, _BETWEEN = 50, 3
"""columns that a text is folded to, and between two"""


def show_report(report: Report) -> None:
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, emoji=False, width=None if terminal else PIPE_WIDTH)
    usual = console.width
    for rows in report.tables:
        _say(console, rows.title, "bold")
        cells = [
            [printable(column.shown(cell)) for column, cell in zip(rows.columns, row, strict=True)]
            for row in rows.rows
        ]
        widths = [_width(column, [row[place] for row in cells]) for place, column in enumerate(rows.columns)]
        console.width = max(usual, sum(widths) + _BETWEEN * len(widths))
        console.print(_table(rows, cells, widths))
        console.width = usual
        console.print()
        _say(console, rows.note)
    for note in report.notes:
        _say(console, note)
    console.print()
    _say(console, "" if report.complete else BROKEN_OFF, "bold yellow")
    _say(console, report.verdict, "bold")
    _say(console, report.lead, "" if report.verdict else "bold")


def printable(text: str) -> str:
    """Replace control characters, which could write anywhere on a terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence, if any; in a pipe in one line, so that it can be searched for."""
    if text:
        console.print(Text(printable(text), style), soft_wrap=not console.is_terminal)


def _width(column: Column, cells: Sequence[str]) -> int:
    """Numbers are never folded, nor a word of a name: a table that does not fit is wider than the terminal."""
    widest = max(map(cell_len, cells), default=1)
    word = max(map(cell_len, column.name.split()), default=1)
    return max(word, widest if column.numeric else min(_NAME, widest))


def _table(rows: Rows, cells: Sequence[Sequence[str]], widths: Sequence[int]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column, width in zip(rows.columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        made.add_column(Text(printable(column.name)), justify=justify, overflow="fold", width=width)
    for number, row in enumerate(cells):
        made.add_row(*map(Text, row), style="bold" if number == rows.best else None)
    return made
