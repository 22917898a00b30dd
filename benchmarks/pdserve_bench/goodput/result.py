"""Search the goodput of a server and report it.

`find_goodput(endpoint, users, result)` fills a `GoodputResult(options)`, which can be read at any time, as after
Ctrl-C.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from pdserve_bench.client import Outcome
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.goodput.measure import Canary, GoodputOptions, Probe, probe, warm_up
from pdserve_bench.goodput.search import GoodputSearch
from pdserve_bench.measure.report import Cell, Column, Report, Rows
from pdserve_bench.measure.runs import LoadRun, Scalable
from pdserve_bench.measure.samples import CONFIDENCE, percentile, wilson
from pdserve_bench.measure.slo import Slo, Tally
from pdserve_bench.progress import begin, say

_WARM_SECONDS, _WARM_RATE = 4.0, 4.0
_STALLED = 0.25
"""Delays of the load generator above this share of the SLO's gap are reported."""
_ERRORS = 3


class GoodputResult:
    def __init__(self, options: GoodputOptions) -> None:
        self.options = options
        self.probes: list[Probe] = []
        """The last one may be running: its `run.ended` is 0."""
        self.search = GoodputSearch(
            options.start_rate,
            options.share,
            options.precision,
            options.lowest,
            options.highest,
            options.most_probes,
        )
        self.complete = False
        """The search has ended, neither interrupted nor out of time."""

    def of(self, rate: float | None) -> list[Probe]:
        """Return the counted probes at this rate."""
        return [probe for probe in self.probes if probe.rate == rate and probe.counted]

    def share(self, rate: float) -> float:
        """Return the share of judged requests at this rate that kept the SLO."""
        judged = self.judged(rate)
        return sum(probe.tally.kept for probe in self.of(rate)) / judged if judged else 1.0

    def judged(self, rate: float) -> int:
        return sum(probe.judged for probe in self.of(rate))

    @property
    def thin(self) -> float | None:
        """An end of the interval to probe again, because it has too few judged requests (`options.least`). The broken
        end is probed again at most once, and not if the share that kept the SLO is surely under half of
        `options.share`."""
        least, low, high = self.options.least, self.search.carried, self.search.broken
        if low is not None and self.judged(low) < least:
            return low
        if high is not None and self.judged(high) < least and len(self.of(high)) < 2:
            kept = sum(probe.tally.kept for probe in self.of(high))
            return high if wilson(kept, self.judged(high))[1] > self.options.share / 2 else None
        return None


async def find_goodput(
    endpoint: Endpoint,
    users: Scalable,
    result: GoodputResult,
    name: str = "goodput",
) -> None:
    """Fill or continue the result. Raises Unavailable if the server fails all requests or does not become idle."""
    options, search = result.options, result.search
    deadline = time.monotonic() + options.budget
    canary = Canary(endpoint)
    await canary.learn()
    if options.warm_up:
        slowly, briefly = min(_WARM_RATE, options.start_rate), min(_WARM_SECONDS, options.seconds)
        begin(f"{name}: warming up", briefly)
        await warm_up(endpoint, users, slowly, briefly, options.seed - 1)
        await canary.until_idle()
    while (rate := search.next() or result.thin) is not None:
        seconds = _probe_seconds(rate, options)
        if time.monotonic() + seconds > deadline:
            return
        made = Probe(rate, seconds, options.seed + len(result.probes))
        result.probes.append(made)
        begin(f"{name}: {rate:.3g} req/s", seconds)
        await probe(endpoint, users, made, options)
        await canary.until_idle()
        made.counted = True
        search.tell(rate, made.tally.kept, made.judged)
        say(f"{name}: {_line(result, made)}")
    result.complete = True


def _probe_seconds(rate: float, options: GoodputOptions) -> float:
    """Return the seconds of a probe. With a share of 90 %, a low rate gets time for 49 requests, but at most
    `options.longer` times `seconds`. If all keep the SLO, half of 49 prove a rate carried (Wilson's interval)."""
    least = 2 * CONFIDENCE**2 * options.share / max(0.02, 1 - options.share)
    return max(options.seconds, min(least / rate, options.longer * options.seconds))


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


def report_of(result: GoodputResult, title: str) -> Report:
    probes = sorted((probe for probe in result.probes if probe.run.ended), key=lambda probe: probe.rate)
    options, search = result.options, result.search
    data = {
        "slo": vars(options.slo),
        "share": options.share,
        "precision": options.precision,
        "goodput": {
            "estimate": search.estimate,
            "carried": search.carried,
            "broken": search.broken,
            "interval": list(search.interval),
            "precise": search.found,
        },
        "probes": [_raw(each, options) for each in result.probes if each.run.ended],
    }
    return Report(
        title,
        lead_of(result),
        tables=[_table(result, probes)] if probes else [],
        notes=_notes(result, probes),
        complete=result.complete,
        data=data,
    )


