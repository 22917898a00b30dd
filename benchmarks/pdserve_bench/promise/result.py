"""Report how many requests kept each SLO: in its own arm, and in the arms without an SLO."""

from collections.abc import Iterator, Mapping, Sequence

from pdserve_bench.client import Outcome
from pdserve_bench.goodput.measure import Probe
from pdserve_bench.goodput.search import GoodputSearch
from pdserve_bench.measure.report import Cell, Column, Report, Rows
from pdserve_bench.measure.samples import percentile
from pdserve_bench.measure.slo import SHARE, Slo, Tally
from pdserve_bench.promise.arms import OFF, WAYS, Arm, ArmsRun

_COUNTS = ("requests", "kept", "broke TTFT", "broke gap", "failed")
Figures = Mapping[str, float | None]


def figures(slo: Slo, probes: Sequence[Probe]) -> dict[str, float | None]:
    """Combine windows. Times are of finished requests, in ms."""
    tally = sum((Tally.of(slo, made.run.exchanges, made.run.ended) for made in probes), Tally())
    finished = [each for made in probes for each in made.run.of(Outcome.FINISHED)]
    gaps = [each.gaps for each in finished if each.gaps]
    times = {
        "TTFT": ([each.ttft for each in finished if each.ttft is not None], (0.5,)),
        "first gap": ([each[0] for each in gaps], (0.5, 0.9, 0.99)),
        "longest gap": ([max(each) for each in gaps], (0.9,)),
        "finish": ([each.ended - each.started for each in finished], (0.5, 0.9)),
    }
    counts = (tally.requests, tally.kept, tally.ttft + tally.both, tally.gap + tally.both, tally.failed)
    local = sum(each.prefill == "local" for each in finished)
    return {
        **dict(zip(_COUNTS, map(float, counts), strict=True)),
        "local, %": 100 * local / len(finished) if finished else None,
        **{
            f"{name} p{100 * share:g}": 1000 * percentile(samples, share) if samples else None
            for name, (samples, shares) in times.items()
            for share in shares
        },
    }


def goodput(slo: Slo, arm: Arm, result: ArmsRun) -> GoodputSearch:
    """Estimate the rate at which 90 % of an arm's requests keep the SLO."""
    search = GoodputSearch()
    for rate in result.rates:
        if probes := result.of(arm, rate):
            found = figures(slo, probes)
            search.tell(rate, int(found["kept"] or 0), int(found["requests"] or 0))
    return search


def _around(search: GoodputSearch) -> str:
    if search.carried is None:
        return f"under {search.broken:.3g}" if search.broken else ""
    return f"{search.estimate:.3g}" if search.broken else f"over {search.carried:.3g}"


def report_of(result: ArmsRun, title: str) -> Report:
    cells = list(_cells(result))
    return Report(
        title,
        _lead(result),
        tables=[_table(name, result, cells) for name in result.promises],
        notes=_notes(result),
        complete=result.complete,
        data={
            "promises": {name: vars(slo) for name, slo in result.promises.items()},
            "arms": {arm.name: dict(arm.settings) for arm in result.arms},
            "cells": [
                {"promise": promise, "rate": rate, "arm": arm.name, **found}
                for promise, rate, arm, found in cells
            ],
            "goodput": {
                name: {arm.name: _goodput_raw(goodput(slo, arm, result)) for arm in _judged(name, result)}
                for name, slo in result.promises.items()
            },
            "windows": [
                {"arm": arm.name, "rate": made.rate, "seconds": made.seconds, **made.run.summary()}
                for arm, made in result.windows
                if made.counted
            ],
        },
    )


def _goodput_raw(search: GoodputSearch) -> dict[str, float | None]:
    return {"estimate": search.estimate, "carried": search.carried, "broken": search.broken}


def _judged(promise: str, result: ArmsRun) -> list[Arm]:
    """Return the SLO's own arm and the arms without an SLO."""
    return [arm for arm in result.arms if arm in (OFF, *WAYS) or arm.name == promise]


def _cells(result: ArmsRun) -> Iterator[tuple[str, float, Arm, Figures]]:
    for promise, slo in result.promises.items():
        for rate in result.rates:
            for arm in _judged(promise, result):
                if probes := result.of(arm, rate):
                    yield promise, rate, arm, figures(slo, probes)


def _shown(arm: Arm) -> str:
    return arm.name if arm in (OFF, *WAYS) else "on"


def _table(promise: str, result: ArmsRun, cells: Sequence[tuple[str, float, Arm, Figures]]) -> Rows:
    mine = [(rate, arm, found) for name, rate, arm, found in cells if name == promise]
    names = list(mine[0][2]) if mine else []
    columns = [Column("req/s", "g"), Column("promise"), Column("kept, %", ".1f")]
    columns += [Column(name, ".0f") for name in names if name != "kept"]
    rows: list[list[Cell]] = [
        [
            rate,
            _shown(arm),
            100 * (found["kept"] or 0) / found["requests"] if found["requests"] else None,
            *(found[name] for name in names if name != "kept"),
        ]
        for rate, arm, found in mine
    ]
    return Rows(f"{promise}: {result.promises[promise]}; times in ms", columns, rows)


def _lead(result: ArmsRun) -> str:
    parts = []
    for name, slo in result.promises.items():
        found = [(arm, goodput(slo, arm, result)) for arm in _judged(name, result)]
        parts.append(f"{name}: " + ", ".join(f"{_shown(arm)} {_around(search)}" for arm, search in found))
    return f"Goodput, req/s at which {SHARE:.0%} keep the SLO: {'; '.join(parts)}."


def _notes(result: ArmsRun) -> list[str]:
    ended = [made for _, made in result.windows if made.counted]
    if not ended:
        return []
    stall, foreign = max(made.stall for made in ended), max(made.foreign or 0.0 for made in ended)
    return [
        f"{len(ended)} windows, of {min(made.seconds for made in ended):.1f} s at least. The load generator was late "
        f"by {1000 * stall:.0f} ms at most; other programs took up to {foreign:.0%} of this machine in a window."
    ]
