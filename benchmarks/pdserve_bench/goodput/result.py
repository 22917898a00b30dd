"""What a search for goodput found, as a report."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from pdserve_bench.client import Outcome
from pdserve_bench.goodput.measure import FoundGoodput, Probe
from pdserve_bench.report import Chart, Column, Report, Rows, Series
from pdserve_bench.runs import LoadRun
from pdserve_bench.samples import percentile, wilson
from pdserve_bench.slo import Tally

_STALLED = 0.25
"""of the SLO's gap: a longer stall of the load generator is told"""
_ERRORS = 3
"""kinds of them that are told"""
_RAW = (
    "rate",
    "seconds",
    "seed",
    "share",
    "uncertainty",
    "judged",
    "counted",
    "hopeless",
    "disturbed",
    "blamed",
    "stall",
)
"""what the JSON has of a probe"""
_COLUMNS = (
    Column("offered, req/s", ".3g"),
    Column("sent", "d"),
    Column("kept, %", ".1f"),
    Column("±", ".1f"),
    Column("broke TTFT", "d"),
    Column("broke a gap", "d"),
    Column("both", "d"),
    Column("failed", "d"),
    Column("unfinished", "d"),
    Column("remark"),
    Column("TTFT p50, ms", ".0f"),
    Column("TTFT p90, ms", ".0f"),
    Column("TTFT p99, ms", ".0f"),
    Column("longest gap p90, ms", ".0f"),
    Column("output tokens/s", ".0f"),
    Column("sent, req/s", ".3g"),
)


def report_of(found: FoundGoodput, title: str) -> Report:
    probes = [probe for probe in found.probes if probe.run.ended]
    return Report(
        title,
        lead_of(found),
        tables=[_table(found, probes)] if probes else [],
        charts=_charts(found),
        notes=[*found.notes, *_notes(found, probes)],
        complete=found.complete,
        data=_data(found, probes),
    )


def lead_of(found: FoundGoodput) -> str:
    """The answer, in a sentence or two."""
    options, low, high = found.options, found.search.carried, found.search.broken
    promise = f"{100 * options.share:g} % of the requests keep the SLO: {options.slo}"
    if low is None and high is None:
        return f"No probe came to its end: it is not known up to which rate {promise}."
    if low is None:
        return (
            f"No rate was found at which {promise}. At {high:.3g} req/s, the lowest that was tried, "
            f"{_broken_at(found, high)}."
        )
    if high is None:
        return f"Goodput: at least {low:.3g} req/s, the highest rate that was tried: {promise}."
    share = _pooled(found.of(high))
    return (
        f"Goodput: {found.search.estimate:.3g} req/s (very likely {_between(*found.search.interval)}). "
        f"Up to {low:.3g} req/s, {promise}. At {high:.3g} req/s only {100 * share:.0f} % do: {_broken_at(found, high)}."
    )


def _broken_at(found: FoundGoodput, rate: float | None) -> str:
    probes = found.of(rate)
    tally, judged = sum((probe.tally for probe in probes), Tally()), sum(probe.judged for probe in probes)
    counts = {
        "broke the TTFT": tally.ttft + tally.both,
        "had too long a gap": tally.gap + tally.both,
        "failed": tally.failed,
    }
    return ", ".join(
        f"{100 * count / judged:.0f} % {name}"
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
        if count
    )


def _pooled(probes: Sequence[Probe]) -> float:
    """The share of all requests of these probes that kept the SLO."""
    judged = sum(probe.judged for probe in probes)
    return sum(probe.tally.kept for probe in probes) / judged if judged else 1.0


def line_of(found: FoundGoodput, probe: Probe) -> str:
    """A probe that has ended, in a log."""
    told = f"{probe.rate:.3g} req/s: {100 * probe.share:.0f} % ± {100 * probe.uncertainty:.0f} of {probe.judged} kept"
    broken = probe.tally.told()
    remark = remark_of(probe)
    return (
        told
        + (f", missed: {broken}" if broken else "")
        + (f" ({remark})" if remark else "")
        + f"; goodput {_between(found.search.carried, found.search.broken)}"
    )


def _between(low: float | None, high: float | None) -> str:
    if high is None:
        return f"over {low:.3g}" if low else "not known yet"
    return f"{low:.3g} to {high:.3g}" if low else f"under {high:.3g}"


def remark_of(probe: Probe) -> str:
    if probe.disturbed:
        return "generator was late" if probe.counted else "generator was late: probed again"
    if not probe.counted:
        return "not ended"
    return "hopeless, cut short" if probe.hopeless else ""


