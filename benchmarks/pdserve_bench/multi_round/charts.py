"""What a run of multi-round QA looks like: TTFT and load over time, and how times are distributed."""

import time
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
    finished = [question for question in questions if question.outcome is Outcome.FINISHED]
    groups = {
        "first question": [question for question in finished if question.round == 1],
        "later questions": [question for question in finished if question.round > 1],
    }
    ttfts = {
        label: [
            (question.started - run.began, question.ttft) for question in group if question.ttft is not None
        ]
        for label, group in groups.items()
    }
    failed = [
        (question.started - run.began, question.ended - question.started)
        for question in questions
        if question.outcome is Outcome.FAILED
    ]
    over_time = {**ttfts, "failed, after": failed}
    gaps = {
        "between two tokens": [gap for question in finished for gap in question.gaps],
        "longest of an answer": [max(question.gaps) for question in finished if question.gaps],
    }
    ttft_line, gap_line = ({f"SLO {1000 * bound:g} ms": bound} for bound in (slo.ttft, slo.gap))
    charts = [
        Chart(
            "Time to first token",
            "dots",
            "asked at, seconds",
            "TTFT",
            [
                Series(label, [at for at, _ in pairs], [value for _, value in pairs])
                for label, pairs in over_time.items()
                if pairs
            ],
            across=ttft_line,
            log_y=True,
            y_unit="s",
            better="lower",
        ),
        _active(run, questions),
        Chart(
            "Time to first token: how many wait how long",
            "cdf",
            "TTFT",
            "share of requests",
            [
                Series(label, _thinned([ttft for _, ttft in pairs]), [])
                for label, pairs in ttfts.items()
                if pairs
            ],
            upright=ttft_line,
            log_x=True,
            x_unit="s",
            y_unit="share",
        ),
        Chart(
            "Gaps between tokens",
            "cdf",
            "gap",
            "share of gaps",
            [Series(label, _thinned(values), []) for label, values in gaps.items() if values],
            upright=gap_line,
            log_x=True,
            x_unit="s",
            y_unit="share",
        ),
    ]
    return [chart for chart in charts if chart.series]


def _active(run: LoadRun, questions: Sequence[Question]) -> Chart:
    """A user is there from its first question until its last answer."""
    end = run.ended or time.monotonic()
    moments = [(end - run.began) * place / (_POINTS // 2) for place in range(_POINTS // 2 + 1)]
    running = [(question.started, question.ended or end) for question in questions]
    stays: dict[int, tuple[float, float]] = {}
    for question, (begin, over) in zip(questions, running, strict=True):
        came, left = stays.get(question.user, (begin, over))
        stays[question.user] = min(came, begin), max(left, over)
    curves = {"requests": running, "users": list(stays.values())}
    return Chart(
        "Requests that run, and users that are there",
        "lines",
        "seconds",
        "at a time",
        [
            Series(
                label,
                moments,
                [sum(begin <= run.began + moment < over for begin, over in spans) for moment in moments],
            )
            for label, spans in curves.items()
            if spans
        ],
        upright={"no more questions": run.closes - run.began} if end > run.closes else {},
    )


def _thinned(values: Sequence[float]) -> list[float]:
    """As many as can be seen, evenly taken of the ordered ones, with both ends: the same curve. Tokens that came
    together are `_LEAST` apart, since the axis is logarithmic."""
    ordered = [max(value, _LEAST) for value in sorted(values)]
    if len(ordered) <= _POINTS:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / (_POINTS - 1))] for place in range(_POINTS)]
