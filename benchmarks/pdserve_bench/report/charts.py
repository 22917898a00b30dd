"""Draws a report's charts, under its answer, in one picture."""

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from pdserve_bench.report import BROKEN_OFF, Chart, Report, Series, palette
from pdserve_bench.report.lettering import folded, label, number, width

_DPI = 150
_WIDTH, _MARGIN, _GUTTER = 1600 / _DPI, 0.3, 0.45
"""inches of the picture, which reads well in a README"""
_TALL, _BAR, _LINE = 3.0, 0.21, 0.19
"""inches of a chart without its legend, of a bar, of a line of small text"""
_SMALL = 9.0
"""points of ticks, values, legends"""
_MARKERS = "osD^vPX*"
_DASHES: tuple[Any, ...] = ((0, (4, 3)), (0, (1, 2)), (0, (6, 2, 1, 2)))
_WHISKERS: dict[str, Any] = {"elinewidth": 1.2, "capthick": 1.2}
_CDF_POINTS = 250
_ARROWS = {"higher": "↑ higher is better", "lower": "↓ lower is better"}
_LOOK: dict[Any, Any] = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": _SMALL,
    "text.parse_math": False,
    "text.color": palette.INK,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=[palette.INK]),
    "axes.labelcolor": palette.MUTED,
    "axes.edgecolor": palette.MUTED,
    "axes.facecolor": "none",
    "figure.facecolor": palette.PAPER,
    "xtick.labelcolor": palette.MUTED,
    "ytick.labelcolor": palette.MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": palette.GRID,
    "errorbar.capsize": 3,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "lines.markeredgewidth": 0,
}


def subtitle(chart: Chart) -> str:
    """What the values are, and which are better."""
    values = label(chart.y_label) or ("share of the samples" if chart.kind == "cdf" else "")
    return "  ·  ".join(filter(None, (values, _ARROWS.get(chart.better, ""))))


def write_png(report: Report, file: Path) -> None:
    inner = _WIDTH - 2 * _MARGIN
    colours, charts = palette.of_labels(report.charts), report.charts
    origins = "\n".join(f"{origin.short}\n$ {origin.command}" for origin in report.origins)
    sheet = _Sheet()
    top = sheet.write(report.title, _MARGIN, _MARGIN, inner, 17, bold=True)
    top = sheet.write(report.verdict, _MARGIN, top, inner, 13, palette.VERDICT, bold=True)
    top = sheet.write(report.lead, _MARGIN, top, inner, 11.5)
    top = sheet.write(
        "" if report.complete else BROKEN_OFF, _MARGIN, top, inner, 11.5, palette.WARNING, bold=True
    )
    with drawing():
        first = len(charts) % 2  # has a row of its own
        for row in [charts[:first], *(charts[place : place + 2] for place in range(first, len(charts), 2))]:
            wide = (inner - _GUTTER * (len(row) - 1)) / max(1, len(row))
            ends = [top]
            for place, chart in enumerate(row):
                left = _MARGIN + place * (wide + _GUTTER)
                end = sheet.write(chart.title, left, top + 0.25, wide, 11.5, bold=True) - 0.05
                end = sheet.write(subtitle(chart), left, end, wide, _SMALL, palette.MUTED)
                ends.append(sheet.paste(panel(chart, colours, wide), left, end))
            top = max(ends)
        bottom = sheet.write(origins, _MARGIN, top + 0.25, inner, 8, palette.MUTED) + _MARGIN
        sheet.save(file, bottom, label(report.title))


class _Sheet:
    """Texts and pictures at their places, in inches from the left and the top; how high it is is known at the end."""

    def __init__(self) -> None:
        self._texts: list[tuple[float, float, str, dict[str, Any]]] = []
        self._pictures: list[tuple[float, float, Any]] = []

    def write(
        self,
        text: str,
        left: float,
        top: float,
        wide: float,
        size: float,
        colour: str = palette.INK,
        bold: bool = False,
    ) -> float:
        """Returns where it ends."""
        if not text:
            return top
        lines = "\n".join(
            folded(label(line, 1000), wide, size * (1.13 if bold else 1)) for line in text.split("\n")
        )
        style = {
            "fontsize": size,
            "color": colour,
            "weight": "bold" if bold else "normal",
            "linespacing": 1.2,
        }
        self._texts.append((left, top, lines, style))
        return top + (lines.count("\n") + 1) * size * 1.45 / 72 + 0.08

    def paste(self, panel: Figure, left: float, top: float) -> float:
        """Returns where it ends."""
        canvas = FigureCanvasAgg(panel)
        canvas.draw()  # type: ignore[no-untyped-call]
        self._pictures.append((left, top, np.asarray(canvas.buffer_rgba())))  # type: ignore[no-untyped-call]
        return top + panel.get_figheight()

    def save(self, file: Path, high: float, title: str) -> None:
        figure = Figure(figsize=(_WIDTH, high), dpi=_DPI)
        FigureCanvasAgg(figure)
        for left, top, text, style in self._texts:
            figure.text(left / _WIDTH, 1 - top / high, text, va="top", **style)
        for left, top, pixels in self._pictures:
            figure.figimage(pixels, int(left * _DPI), int((high - top) * _DPI) - len(pixels))
        figure.savefig(file, dpi=_DPI, metadata={"Title": title})


