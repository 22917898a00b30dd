"""Tables for people, as all commands show them."""

import sys
from collections.abc import Container, Iterator
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

_WIDE = 1000
"""characters: more than any table needs"""


class FittedTable(Table):
    """A table whose columns hold each word in one piece; else, in a narrow terminal, a paragraph a row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        for column in self.columns:
            cells = [Text(cell) if isinstance(cell, str) else cell for cell in column.cells]
            column.no_wrap = not any(" " in str(cell) for cell in cells)
        if console.measure(self, options=options.update(width=_WIDE)).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), "bold")
        for row in zip(*(column.cells for column in self.columns), strict=True):
            yield self._paragraph(row)
        yield Text(str(self.caption or ""))

    def _paragraph(self, row: tuple[RenderableType, ...]) -> Text:
        text = Text()
        for column, cell in zip(self.columns, row, strict=True):
            if shown := Text(cell) if isinstance(cell, str) else cell:
                text.append(f"{', ' if text else ''}{column.header} ")
                text.append_text(
                    Text(", ").join(shown.split("\n")) if isinstance(shown, Text) else Text(str(shown))
                )
        return text


def table(*columns: str, numbers: Container[str] = (), **style: Any) -> FittedTable:
    """An empty table; the columns in `numbers` are aligned to the right."""
    made = FittedTable(box=box.SIMPLE_HEAD, pad_edge=False, **style)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


def show(what: RenderableType, pipe_width: int = 110) -> None:
    """On stdout; in a pipe, wide enough for tables."""
    Console(highlight=False, width=None if sys.stdout.isatty() else pipe_width).print(what)
