"""Draws a report's charts: one picture with a panel for each, or each for itself in a page."""

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pdserve_bench.report import BROKEN_OFF, Chart, Report, palette
from pdserve_bench.report.axes import Marks
from pdserve_bench.report.lettering import FONTS, SMALL, folded, label, width
from pdserve_bench.report.points import bars_stand, beside, categories, has_data

_DPI = 150
_WIDTH = 1600 / _DPI
"""inches of the picture: reads well in a README"""
_MARGIN, _GUTTER = 0.3, 0.45
_PAGE_WIDTH = 5.2
"""inches of a chart in a page; its letters are as large as the page's on a screen of 500 pixels"""
_TALL, _LINE = 3.0, 1.45
"""inches of an empty chart's marks; height of a line of text in heights of its letters"""
_TITLE, _SUBTITLE = 11.5, 9.0
_ARROWS = {"higher": "↑ higher is better", "lower": "↓ lower is better"}

_LOOK: dict[Any, Any] = {
    "font.family": list(FONTS),
    "text.parse_math": False,
    "text.color": palette.INK,
    "svg.fonttype": "none",
    "axes.prop_cycle": cycler(color=[palette.INK]),
}


def write_png(report: Report, file: Path) -> None:
    with _drawing(report.title):
        _picture(report).savefig(file, dpi=_DPI, metadata={"Title": label(report.title)})


