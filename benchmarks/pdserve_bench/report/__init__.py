"""What a benchmark found, as tables, charts and sentences: for the terminal, as JSON and as one PNG.

Charts are data, so that the JSON has all that the picture shows. `terminal.py` prints a report, `charts.py` draws its
charts, `saved.py` writes and reads the JSON; `python -m pdserve_bench.report` makes the picture of JSON files again.
Texts may come from servers (a model's name, an error): each of them escapes what it must.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pdserve.errors import ConfigError
from pdserve_bench.report.origin import Origin, machine

__all__ = ["BROKEN_OFF", "Chart", "Column", "Origin", "Report", "Rows", "Series", "check_outputs", "machine"]

Cell = str | float | int | None


@dataclass(frozen=True)
class Column:
    name: str
    """with the unit, as in `TTFT p50, ms`"""
    spec: str = ""
    """Python's format of its numbers, as in `.2f`; empty: a text"""

    @property
    def numeric(self) -> bool:
        return bool(self.spec)

    def told(self, cell: Cell) -> str:
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
    """the row that is recommended, if any"""


@dataclass(frozen=True)
class Series:
    """NaN in `ys` leaves the place empty."""

    label: str
    """within a report the same label has the same colour everywhere"""
    xs: Sequence[float | str]
    ys: Sequence[float | None]
    low: Sequence[float | None] = ()
    """the lower ends of whiskers, values like `ys`; empty: no whiskers"""
    high: Sequence[float | None] = ()
    baseline: bool = False
    """what the others are compared with: drawn in grey. So are labels that begin with `plain vLLM`, `aggregated` or
    the like (`palette.py`)"""


@dataclass(frozen=True)
class Chart:
    """`lines` joins points; `bars` has one group of bars for each x (a text) and in it one bar for each series, which
    lie, so that `across` is upright in them, and begin at 0; `cdf`
    takes samples as xs (no ys) and draws the share of them up to each; `dots` leaves points apart."""

    title: str
    kind: Literal["lines", "bars", "cdf", "dots"]
    x_label: str
    y_label: str
    series: Sequence[Series]
    across: Mapping[str, float] = field(default_factory=dict)
    """label -> y of a horizontal line, as the share that an SLO asks for"""
    upright: Mapping[str, float] = field(default_factory=dict)
    """label -> x of a vertical line"""
    log_x: bool = False
    log_y: bool = False
    better: Literal["", "higher", "lower"] = ""
    """said under the title"""
    x_unit: str = ""
    """`s` for values in seconds (shown as 20 ms), `B/s` and the like, `share` for 0 to 1 (shown as %); empty: numbers
    as they are, whose unit is in the label"""
    y_unit: str = ""


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
    """the raw figures, for the JSON"""
    verdict: str = ""
    """a few words that stand before the lead, as `Do not disaggregate`"""
    origins: list[Origin] = field(default_factory=lambda: [Origin()])
    """the runs that it is made of"""

    def show(self) -> None:
        """Print the tables, the notes, and last the verdict and the lead."""
        from pdserve_bench.report import terminal

        terminal.show_report(self)

    def as_json(self) -> str:
        from pdserve_bench.report import saved

        return saved.as_json(self)

    def write(self, json_file: Path | None, plot: Path | None) -> None:
        """`plot` as it is checked by `check_outputs`. Says on stderr what it wrote."""
        if json_file is not None:
            json_file.write_text(self.as_json())
            _wrote(json_file)
        if plot is not None:
            from pdserve_bench.report import charts  # matplotlib is slow to load

            charts.write_png(self, _picture(plot))
            _wrote(_picture(plot))


BROKEN_OFF = "Broken off: this is what was there by then."
_OTHER_PICTURES = (".svg", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".htm", ".html")


def check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Before hours of work: raises ConfigError where a result could not be written, and notes how loaded the machine
    is. `plot` may leave its end, `.png`, out."""
    machine()
    if plot is not None and plot.name in ("", ".."):
        raise ConfigError([f"--plot {plot}: is a folder; give the name of a file."])
    problems = []
    for file in ([json_file] if json_file else []) + ([_picture(plot)] if plot else []):
        if not file.absolute().parent.is_dir():
            problems.append(f"{file}: there is no folder {file.parent}.")
        elif file.is_dir():
            problems.append(f"{file}: is a folder; give the name of a file.")
        elif not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            problems.append(f"{file}: must not be written by this user.")
    if plot is not None and plot.suffix in _OTHER_PICTURES:
        problems.append(f"--plot {plot}: give a name that ends with .png, or without an end.")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _picture(plot: Path) -> Path:
    """The file of `--plot`."""
    return plot if plot.suffix == ".png" else plot.with_name(f"{plot.name}.png")


def _wrote(file: Path) -> None:
    print(f"wrote {file}", file=sys.stderr)
