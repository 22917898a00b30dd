"""One chart's marks and axes, inside a rectangle that `charts.py` gives them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from pdserve_bench.report import Chart, Series, palette
from pdserve_bench.report.lettering import SMALL, folded, label, number, width
from pdserve_bench.report.points import (
    all_ys,
    bars_stand,
    beside,
    categories,
    has_data,
    is_there,
    numbers,
    or_0,
    whiskers,
)
from pdserve_bench.report.ticks import apart, decades, share

_UNBOUNDED = 1e9
_MARKERS = "osD^vPX*"
_DASHES = (0, (4, 3))
_CDF_POINTS = 250
_BEHIND = {"facecolor": palette.PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
"""texts over lines"""
_SWARM = 3000
"""dots from which on a page gets them as an image"""


class Marks:
    """Draws a chart; `handles` are for its legend."""

    def __init__(
        self, chart: Chart, colours: Mapping[str, str], axes: Axes, inches: tuple[float, float]
    ) -> None:
        self.chart, self.axes, self.inches = chart, axes, inches
        self._colours = colours
        self._by_x = palette.by_x(chart) and {str(x) for x in chart.series[0].xs} <= set(colours)
        self.upended = chart.kind == "bars" and not bars_stand(chart, inches[0])

    def draw(self) -> None:
        chart, axes = self.chart, self.axes
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=SMALL, labelcolor=palette.MUTED, pad=5)
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        if not has_data(chart):
            axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
            axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", color=palette.MUTED)
            return
        base = axes.spines["left" if self.upended else "bottom"]
        base.set_visible(True)
        base.set_color(palette.MUTED)
        {"bars": self._bars, "cdf": self._cdf, "dots": self._dots, "lines": self._lines}[chart.kind]()
        axes.grid(axis="x" if self.upended else "y", color=palette.GRID, linewidth=0.8)
        axes.set_xlabel(
            folded(label(self._below), self.inches[0], SMALL),
            fontsize=SMALL,
            color=palette.MUTED,
            loc="right",
        )
        self._limits()

    @property
    def _below(self) -> str:
        """The words under the chart: of bars that lie the values are there, which the subtitle names already."""
        return "" if self.upended else self.chart.x_label

    # ----- marks

    def _lines(self) -> None:
        chart, axes = self.chart, self.axes
        places = self._places()
        for number_, series in enumerate(chart.series):
            xs = [places(x) for x in series.xs]
            ys = numbers(series.ys, chart.log_y)
            colour = self._colours[series.label]
            axes.plot(
                xs,
                ys,
                marker=_marker(number_) if _few(series) else "",
                color=colour,
                markersize=5,
                linewidth=2,
                markeredgewidth=0,
                zorder=2.5 if colour in palette.GREYS else 3,
            )
            down, up = whiskers(series, ys, chart.log_y)
            if any(math.isfinite(length) for length in (*down, *up)):
                axes.errorbar(xs, ys, yerr=[down, up], fmt="none", ecolor=colour, elinewidth=1.2, capsize=3)
        self._value_axis(axes.yaxis, all_ys(chart), chart.y_unit, chart.log_y, 0.06)
        self._x_axis([places(x) for series in chart.series for x in series.xs])

    def _dots(self) -> None:
        chart, axes = self.chart, self.axes
        places = self._places()
        for number_, series in enumerate(chart.series):
            axes.scatter(
                [places(x) for x in series.xs],
                numbers(series.ys, chart.log_y),
                s=14,
                marker=_marker(number_),
                color=self._colours[series.label],
                alpha=0.65,
                linewidths=0,
                rasterized=len(series.xs) > _SWARM,
            )
        self._value_axis(axes.yaxis, all_ys(chart), chart.y_unit, chart.log_y, 0.06)
        self._x_axis([places(x) for series in chart.series for x in series.xs])

    def _cdf(self) -> None:
        chart, axes = self.chart, self.axes
        drawn: list[float] = []
        for series in chart.series:
            xs = sorted(x for x in numbers(series.xs, chart.log_x) if math.isfinite(x))
            if not xs:
                continue
            step = max(1, len(xs) // _CDF_POINTS)
            places = sorted({*range(0, len(xs), step), len(xs) - 1})
            drawn += [xs[place] for place in places]
            axes.plot(
                [xs[0], *(xs[place] for place in places)],
                [0.0, *((place + 1) / len(xs) for place in places)],
                drawstyle="steps-post",
                color=self._colours[series.label],
                linewidth=2,
            )
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: number(y, "share")))
        self._value_axis(axes.xaxis, drawn, chart.x_unit, chart.log_x, 0.03)

    def _bars(self) -> None:
        chart, axes = self.chart, self.axes
        groups = categories(chart)
        thick = 0.76 / len(chart.series)
        values = axes.xaxis if self.upended else axes.yaxis
        self._value_axis(values, all_ys(chart), chart.y_unit, chart.log_y, 0.0)
        floor = 0.0
        if chart.log_y:
            floor = axes.get_xlim()[0] if self.upended else axes.get_ylim()[0]
        for number_, series in enumerate(chart.series):
            ys = numbers(series.ys, chart.log_y)
            down, up = whiskers(series, ys, chart.log_y)
            for x, raw, y, below, above in zip(
                map(str, series.xs), numbers(series.ys), ys, down, up, strict=False
            ):
                at = groups.index(x) - 0.38 + thick * (number_ + 0.5)
                if math.isfinite(y):
                    colour = self._colours[x if self._by_x else series.label]
                    self._bar(at, y, floor, thick * 0.92, colour, (or_0(below), or_0(above)))
                self._value(raw, at, y, or_0(below if y < 0 else above), floor, thick)
        names = [label(group) for group in groups]
        if self.upended:
            axes.set_yticks(range(len(names)), [beside(name, self.inches[0]) for name in names])
            axes.set_ylim(len(names) - 0.5, -0.5)
        else:
            slot = self.inches[0] / len(names)
            axes.set_xticks(range(len(names)), [folded(name, 0.94 * slot, SMALL) for name in names])
            axes.set_xlim(-0.5, len(names) - 0.5)
        (axes.yaxis if self.upended else axes.xaxis).set_tick_params(labelcolor=palette.INK)

    def _bar(
        self, at: float, y: float, floor: float, thick: float, colour: str, ends: tuple[float, float]
    ) -> None:
        """`ends`: lengths of the whisker downwards and upwards."""
        error = [[end] for end in ends] if any(ends) else None
        style: Any = {"color": colour, "error_kw": {"ecolor": palette.INK, "elinewidth": 1.1, "capsize": 3}}
        if self.upended:
            self.axes.barh(at, y - floor, thick, left=floor, xerr=error, **style)
        else:
            self.axes.bar(at, y - floor, thick, bottom=floor, yerr=error, **style)

    def _value(self, raw: float, at: float, value: float, beyond: float, floor: float, thick: float) -> None:
        """The number at the end of a bar."""
        text = number(raw, self.chart.y_unit)
        size = SMALL
        if not self.upended:
            room = self.inches[0] / len(categories(self.chart)) * thick
            size = min(SMALL, SMALL * 1.05 * room / width(text, SMALL))
            if size < 5.5:
                return
        down = value < 0
        end = value + (-beyond if down else beyond) if math.isfinite(value) else floor
        self.axes.annotate(
            text,
            (end, at) if self.upended else (at, end),
            (-4 if down else 4, 0) if self.upended else (0, -4 if down else 3),
            textcoords="offset points",
            ha=("right" if down else "left") if self.upended else "center",
            va="center_baseline" if self.upended else "top" if down else "bottom",
            fontsize=size,
            color=palette.INK if math.isfinite(raw) else palette.MUTED,
            bbox=_BEHIND,
            zorder=4,
        )

    # ----- limits that were asked for

    def _limits(self) -> None:
        """Lines with their names: those of vertical lines above the chart, in as many rows as it takes."""
        chart = self.chart
        flat, upright = list(chart.across.items()), list(chart.upright.items())
        if chart.kind == "bars":
            flat, upright = ([], flat) if self.upended else (flat, [])
        for text, value in flat:
            if self._reach(value, self.axes.yaxis, chart.log_y):
                self._flat(text, value)
        log = chart.log_y if self.upended else chart.log_x
        ends: list[float] = []
        for text, value in sorted(upright, key=lambda item: item[1]):
            if self._reach(value, self.axes.xaxis, log):
                self._upright(text, value, log, ends)

    def _reach(self, value: float, axis: Any, log: bool) -> bool:
        """Widen the axis so far. False where it cannot be shown."""
        if not math.isfinite(value) or (log and value <= 0):
            return False
        low, high = axis.get_view_interval()
        if not low <= value <= high:
            room = 0.06 * (max(high, value) - min(low, value))
            axis.axes.set(
                **{
                    f"{axis.axis_name}lim": (
                        min(low, value * 0.9 if log else value - room) if value < low else low,
                        max(high, value * 1.1 if log else value + room) if value > high else high,
                    )
                }
            )
            if log:
                low, high = axis.get_view_interval()
                unit = (
                    self.chart.x_unit if axis is self.axes.xaxis and not self.upended else self.chart.y_unit
                )
                axis.set_major_locator(
                    FixedLocator(decades(low, high, unit, self._along(axis is self.axes.xaxis)))
                )
        return True

    def _flat(self, text: str, value: float) -> None:
        axes, colour = self.axes, self._colours.get(text, palette.INK)
        axes.axhline(value, color=colour, linewidth=1.3, linestyle=_DASHES)
        low, high = axes.get_ylim()
        high_up = share(value, (low, high), self.chart.log_y) > 0.92
        if high_up and self.chart.y_unit != "share" and not self.chart.log_y:
            axes.set_ylim(low, value + 0.09 * (value - low))
            high_up = False
        axes.annotate(
            label(text, 60),
            (1, value),
            (-2, -4 if high_up else 3),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            va="top" if high_up else "bottom",
            fontsize=SMALL,
            color=colour,
            bbox=_BEHIND,
            zorder=4,
        )

    def _upright(self, text: str, value: float, log: bool, ends: list[float]) -> None:
        """`ends`: where the last name of each row above the chart ends, in inches. The name of a series is in the
        legend already: its line has its colour, and says where it is."""
        axes, colour = self.axes, self._colours.get(text, palette.INK)
        axes.axvline(value, color=colour, linewidth=1.3, linestyle=_DASHES)
        unit = self.chart.y_unit if self.upended else self.chart.x_unit
        words = number(value, unit) if text in self._colours else label(text, 60)
        half, wide = width(words, SMALL) / 2, self.inches[0]
        at = share(value, axes.get_xlim(), log) * wide
        middle = min(max(at, half), max(half, wide - half))
        row = next((row for row, end in enumerate(ends) if middle - half > end + 0.08), len(ends))
        ends[row : row + 1] = [middle + half]
        axes.annotate(
            words,
            (middle / wide, 1),
            (0, 3 + 13 * row),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=SMALL,
            color=colour,
        )

    # ----- axes

    def _value_axis(self, axis: Any, values: Iterable[float], unit: str, log: bool, margin: float) -> None:
        """An axis of numbers; from 0 on where it is not logarithmic."""
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        bars = self.chart.kind == "bars"
        horizontal = axis is self.axes.xaxis
        if log and finite:
            (self.axes.set_xscale if horizontal else self.axes.set_yscale)("log")
            apart = math.log10(high / low)
            low, high = low / 10 ** (0.06 * apart + 0.03), high * 10 ** (0.06 * apart + 0.03)
            if bars:
                low, high = 10 ** math.floor(math.log10(low)), high * 10 ** (0.06 * apart + 0.05)
            axis.set_major_locator(FixedLocator(decades(low, high, unit, self._along(horizontal))))
        else:
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            low, high = min(0.0, low), max(0.0, high)
            span = (high - low) or 1.0
            high += (0.17 if horizontal and bars else 0.1 if bars else margin) * span
            low -= 0.1 * span if low < 0 else 0.0
            if unit == "share" and not bars and high <= 1.1:
                high = 1.03
        (self.axes.set_xlim if horizontal else self.axes.set_ylim)(low, high)
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, unit, 4)))

    def _along(self, horizontal: bool) -> float:
        """The room for labels side by side, in inches; no bound where they are one above the other."""
        return self.inches[0] if horizontal else _UNBOUNDED

    def _places(self) -> Any:
        """Where an x is: itself, or its place among the texts where there are any."""
        xs = [x for series in self.chart.series for x in series.xs]
        if all(isinstance(x, int | float) for x in xs):
            return lambda x: float(x) if float(x) > 0 or not self.chart.log_x else math.nan
        names = list(dict.fromkeys(map(str, xs)))
        self._names = names
        return lambda x: float(names.index(str(x)))

    _names: Sequence[str] = ()

    def _x_axis(self, places: Sequence[float]) -> None:
        """Of lines and dots: a tick at each x where they are few."""
        axes, chart = self.axes, self.chart
        finite = sorted({x for x in places if math.isfinite(x)})
        if self._names:
            slot = self.inches[0] / len(self._names)
            axes.set_xticks(
                range(len(self._names)), [folded(label(name, 40), 0.94 * slot, SMALL) for name in self._names]
            )
            axes.set_xlim(-0.5, len(self._names) - 0.5)
            return
        log = chart.log_x and bool(finite)
        if log:
            axes.set_xscale("log")
        low, high = (finite[0], finite[-1]) if finite else (0.0, 1.0)
        if log:
            edge = (high / low) ** 0.04 if high > low else 2.0
            axes.set_xlim(low / edge, high * edge)
            axes.xaxis.set_major_locator(
                FixedLocator(decades(*axes.get_xlim(), chart.x_unit, self.inches[0]))
            )
        else:
            edge = 0.04 * (high - low) or 0.5
            axes.set_xlim(low - edge, high + edge)
            axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, chart.x_unit, 4)))
        if chart.kind == "lines" and len(finite) <= 12:
            axes.xaxis.set_major_locator(
                FixedLocator(apart(finite, axes.get_xlim(), chart.x_unit, log, self.inches[0]))
            )
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, chart.x_unit)))

    # ----- legend

    def handles(self) -> dict[str, Any]:
        """label -> what stands for it; empty where nothing needs to be told apart."""
        chart = self.chart
        labels = [series.label for series in chart.series]
        if self._by_x or (len(labels) == 1 and labels[0] in ("", chart.y_label)):
            return {}
        if len(labels) == 1 and label(labels[0]) == label(chart.title):
            return {}
        made: dict[str, Any] = {}
        for number_, series in enumerate(chart.series):
            colour = self._colours[series.label]
            text = label(series.label, 60) or " "
            if not is_there(series, chart):
                text += " (no data)"
            if chart.kind == "bars":
                made[text] = Patch(color=colour, linewidth=0)
            else:
                bare = chart.kind == "cdf" or (chart.kind == "lines" and not _few(series))
                marker = "" if bare else _marker(number_)
                style: Any = "" if chart.kind == "dots" else "-"
                made[text] = Line2D(
                    [],
                    [],
                    color=colour,
                    marker=marker,
                    linestyle=style,
                    markersize=5,
                    markeredgewidth=0,
                    linewidth=2,
                )
        return made


def _few(series: Series) -> bool:
    """A curve of so many points would be hidden by its marks."""
    return len(series.xs) <= 60


def _marker(place: int) -> str:
    return _MARKERS[place % len(_MARKERS)]