@contextmanager
def drawing() -> Iterator[None]:
    with matplotlib.rc_context(_LOOK), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter that the font does not have becomes a box
        yield


# ----- one chart


def panel(chart: Chart, colours: Mapping[str, str], wide: float) -> Figure:
    """Draw a chart so many inches wide, without title, and as high as it needs."""
    figure = Figure(dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes, bars = figure.add_subplot(), chart.kind == "bars"
    handles = _handles(chart, colours)
    if any(_has_data(chart, series) for series in chart.series):
        axes.spines[["top", "right", "bottom" if bars else "left"]].set_visible(False)
        axes.grid(axis="x" if bars else "y")
        high = _bars(chart, colours, axes, wide) if bars else _points(chart, colours, axes, wide)
        handles |= _limits(chart, colours, axes)
        if bars:
            _scale(axes.xaxis, False, chart.y_unit)
        else:
            if _numeric(chart):
                _scale(axes.xaxis, chart.log_x, chart.x_unit, from_0=chart.kind == "cdf")
            _scale(axes.yaxis, chart.log_y, "share" if chart.kind == "cdf" else chart.y_unit)
    else:
        high = 1.0
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", color=palette.MUTED)
    if handles:
        columns = _columns(list(handles), wide)
        figure.legend(
            list(handles.values()),
            [f"\N{ZERO WIDTH SPACE}{text}" if text.startswith("_") else text for text in handles],
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            borderaxespad=0.4,  # letters of other fonts may be higher
            borderpad=0,
            handlelength=1.6,
            columnspacing=1.4,
        )
        high += _LINE * math.ceil(len(handles) / columns) + 0.1
    figure.set_size_inches(wide, high)
    return figure


def _points(chart: Chart, colours: Mapping[str, str], axes: Axes, wide: float) -> float:
    """Lines, dots and curves of shares. Returns inches."""
    for place, series in enumerate(chart.series):
        style: dict[str, Any] = {"color": colours[series.label]}
        if chart.kind == "cdf":
            ordered = sorted(x for x in _numbers(series.xs, chart.log_x) if math.isfinite(x))
            if not ordered:
                continue
            count = len(ordered)
            chosen = sorted({*range(0, count, max(1, count // _CDF_POINTS)), count - 1})
            xs = [ordered[0], *(ordered[each] for each in chosen)]
            axes.plot(xs, [0.0, *((each + 1) / count for each in chosen)], drawstyle="steps-post", **style)
            continue
        places = (
            _numbers(series.xs, chart.log_x) if _numeric(chart) else [label(str(x), 40) for x in series.xs]
        )
        ys = _numbers(series.ys, chart.log_y)
        marker = _marker(chart, place, series)
        if chart.kind == "dots":
            axes.scatter(places, ys, 14, marker=marker, alpha=0.65, linewidths=0, **style)
        else:
            axes.plot(places, ys, marker=marker, **style)
            down, up = _whiskers(series, ys)
            if any(down) or any(up):
                axes.errorbar(
                    places, ys, yerr=[down, up], fmt="none", ecolor=colours[series.label], **_WHISKERS
                )
    axes.set_xlabel(folded(label(chart.x_label), wide, _SMALL), loc="right")
    return _TALL


def _bars(chart: Chart, colours: Mapping[str, str], axes: Axes, wide: float) -> float:
    """One below the other, with their numbers, so that names and numbers of any length have room. A series that a
    group does not have takes no place in it. Returns inches."""
    groups = list(dict.fromkeys(str(x) for series in chart.series for x in series.xs))
    by_x = palette.has_systems(chart, colours)
    at, middles = 0.0, []
    for group in groups:
        start = at
        for series in chart.series:
            ys = _numbers(series.ys)
            for x, y, down, up in zip(map(str, series.xs), ys, *_whiskers(series, ys), strict=False):
                if x != group or not math.isfinite(y):
                    continue
                ends: dict[str, Any] = {"xerr": [[down], [up]], "error_kw": _WHISKERS} if down or up else {}
                axes.barh(at, y, 0.88, color=colours[x if by_x else series.label], ecolor=palette.INK, **ends)
                _value(axes, number(y, chart.y_unit), y + up, at)
                at += 1
        if at == start:
            _value(axes, "n/a", 0.0, at)
        name = folded(label(group), 0.36 * wide, _SMALL)
        least = max(1.0, (name.count("\n") + 1) * _LINE / _BAR)
        middles.append((name, start + (max(at - start, 1) - 1) / 2))
        at = max(at, start + least) + 0.8
    axes.set_yticks([middle for _, middle in middles], [name for name, _ in middles], color=palette.INK)
    axes.set_ylim(at - 1.2, -0.6)
    axes.margins(x=0.12)
    return 0.35 + at * _BAR


def _value(axes: Axes, text: str, x: float, y: float) -> None:
    behind = {"facecolor": palette.PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
    axes.annotate(
        text, (x, y), (4, 0), textcoords="offset points", va="center_baseline", bbox=behind, zorder=4
    )


def _scale(axis: Any, log: bool, unit: str, from_0: bool = True) -> None:
    """Set scale and ticks of an axis with numbers."""
    axes, horizontal = axis.axes, axis.axis_name == "x"
    if log and axis.get_data_interval()[1] > 0:
        (axes.set_xscale if horizontal else axes.set_yscale)("log")
        low, high = axis.get_data_interval()
        many = math.isfinite(low) and low > 0 and high / low > 500
        axis.set_major_locator(LogLocator(subs=(1.0,) if many else (1.0, 2.0, 5.0), numticks=8))
        axis.set_minor_locator(NullLocator())
    elif unit == "share" and not horizontal:
        axes.set_ylim(0, 1.03)
        axis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    else:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        if from_0 and axis.get_data_interval()[0] >= 0:
            (axes.set_xlim if horizontal else axes.set_ylim)(0, None)
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, unit, 4)))


def _limits(chart: Chart, colours: Mapping[str, str], axes: Axes) -> dict[str, Any]:
    """Dashed lines; label -> what stands for it in the legend, with its value."""
    handles: dict[str, Any] = {}
    for limits, upright in ((chart.across, chart.kind == "bars"), (chart.upright, True)):
        unit = chart.x_unit if limits is chart.upright else chart.y_unit
        for text, value in limits.items():
            if not math.isfinite(value) or (value <= 0 and (chart.log_x if upright else chart.log_y)):
                continue
            style: dict[str, Any] = {
                "color": colours.get(text, palette.INK),
                "linestyle": _DASHES[len(handles) % len(_DASHES)],
                "linewidth": 1.3,
            }
            (axes.axvline if upright else axes.axhline)(value, **style)
            told = text in colours or not re.search(r"\d", text)
            handles[f"{label(text, 60)}: {number(value, unit)}" if told else label(text, 60)] = Line2D(
                [], [], **style
            )
    return handles


def _handles(chart: Chart, colours: Mapping[str, str]) -> dict[str, Any]:
    """label -> what stands for it in the legend; empty where nothing needs to be told apart."""
    alone = len(chart.series) == 1 and chart.series[0].label in ("", chart.y_label, chart.title)
    if alone or palette.has_systems(chart, colours):
        return {}
    handles: dict[str, Any] = {}
    for place, series in enumerate(chart.series):
        text = (label(series.label, 60) or " ") + ("" if _has_data(chart, series) else " (no data)")
        colour = colours[series.label]
        line: Any = "" if chart.kind == "dots" else "-"
        handles[text] = (
            Patch(color=colour, linewidth=0)
            if chart.kind == "bars"
            else Line2D([], [], color=colour, marker=_marker(chart, place, series), linestyle=line)
        )
    return handles


def _columns(labels: Sequence[str], wide: float) -> int:
    """Return the columns of the legend: as many as fit side by side."""
    widest = max(width(text, _SMALL) for text in labels) + 0.5
    return max(1, min(len(labels), int(wide / widest)))


def _marker(chart: Chart, place: int, series: Series) -> str:
    """A line of many points would be hidden by its marks."""
    bare = chart.kind == "cdf" or (chart.kind == "lines" and len(series.xs) > 60)
    return "" if bare else _MARKERS[place % len(_MARKERS)]


# ----- a chart's values


def _numeric(chart: Chart) -> bool:
    return all(isinstance(x, int | float) for series in chart.series for x in series.xs)


def _has_data(chart: Chart, series: Series) -> bool:
    return any(map(math.isfinite, _numbers(series.xs if chart.kind == "cdf" else series.ys)))


def _numbers(values: Iterable[object], positive: bool = False) -> list[float]:
    """NaN for what is none, and where they must be positive for what is not."""
    found = [float(value) if isinstance(value, int | float) else math.nan for value in values]
    return [value if math.isfinite(value) and (value > 0 or not positive) else math.nan for value in found]


def _whiskers(series: Series, ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Lengths downwards and upwards, 0 where there are none."""

    def lengths(ends: Iterable[float | None], sign: int) -> list[float]:
        given = [*_numbers(ends), *[math.nan] * len(ys)]
        return [np.fmax(0.0, sign * (end - y)) for y, end in zip(ys, given, strict=False)]

    return lengths(series.low, -1), lengths(series.high, 1)
