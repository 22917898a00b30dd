"""The colours of charts. Series colours can be told apart with any kind of colour blindness (after Okabe and Ito)."""

import re
from collections.abc import Collection, Mapping, Sequence

from pdserve_bench.report import Chart

INK, MUTED, GRID, PAPER = "#1f2328", "#59636f", "#dfe3e8", "#fefefe"
VERDICT, WARNING = "#0072b2", "#d55e00"
_STRONG = ("#0072b2", "#d55e00", "#009e73", "#b8558f", "#c98500", "#2b9bd6", "#4b3aa5", "#7d7a1d")
GREYS = ("#7a828c", "#a4abb3", "#545b64")
_NEUTRAL = "#4d6f8f"
"""of what stands alone in a chart beside others that have systems"""

_BASELINE = re.compile(
    r"(plain|bare|baseline|aggregated|one (vllm )?engine|memory copy|memcpy|line rate)\b|vllm($|[,:(])", re.I
)


def of_labels(charts: Sequence[Chart]) -> Mapping[str, str]:
    """label -> colour, the same in all charts; a baseline is grey."""
    several = {series.label for chart in charts if len(chart.series) > 1 for series in chart.series}
    systems, alone = dict[str, None](), dict[str, None]()
    for chart in charts:
        if _by_x(chart) and any(str(x) in several or is_baseline(str(x)) for x in chart.series[0].xs):
            systems.update((str(x), None) for x in chart.series[0].xs)
        elif len(chart.series) > 1:
            systems.update((series.label, None) for series in chart.series)
        else:
            alone.update((series.label, None) for series in chart.series)
    marked = {series.label for chart in charts for series in chart.series if series.baseline}
    named = systems or alone
    grey = [label for label in named if label in marked or is_baseline(label)]
    strong = [label for label in named if label not in grey]
    together = [{series.label for series in chart.series} for chart in charts]
    return {
        **dict.fromkeys(alone, _NEUTRAL),
        **_dealt(grey, GREYS, together),
        **_dealt(strong, _STRONG, together),
    }


def is_baseline(label: str) -> bool:
    return _BASELINE.match(label) is not None


def has_systems(chart: Chart, colours: Mapping[str, str]) -> bool:
    """Whether its bars are systems, each with its colour, rather than points of one series."""
    return _by_x(chart) and {str(x) for x in chart.series[0].xs} <= set(colours)


def _by_x(chart: Chart) -> bool:
    return chart.kind == "bars" and len(chart.series) == 1


def _dealt(
    labels: Sequence[str], colours: Sequence[str], together: Sequence[Collection[str]]
) -> dict[str, str]:
    """Deal colours to labels. Where there are more labels than colours, those that are `together` in a chart differ as
    long as they can."""
    dealt: dict[str, str] = {}
    for label in labels:
        beside = [dealt.get(other) for chart in together if label in chart for other in chart]
        used = list(dealt.values())
        dealt[label] = min(colours, key=lambda colour: (beside.count(colour), used.count(colour)))
    return dealt