def lead_of(result: GoodputResult) -> str:
    options, low, high = result.options, result.search.carried, result.search.broken
    promise = f"{100 * options.share:g} % of the requests keep the SLO: {options.slo}"
    missed = sum((each.tally for each in result.of(high)), Tally()).describe()
    if low is None and high is None:
        return f"No probe came to its end: it is not known up to which rate {promise}."
    if high is None:
        return f"Goodput: at least {low:.3g} req/s, the highest rate that was tried: {promise}."
    if low is None:
        return f"At no rate {promise}. At {high:.3g} req/s, the lowest that was tried, missed: {missed}."
    return (
        f"Goodput: {result.search.estimate:.3g} req/s (very likely {_between(*result.search.interval)}). "
        f"Up to {low:.3g} req/s, {promise}. At {high:.3g} req/s only {100 * result.share(high):.0f} % do; "
        f"missed: {missed}."
    )


def _line(result: GoodputResult, made: Probe) -> str:
    parts = [f"{made.rate:.3g} req/s: {100 * made.share:.0f} % of {made.judged} kept"]
    parts += [f"missed: {missed}"] if (missed := made.tally.describe()) else []
    parts += [f"({remark})"] if (remark := _remark(made)) else []
    return f"{', '.join(parts)}; goodput {_between(result.search.carried, result.search.broken)}"


def _between(low: float | None, high: float | None) -> str:
    if high is None:
        return f"over {low:.3g}" if low else "not known yet"
    return f"{low:.3g} to {high:.3g}" if low else f"under {high:.3g}"


def _remark(made: Probe) -> str:
    if not made.counted:
        return "not ended"
    return "hopeless, cut short" if made.hopeless else ""


def _table(result: GoodputResult, probes: list[Probe]) -> Rows:
    counts = {
        "sent": "requests", "broke TTFT": "ttft", "broke a gap": "gap", "both": "both", "failed": "failed",
        "unfinished": "unfinished",
    }  # fmt: skip
    columns = [
        Column("offered, req/s", ".3g"),
        Column("kept, %", ".1f"),
        *(Column(name, "d") for name in counts),
    ]
    columns += [Column(name, ".0f") for name in ("TTFT p50, ms", "TTFT p90, ms", "longest gap p90, ms")]
    rows: list[list[Cell]] = [
        [
            each.rate,
            100 * each.share if each.judged else None,
            *(getattr(each.tally, name) for name in counts.values()),
            *(1000 * percentile(each.ttfts, share) if each.ttfts else None for share in (0.5, 0.9)),
            1000 * percentile(each.longest_gaps, 0.9) if each.longest_gaps else None,
            _remark(each),
        ]
        for each in probes
    ]
    options = result.options
    return Rows(
        f"Probes, by rate: Poisson arrivals for {options.seconds:g} s, {options.slo}",
        [*columns, Column("remark")],
        rows,
        "Shares leave out requests that a hopeless probe cut short before they broke a bound (unfinished). "
        "TTFT is of requests that had a first token, or waited for it beyond the SLO.",
    )


def stalled(probes: Sequence[Probe], slo: Slo) -> list[str]:
    """Return a note if the load generator was late."""
    worst = max(probes, key=lambda probe: probe.stall, default=None)
    if worst is None or worst.stall <= _STALLED * slo.gap:
        return []
    return [
        f"The load generator itself was late by up to {1000 * worst.stall:.0f} ms (at {worst.rate:.3g} req/s): the "
        "limit may be this client's or its machine's. Run it where it has a core of its own."
    ]


def _notes(result: GoodputResult, probes: list[Probe]) -> list[str]:
    notes = stalled(probes, result.options.slo)
    done = [each for probe in probes for each in probe.run.of(Outcome.FINISHED) if each.prompt_tokens]
    if done:
        prompt = statistics.median(each.prompt_tokens for each in done)
        answer = statistics.median(each.output_tokens for each in done)
        notes.append(f"As the server counts, prompts had {prompt:g} tokens and answers {answer:g} (median).")
    errors = LoadRun([each for probe in probes for each in probe.run.exchanges]).errors()
    return notes + [f"{count} requests failed: {text}" for text, count in errors[:_ERRORS]]


def _raw(made: Probe, options: GoodputOptions) -> dict[str, Any]:
    names = ("rate", "seconds", "seed", "share", "judged", "counted", "hopeless", "stall")
    plain = {name: getattr(made, name) for name in names}
    return {**plain, "tally": vars(made.tally), **made.run.summary(options.slo)}
