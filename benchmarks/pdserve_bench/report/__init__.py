"""The result of a benchmark as tables, charts and sentences: in the terminal, as JSON and as one PNG.

Charts are data, so that the JSON has all that the picture shows. `terminal.py` prints a report, `plot.py` draws its
charts. Texts may come from servers (a model's name, an error): each of them escapes what it must.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from pdserve.errors import ConfigError
from pdserve_bench.report.origin import Origin, machine

__all__ = ["BROKEN_OFF", "Chart", "Column", "Origin", "Report", "Rows", "Series", "check_outputs", "machine"]

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


@dataclass(frozen=True)
class Series:
    """NaN in `ys` leaves the place empty."""

    label: str
    xs: Sequence[float | str]
    ys: Sequence[float | None]
    low: Sequence[float | None] = ()
    """the lower ends of whiskers, values like `ys`; empty: no whiskers"""
    high: Sequence[float | None] = ()
    baseline: bool = False
    """what the others are compared with: drawn in grey"""


@dataclass(frozen=True)
class Chart:
    """`bars` has a horizontal bar for each x, which is a text."""

    title: str
    kind: Literal["lines", "bars"]
    x_label: str
    y_label: str
    series: Sequence[Series]
    across: Mapping[str, float] = field(default_factory=dict)
    """label -> y of a horizontal line, as the share that an SLO asks for"""
    upright: Mapping[str, float] = field(default_factory=dict)
    log: bool = False
    """both axes"""
    better: Literal["", "higher", "lower"] = ""
    shares: bool = False
    """`ys` from 0 to 1, which are shown in %"""


@dataclass
class Report:
    title: str
    lead: str = ""
    """the answer in a sentence or two; stands above everything else"""
    tables: list[Rows] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
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

    def write(self, json_file: Path | None, plot: Path | None) -> None:
        """`plot` as it is checked by `check_outputs`. Says on stderr what it wrote."""
        if json_file is not None:
            json_file.write_text(self.as_json())
            _wrote(json_file)
        if plot is not None:
            from pdserve_bench.report.plot import write_png  # matplotlib is slow to load

            write_png(self, _picture(plot))
            _wrote(_picture(plot))


BROKEN_OFF = "Broken off: this is what was there by then."


def check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Before hours of work: raises ConfigError where a result could not be written, and notes how loaded the machine
    is. `plot` may leave its end, `.png`, out."""
    machine()
    problems = []
    for file in filter(None, (json_file, plot and _picture(plot))):
        if not file.absolute().parent.is_dir():
            problems.append(f"{file}: there is no folder {file.parent}.")
        elif file.is_dir():
            problems.append(f"{file}: is a folder; give the name of a file.")
        elif not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            problems.append(f"{file}: must not be written by this user.")
    if plot is not None and (plot.is_dir() or plot.suffix in (".svg", ".pdf", ".jpg", ".html")):
        problems.append(f"--plot {plot}: give a name that ends with .png, or without an end.")
    if problems:
        raise ConfigError(problems)


def _picture(plot: Path) -> Path:
    """The file of `--plot`."""
    return plot if plot.suffix == ".png" else Path(f"{plot}.png")


def _wrote(file: Path) -> None:
    print(f"wrote {file}", file=sys.stderr)
