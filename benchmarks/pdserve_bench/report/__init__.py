"""The result of a benchmark as tables and sentences: in the terminal (`terminal.py`) and as JSON. Texts may come from
servers (a model's name, an error): control characters are not printed.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from pdserve.errors import ConfigError
from pdserve_bench.report.origin import Origin, machine

__all__ = ["BROKEN_OFF", "Column", "Origin", "Report", "Rows", "check_outputs", "machine"]

Cell = str | float | int | None


@dataclass(frozen=True)
class Column:
    name: str
    spec: str = ""
    """Python's format of its numbers, as in `.2f`; empty: a text"""

    @property
    def numeric(self) -> bool:
        return bool(self.spec)

    def shown(self, cell: Cell) -> str:
        """Empty where it is not known (None, NaN)."""
        if cell is None or cell != cell:
            return ""
        return cell if isinstance(cell, str) else format(cell, self.spec or "g")


@dataclass(frozen=True)
class Rows:
    """A table."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    best: int | None = None


@dataclass
class Report:
    title: str
    lead: str = ""
    """the answer in a sentence or two; stands above everything else"""
    tables: list[Rows] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True
    """false: broken off; the report says so"""
    data: dict[str, Any] = field(default_factory=dict)
    verdict: str = ""
    """a few words that stand before the lead, as `Do not disaggregate`"""
    origin: Origin = field(default_factory=Origin)

    def show(self) -> None:
        """Print the tables, the notes, and last the verdict and the lead."""
        from pdserve_bench.report import terminal

        terminal.show_report(self)

    def as_json(self) -> str:
        """All fields, under their names. NaN and infinity, which JSON does not know, are null; paths are texts."""
        whole = {each.name: getattr(self, each.name) for each in fields(self)}
        return msgspec.json.format(msgspec.json.encode(whole, enc_hook=str), indent=2).decode() + "\n"

    def write(self, file: Path) -> None:
        """As JSON. Says so on stderr."""
        file.write_text(self.as_json())
        print(f"wrote {file}", file=sys.stderr)


BROKEN_OFF = "Broken off: this is what was there by then."


def check_outputs(*files: Path | None) -> None:
    """Before hours of work: raises ConfigError where a result could not be written, and notes how loaded the machine
    is."""
    machine()
    problems = []
    for file in filter(None, files):
        if not file.absolute().parent.is_dir():
            problems.append(f"{file}: there is no folder {file.parent}.")
        elif file.is_dir():
            problems.append(f"{file}: is a folder; give the name of a file.")
        elif not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            problems.append(f"{file}: must not be written by this user.")
    if problems:
        raise ConfigError(problems)
