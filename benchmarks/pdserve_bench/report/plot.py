"""Draws a report's charts below each other, under its answer, in one picture."""

import math
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter, StrMethodFormatter

from pdserve_bench.report import BROKEN_OFF, Chart, Report
from pdserve_bench.report.terminal import printable

_WIDTH, _HIGH, _BAR = 10.0, 3.2, 0.22
"""inches: of the picture, of a chart, of a bar"""
_LETTERS = 110
_LABEL = 60
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8558f", "#c98500", "#2b9bd6")
"""can be told apart with any kind of colour blindness (after Okabe and Ito)"""
_BASELINE = "#7a828c"
_LOOK: dict[Any, Any] = {
    "font.size": 9,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
}
_BETTER = {"higher": " (higher is better)", "lower": " (lower is better)"}


def write_png(report: Report, file: Path) -> None:
    texts = [report.verdict, report.lead, "" if report.complete else BROKEN_OFF]
    head = [_folded(report.title), *(_folded(text) for text in texts if text)]
    highs = [_inches(chart) for chart in report.charts]
    above = 0.17 * (1 + "\n".join(head).count("\n")) + 0.2
    with matplotlib.rc_context(_LOOK), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter that the font does not have becomes a box
        figure = Figure((_WIDTH, above + sum(highs) + 0.5), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle("\n".join(head), x=0.01, ha="left", fontsize=10)
        figure.supxlabel(
            _folded(f"{report.origin.short}\n$ {report.origin.command}"), x=0.01, ha="left", fontsize=7
        )
        if report.charts:
            rows = figure.subplots(len(highs), squeeze=False, gridspec_kw={"height_ratios": highs})
            for (axes,), chart in zip(rows, report.charts, strict=True):
                draw(axes, chart)
        figure.savefig(file)


def draw(axes: Axes, chart: Chart) -> None:
    bars = chart.kind == "bars"
    axes.set_title(_shown(chart.title) + _BETTER.get(chart.better, ""))
    axes.set_xlabel(_shown(chart.x_label))
    axes.set_ylabel(_shown(chart.y_label))
    for place, series in enumerate(chart.series):
        colour = _BASELINE if series.baseline else _COLOURS[place % len(_COLOURS)]
        style: dict[str, Any] = {"color": colour, "label": _shown(series.label)}
        ys, low, high = map(_numbers, (series.ys, series.low, series.high))
        if bars:
            pairs = zip(ys, low, high, strict=False)
            ends = [*zip(*((max(0.0, y - a), max(0.0, b - y)) for y, a, b in pairs), strict=True)]
            drawn = axes.barh([*map(_shown, series.xs)], ys, xerr=ends or None, **style)
            axes.bar_label(drawn, [f"{y:.3g}" for y in ys], padding=4)
        else:
            axes.plot(series.xs, ys, "o-", markersize=3, **style)
            if low:
                axes.fill_between(series.xs, low, high, color=colour, alpha=0.15)
    for lines, line in ((chart.across, axes.axhline), (chart.upright, axes.axvline)):
        for label, value in lines.items():
            line(value, color="black", linestyle="--", linewidth=1, label=_shown(label))
    if bars:
        axes.invert_yaxis()
    log = chart.log and min(axes.dataLim.x0, axes.dataLim.y0) > 0 and math.isfinite(axes.dataLim.y0)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)) if log else ():
        scale("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    if chart.shares:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _inches(chart: Chart) -> float:
    bars = sum(len(series.xs) for series in chart.series)
    return max(1.2, 0.8 + _BAR * bars) if chart.kind == "bars" else _HIGH


def _numbers(values: Iterable[object]) -> list[float]:
    """NaN for what is none."""
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]


def _shown(text: object) -> str:
    """A text from anywhere, which may be long; one that begins with `_` would be left out of a legend."""
    found = " ".join(printable(str(text)).split())
    found = found if len(found) <= _LABEL else f"{found[: _LABEL - 1]}…"
    return f"\N{ZERO WIDTH SPACE}{found}" if found.startswith("_") else found


def _folded(text: str) -> str:
    return "\n".join(textwrap.fill(printable(line), _LETTERS) for line in text.split("\n"))
