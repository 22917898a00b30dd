"""Terminal tables of the commands."""

import sys
from collections.abc import Container, Iterator
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text


class FittedTable(Table):
    """A table that breaks no words; in a terminal too narrow for that, a paragraph for each row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        for column in self.columns:
            column.no_wrap = not any(" " in str(cell) for cell in column.cells)
        if console.measure(self, options=options.update(width=1000)).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), "bold")
        for row in zip(*(column.cells for column in self.columns), strict=True):
            yield self._paragraph(row)
        yield Text(str(self.caption or ""))

    def _paragraph(self, row: tuple[RenderableType, ...]) -> Text:
        cells = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in row]
        named = [(column.header, cell) for column, cell in zip(self.columns, cells, strict=True) if cell]
        words = [Text.assemble(f"{name} ", Text(", ").join(cell.split("\n"))) for name, cell in named]
        return Text(", ").join(words)


def table(*columns: str, numbers: Container[str] = (), **style: Any) -> FittedTable:
    """An empty table; the columns in `numbers` are aligned to the right."""
    made = FittedTable(box=box.SIMPLE_HEAD, pad_edge=False, **style)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


def show(what: RenderableType, pipe_width: int = 110) -> None:
    """Print on stdout; in a pipe, `pipe_width` columns wide."""
    Console(highlight=False, width=None if sys.stdout.isatty() else pipe_width).print(what)