def _table(found: FoundGoodput, probes: Sequence[Probe]) -> Rows:
    ordered = sorted(probes, key=lambda probe: probe.rate)
    return Rows(
        f"Probes, by rate: Poisson arrivals for {found.options.seconds:g} s, {found.options.slo}",
        _COLUMNS,
        [_row(probe) for probe in ordered],
        "± is half of the 90 % interval of the share. What a hopeless probe cut short is in no share if it had broken "
        "nothing (unfinished), and its times are at least those shown: requests still waited. TTFT is of requests that "
        "had a first token, or waited for it beyond the SLO.",
    )


def _row(probe: Probe) -> list[str | float | int | None]:
    tally = probe.tally
    ttfts, gaps = probe.ttfts, probe.longest_gaps
    return [
        probe.rate,
        tally.requests,
        100 * probe.share if probe.judged else None,
        100 * probe.uncertainty if probe.judged else None,
        tally.ttft,
        tally.gap,
        tally.both,
        tally.failed,
        tally.unfinished,
        remark_of(probe),
        *(1000 * percentile(ttfts, share) if ttfts else None for share in (0.5, 0.9, 0.99)),
        1000 * percentile(gaps, 0.9) if gaps else None,
        probe.run.summary()["output tokens/s"],
        probe.sent_rate,
    ]


def _notes(found: FoundGoodput, probes: Sequence[Probe]) -> list[str]:
    notes = []
    bound = found.options.slo.gap
    worst = max(probes, key=lambda probe: probe.stall, default=None)
    blamed = sum(probe.blamed for probe in probes if probe.counted)
    if worst is not None and worst.stall > _STALLED * bound:
        notes.append(
            f"The load generator itself was late by up to {1000 * worst.stall:.0f} ms (at {worst.rate:.3g} req/s): "
            + (
                f"{blamed} requests that broke the SLO may have kept it without that."
                if blamed
                else "no request broke the SLO by that alone."
            )
        )
    if any(probe.disturbed and probe.counted for probe in probes):
        notes.append(
            "The generator was late again where a rate was probed once more: the limit may be this client's or its "
            "machine's, not the server's. Run it where it has a core of its own."
        )
    done = [each for probe in probes for each in probe.run.of(Outcome.FINISHED) if each.prompt_tokens]
    if done:
        prompt, answer = (
            statistics.median(sizes)
            for sizes in zip(*((e.prompt_tokens, e.output_tokens) for e in done), strict=True)
        )
        notes.append(f"As the server counts, prompts had {prompt:g} tokens and answers {answer:g} (median).")
    errors = LoadRun([each for probe in probes for each in probe.run.exchanges]).errors()
    notes += [f"{count} requests failed: {text}" for text, count in errors[:_ERRORS]]
    return notes


def _charts(found: FoundGoodput) -> list[Chart]:
    rates = sorted({probe.rate for probe in found.probes if probe.counted})
    if not rates:
        return []
    options, probes = found.options, [found.of(rate) for rate in rates]
    upright = {f"goodput {found.search.estimate:.3g}": found.search.estimate} if found.search.estimate else {}
    intervals = [wilson(sum(p.tally.kept for p in at), sum(p.judged for p in at)) for at in probes]
    low, high = map(list, zip(*intervals, strict=True))
    kept = Chart(
        f"Requests that keep: {options.slo}",
        "lines",
        "offered, req/s",
        "share of the requests",
        [Series("kept the SLO", rates, [_pooled(at) for at in probes], low, high)],
        across={f"{100 * options.share:g} %": options.share},
        upright=upright,
        better="higher",
        y_unit="share",
    )
    charts = [kept]
    for name, bound, seen in (
        ("TTFT p90", options.slo.ttft, [[v for p in at for v in p.ttfts] for at in probes]),
        ("longest gap p90", options.slo.gap, [[v for p in at for v in p.longest_gaps] for at in probes]),
    ):
        times = [percentile(values, 0.9, none=math.nan) for values in seen]
        charts.append(
            Chart(
                f"{name} against rate",
                "lines",
                "offered, req/s",
                name,
                [Series(name, rates, times)],
                across={f"SLO {1000 * bound:g} ms": bound},
                upright=upright,
                log_y=any(value > 20 * bound for value in times),
                better="lower",
                y_unit="s",
            )
        )
    return charts


def _data(found: FoundGoodput, probes: Sequence[Probe]) -> dict[str, Any]:
    options = found.options
    return {
        "slo": vars(options.slo),
        "share": options.share,
        "precision": options.precision,
        "goodput": {
            "estimate": found.search.estimate,
            "carried": found.search.carried,
            "broken": found.search.broken,
            "interval": list(found.search.interval),
            "precise": found.search.found,
        },
        "probes": [
            {
                **{name: getattr(probe, name) for name in _RAW},
                "tally": vars(probe.tally),
                **probe.run.summary(options.slo),
            }
            for probe in probes
        ],
    }
