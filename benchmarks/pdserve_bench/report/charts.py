"""Draws a report's charts: one figure with a panel for each."""

import io
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pdserve_bench.report import Chart, Report

_PANEL = (6.4, 4.0)
"""inches"""


def write_png(report: Report, file: Path) -> None:
    _drawn(report.charts, report.title).savefig(file, dpi=150)


def svg(chart: Chart) -> str:
    """To be put into a page."""
    file = io.StringIO()
    _drawn([chart], "").savefig(file, format="svg")
    text = file.getvalue()
    return text[text.index("<svg") :]


def _drawn(charts: list[Chart], title: str) -> Figure:
    columns = min(2, len(charts)) or 1
    rows = max(1, math.ceil(len(charts) / columns))
    figure = Figure(figsize=(columns * _PANEL[0], rows * _PANEL[1]), layout="constrained")
    if title:
        figure.suptitle(title)
    for number, chart in enumerate(charts, 1):
        _draw(chart, figure.add_subplot(rows, columns, number))
    return figure


def _draw(chart: Chart, axes: Any) -> None:
    for number, series in enumerate(chart.series):
        if chart.kind == "lines":
            axes.plot(series.xs, series.ys, marker="o", label=series.label)
        elif chart.kind == "dots":
            axes.scatter(series.xs, series.ys, label=series.label, s=12)
        elif chart.kind == "cdf":
            xs = sorted(map(float, series.xs))
            axes.step(
                xs, [(place + 1) / len(xs) for place in range(len(xs))], where="post", label=series.label
            )
        else:
            width = 0.8 / len(chart.series)
            places = [place - 0.4 + width * (number + 0.5) for place in range(len(series.xs))]
            axes.bar(places, series.ys, width, label=series.label)
            axes.set_xticks(range(len(series.xs)), [str(x) for x in series.xs])
    for label, y in chart.across.items():
        axes.axhline(y, linestyle="--", label=label)
    for label, x in chart.upright.items():
        axes.axvline(x, linestyle="--", label=label)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    axes.legend()
