"""What a run of multi-round QA looks like: TTFT over time, and how gaps are distributed."""

from collections.abc import Sequence

from pdserve_bench.client import Outcome
from pdserve_bench.multi_round.workload import Question
from pdserve_bench.report import Chart, Series
from pdserve_bench.runs import LoadRun
from pdserve_bench.slo import Slo

_POINTS = 400
"""of a curve; more cannot be seen"""
_LEAST = 0.0005
"""seconds"""


def draw_charts(run: LoadRun, questions: Sequence[Question], slo: Slo) -> list[Chart]:
    """Without those that nothing is known for."""
    charts = [_over_time(run, questions, slo), _gaps(questions, slo)]
    return [chart for chart in charts if chart.series]


def _over_time(run: LoadRun, questions: Sequence[Question], slo: Slo) -> Chart:
    dots: dict[str, list[tuple[float, float]]] = {
        "first question": [],
        "later questions": [],
        "failed, after": [],
    }
    for question in questions:
        asked = question.started - run.began
        if question.outcome is Outcome.FAILED:
            dots["failed, after"].append((asked, question.ended - question.started))
        elif question.outcome is Outcome.FINISHED and question.ttft is not None:
            dots["first question" if question.round == 1 else "later questions"].append(
                (asked, question.ttft)
            )
    return Chart(
        "Time to first token",
        "dots",
        "asked at, seconds",
        "TTFT",
        [
            Series(label, [at for at, _ in pairs], [value for _, value in pairs])
            for label, pairs in dots.items()
            if pairs
        ],
        across={f"SLO {1000 * slo.ttft:g} ms": slo.ttft},
        log_y=True,
        y_unit="s",
        better="lower",
    )


def _gaps(questions: Sequence[Question], slo: Slo) -> Chart:
    gaps = [question.gaps for question in questions if question.outcome is Outcome.FINISHED and question.gaps]
    curves = {
        "between two tokens": [gap for each in gaps for gap in each],
        "longest of an answer": [max(each) for each in gaps],
    }
    return Chart(
        "Gaps between tokens",
        "cdf",
        "gap",
        "share of gaps",
        [Series(label, _thinned(values), []) for label, values in curves.items() if values],
        upright={f"SLO {1000 * slo.gap:g} ms": slo.gap},
        log_x=True,
        x_unit="s",
        y_unit="share",
    )


def _thinned(values: Sequence[float]) -> list[float]:
    """As many as can be seen, evenly taken of the ordered ones, with both ends: the same curve. Tokens that came
    together are `_LEAST` apart, since the axis is logarithmic."""
    ordered = [max(value, _LEAST) for value in sorted(values)]
    if len(ordered) <= _POINTS:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / (_POINTS - 1))] for place in range(_POINTS)]
