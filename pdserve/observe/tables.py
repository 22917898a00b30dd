"""Tables for people, as all commands show them."""

import sys
from collections.abc import Container
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table


def table(*columns: str, numbers: Container[str] = (), **style: Any) -> Table:
    """An empty table; the columns in `numbers` are aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, **style)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


def show(what: RenderableType, pipe_width: int = 110) -> None:
    """On stdout; in a pipe, wide enough for tables."""
    Console(highlight=False, width=None if sys.stdout.isatty() else pipe_width).print(what)
