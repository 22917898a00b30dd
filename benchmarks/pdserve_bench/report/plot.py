"""Draws a report's charts below each other, under its answer, in one picture."""

import math
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, PercentFormatter, StrMethodFormatter

from pdserve_bench.report import BROKEN_OFF, Chart, Report, Series
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
    axes.set_title(_shown(chart.title) + _BETTER.get(chart.better, ""))
    bars = chart.kind == "bars"
    for place, series in enumerate(chart.series):
        colour = _BASELINE if series.baseline else _COLOURS[place % len(_COLOURS)]
        style: dict[str, Any] = {"color": colour, "label": _shown(series.label)}
        if bars:
            _bars(axes, chart, series, place, style)
        else:
            numeric = all(isinstance(x, int | float) for x in series.xs)
            xs = series.xs if numeric else [*map(_shown, series.xs)]
            axes.plot(xs, _numbers(series.ys), "o" if chart.kind == "dots" else "o-", markersize=3, **style)
            if series.low and len(series.low) == len(series.high) == len(series.xs):
                axes.fill_between(
                    xs, _numbers(series.low), _numbers(series.high), color=style["color"], alpha=0.15
                )
    for limits, line in (
        (chart.across, axes.axvline if bars else axes.axhline),
        (chart.upright, axes.axvline),
    ):
        for label, value in limits.items():
            if math.isfinite(value):
                line(value, color="black", linestyle="--", linewidth=1, label=_shown(label))
    _axes(axes, chart)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _bars(axes: Axes, chart: Chart, series: Series, place: int, style: Mapping[str, Any]) -> None:
    """Groups below each other, and in each a bar for each series."""
    groups, ys = _groups(chart), _numbers(series.ys)
    at = [groups.index(str(x)) * (len(chart.series) + 1) + place for x in series.xs]
    ends = [
        [max(0.0, sign * (end - y)) if math.isfinite(end) else 0.0 for y, end in zip(ys, given, strict=False)]
        for sign, given in ((-1, _numbers(series.low)), (1, _numbers(series.high)))
    ]
    whiskers: dict[str, Any] = {"xerr": ends} if all(len(end) == len(ys) for end in ends) and ys else {}
    drawn = axes.barh(at, ys, 0.9, **style, **whiskers)
    axes.bar_label(drawn, [f"{y:.3g}" if math.isfinite(y) else "n/a" for y in ys], padding=4)
    middles = [
        number * (len(chart.series) + 1) + (len(chart.series) - 1) / 2 for number in range(len(groups))
    ]
    axes.set_yticks(middles, [_shown(group) for group in groups])
    axes.set_ylim(len(groups) * (len(chart.series) + 1) - 1, -1)


def _axes(axes: Axes, chart: Chart) -> None:
    bars = chart.kind == "bars"
    axes.set_xlabel(_shown(chart.y_label if bars else chart.x_label))
    if not bars:
        axes.set_ylabel(_shown(chart.y_label))
    for axis, log, least in (
        (axes.xaxis, chart.log_x, axes.dataLim.x0),
        (axes.yaxis, chart.log_y, axes.dataLim.y0),
    ):
        if log and least > 0:
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    if chart.y_unit:
        form = PercentFormatter(1.0) if chart.y_unit == "share" else EngFormatter(chart.y_unit)
        (axes.xaxis if bars else axes.yaxis).set_major_formatter(form)


def _inches(chart: Chart) -> float:
    bars = len(_groups(chart)) * (len(chart.series) + 1)
    return max(1.2, 0.8 + _BAR * bars) if chart.kind == "bars" else _HIGH


def _groups(chart: Chart) -> list[str]:
    return list(dict.fromkeys(str(x) for series in chart.series for x in series.xs))


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
