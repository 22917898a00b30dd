"""What a chart's series have: their values as numbers, their groups, and how much room bars need."""

import math
from collections.abc import Iterable, Sequence

from pdserve_bench.report import Chart, Series
from pdserve_bench.report.lettering import SMALL, folded, label, number, width


def has_data(chart: Chart) -> bool:
    return any(is_there(series, chart) for series in chart.series)


def is_there(series: Series, chart: Chart) -> bool:
    return any(map(math.isfinite, numbers(series.xs if chart.kind == "cdf" else series.ys)))


def categories(chart: Chart) -> list[str]:
    return list(dict.fromkeys(str(x) for series in chart.series for x in series.xs))


def bars_stand(chart: Chart, inches: float) -> bool:
    """Whether the names fit under them in three lines without broken words, and the numbers above them."""
    groups, count = categories(chart), max(1, len(chart.series))
    if not groups:
        return True
    slot = inches / len(groups)
    words = [word for group in groups for word in label(group).split()]
    fits = all(width(word, SMALL) < 0.94 * slot for word in words)
    lines = max(folded(label(group), 0.94 * slot, SMALL).count("\n") for group in groups) + 1
    told = [number(y, chart.y_unit) for series in chart.series for y in numbers(series.ys)]
    widest = max((width(text, SMALL) for text in told), default=0.0)
    return fits and lines <= 3 and widest * 0.8 < slot * 0.76 / count


def beside(name: str, inches: float) -> str:
    """The name of a group of bars that lie, in lines."""
    return folded(label(name), 0.36 * inches, SMALL)


def numbers(values: Iterable[object], positive: bool = False) -> list[float]:
    """NaN for what is none, and where they must be positive for what is not."""
    found = [float(value) if isinstance(value, int | float) else math.nan for value in values]
    return [value if math.isfinite(value) and (value > 0 or not positive) else math.nan for value in found]


def all_ys(chart: Chart) -> list[float]:
    """With the ends of the whiskers."""
    return [
        value
        for series in chart.series
        for values in (series.ys, series.low, series.high)
        for value in numbers(values)
    ]


def whiskers(series: Series, ys: Sequence[float], positive: bool) -> tuple[list[float], list[float]]:
    """Lengths downwards and upwards, NaN where there are none."""

    def lengths(ends: Iterable[float | None], sign: int) -> list[float]:
        given = [*numbers(ends, positive), *[math.nan] * len(ys)]
        return [
            max(0.0, sign * (end - y)) if end == end else math.nan for y, end in zip(ys, given, strict=False)
        ]

    return lengths(series.low, -1), lengths(series.high, 1)


def or_0(length: float | None) -> float:
    return length if length is not None and math.isfinite(length) else 0.0