def svg(chart: Chart, colours: Mapping[str, str]) -> str:
    """To be put into a page that has the variables of `palette.css` and says the title itself. `colours` are those of
    all charts of the page."""
    with _drawing(chart.title):
        wide = _PAGE_WIDTH - 0.1
        height = _height(chart, colours, wide, headed=False)
        figure = _sheet(_PAGE_WIDTH, height + 0.1)
        _Panel(figure, 0.05, height + 0.05, wide, height).draw(chart, colours, headed=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _themed(file.getvalue(), chart.title)


def subtitle(chart: Chart) -> str:
    """What the values are, and which are better."""
    values = label(chart.y_label) or ("share of the samples" if chart.kind == "cdf" else "")
    return "  ·  ".join(filter(None, (values, _ARROWS.get(chart.better, ""))))


@contextmanager
def _drawing(salt: str) -> Iterator[None]:
    with matplotlib.rc_context({**_LOOK, "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter that the font does not have becomes a box
        yield


def _sheet(wide: float, high: float) -> Figure:
    figure = Figure(figsize=(wide, high), dpi=_DPI)
    FigureCanvasAgg(figure)
    return figure


def _picture(report: Report) -> Figure:
    inner = _WIDTH - 2 * _MARGIN
    colours = palette.of_labels(report.charts)
    head = [
        (folded(label(report.title, 200), inner, 17, bold=True), 17.0, True, palette.INK),
        (folded(label(report.verdict, 300), inner, 13, bold=True), 13.0, True, "#0072b2"),
        (folded(label(report.lead, 1000), inner, 11.5), 11.5, False, palette.INK),
        ("" if report.complete else BROKEN_OFF, 11.5, True, "#d55e00"),
    ]
    sources = "\n".join(f"{origin.short}\n$ {origin.command}" for origin in report.origins)
    foot = "\n".join(folded(label(line, 400), inner, 8) for line in sources.split("\n"))
    head = [each for each in head if each[0]]
    above = sum(_high(text, size) + 0.08 for text, size, _, _ in head) + 0.2
    below = _high(foot, 8) + 0.15
    rows = _grid(report.charts, colours, inner)
    charts = sum(height + 0.3 for _, height in rows)
    figure = _sheet(_WIDTH, 2 * _MARGIN + above + charts + below)
    figure.patch.set_facecolor(palette.PAPER)
    top = figure.get_figheight() - _MARGIN
    for text, size, bold, colour in head:
        _write(figure, _MARGIN, top, text, size, colour, bold)
        top -= _high(text, size) + 0.08
    top -= 0.2
    for row, height in rows:
        wide = (inner - _GUTTER * (len(row) - 1)) / len(row)
        for place, chart in enumerate(row):
            _Panel(figure, _MARGIN + place * (wide + _GUTTER), top, wide, height).draw(chart, colours)
        top -= height + 0.3
    _write(figure, _MARGIN, _MARGIN + _high(foot, 8), foot, 8, palette.MUTED)
    return figure


def _grid(
    charts: Sequence[Chart], colours: Mapping[str, str], wide: float
) -> list[tuple[Sequence[Chart], float]]:
    """Rows of two, and their heights in inches; of an odd number the first has a row of its own."""
    first = len(charts) % 2
    rows = [charts[:first]] if first else []
    rows += [charts[place : place + 2] for place in range(first, len(charts), 2)]
    return [
        (row, max(_height(chart, colours, (wide - _GUTTER * (len(row) - 1)) / len(row)) for chart in row))
        for row in rows
    ]


def _high(text: str, size: float) -> float:
    """Inches."""
    return (text.count("\n") + 1) * size * _LINE / 72 if text else 0.0


def _write(
    figure: Figure, left: float, top: float, text: str, size: float, colour: str, bold: bool = False
) -> None:
    figure.text(
        left / figure.get_figwidth(),
        top / figure.get_figheight(),
        text,
        va="top",
        fontsize=size,
        color=colour,
        weight="bold" if bold else "normal",
        linespacing=_LINE / 1.2,
    )


def _heading(chart: Chart, wide: float) -> tuple[str, str]:
    return folded(label(chart.title, 200), wide, _TITLE, bold=True), folded(subtitle(chart), wide, _SUBTITLE)


def _height(chart: Chart, colours: Mapping[str, str], wide: float, headed: bool = True) -> float:
    """Inches that it needs."""
    title, under = _heading(chart, wide) if headed else ("", "")
    marks = _TALL
    if not has_data(chart):
        marks = 1.0
    elif chart.kind == "bars" and not bars_stand(chart, wide - 0.6):
        names = [beside(group, wide - 0.6) for group in categories(chart)]
        marks = 0.5 + sum(max(0.21 * len(chart.series) + 0.16, _high(name, SMALL) + 0.12) for name in names)
    rows = _legend_rows(list(Marks(chart, colours, Figure().add_subplot(), (wide, 1)).handles()), wide)
    return _high(title, _TITLE) + _high(under, _SUBTITLE) + 0.2 * rows + 0.25 + marks


def _legend_columns(labels: Sequence[str], wide: float) -> int:
    """As many as fit side by side, in rows of equal length; matplotlib fills the columns one after the other."""
    for count in range(len(labels), 1, -1):
        rows = math.ceil(len(labels) / count)
        columns = [labels[place : place + rows] for place in range(0, len(labels), rows)]
        if sum(max(width(text, SMALL) for text in column) + 0.5 for column in columns) - 0.15 <= wide:
            return len(columns)
    return 1


def _legend_rows(labels: Sequence[str], wide: float) -> int:
    return math.ceil(len(labels) / _legend_columns(labels, wide)) if labels else 0


@dataclass
class _Panel:
    """A rectangle of the figure, in inches."""

    figure: Figure
    left: float
    top: float
    wide: float
    high: float

    def draw(self, chart: Chart, colours: Mapping[str, str], headed: bool = True) -> None:
        top = self.top
        if headed:
            title, under = _heading(chart, self.wide)
            _write(self.figure, self.left, top, title, _TITLE, palette.INK, bold=True)
            top -= _high(title, _TITLE)
            _write(self.figure, self.left, top, under, _SUBTITLE, palette.MUTED)
            top -= _high(under, _SUBTITLE)
        axes = self.figure.add_axes((0.1, 0.1, 0.1, 0.1))
        marks = Marks(chart, colours, axes, (self.wide - 0.6, top))
        top -= self._legend(marks, top)
        bottom = self.top - self.high
        marks.draw()
        left, right, low, high = 0.5, 0.0, 0.5, 0.1
        for _ in range(3):  # ticks change with the room that they have
            box = (self.left + left, bottom + low, self.wide - left - right, top - bottom - low - high)
            axes.set_position(self._shares(*box))
            canvas = self.figure.canvas
            assert isinstance(canvas, FigureCanvasAgg)
            around = axes.get_tightbbox(canvas.get_renderer())  # type: ignore[no-untyped-call]
            assert around is not None
            dpi = self.figure.dpi
            left += self.left - around.x0 / dpi
            right += around.x1 / dpi - self.left - self.wide
            low += bottom - around.y0 / dpi
            high += around.y1 / dpi - top
            left, right, low, high = (max(0.0, margin) for margin in (left, right, low, high))

    def _legend(self, marks: Marks, top: float) -> float:
        """Returns its height."""
        handles = marks.handles()
        if not handles:
            return 0.08
        x, y, _, _ = self._shares(self.left, top - 0.02, 0, 0)
        self.figure.legend(
            list(handles.values()),
            [f"\N{ZERO WIDTH SPACE}{text}" if text.startswith("_") else text for text in handles],
            loc="upper left",
            bbox_to_anchor=(x, y),
            ncols=_legend_columns(list(handles), self.wide),
            frameon=False,
            fontsize=SMALL,
            borderpad=0,
            borderaxespad=0,
            handlelength=1.6,
            handletextpad=0.5,
            columnspacing=1.4,
            labelspacing=0.45,
        )
        return 0.2 * _legend_rows(list(handles), self.wide) + 0.1

    def _shares(
        self, left: float, bottom: float, wide: float, high: float
    ) -> tuple[float, float, float, float]:
        """Of the figure."""
        width_, height = self.figure.get_figwidth(), self.figure.get_figheight()
        return left / width_, bottom / height, max(0.1, wide) / width_, max(0.1, high) / height


_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", _XLINK)


def _themed(text: str, title: str) -> str:
    """The colours become the page's variables, so that the chart follows its theme. Names that nothing refers to are
    left out: they would be there once for each chart."""
    root = ElementTree.fromstring(text)
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", title)
    referred = set(re.findall(r"(?:url\(#|href=\")#?([\w-]+)", text))
    for parent in root.iter():
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}metadata":
                parent.remove(child)
    for element in root.iter():
        if element.get("id") not in referred:
            element.attrib.pop("id", None)
        if style := element.get("style"):
            element.set(
                "style", re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var({palette.variable(found[0])})", style)
            )
    return ElementTree.tostring(root, encoding="unicode")
