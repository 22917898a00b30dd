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


def duration(seconds: float) -> str:
    """In the unit that fits it, with two or three digits."""
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
