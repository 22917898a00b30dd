"""A comparison's report, and the winner's configuration file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pdserve.util.program import pdserve_command
from pdserve_bench.compare.candidates import Candidate
from pdserve_bench.compare.comparison import Comparison
from pdserve_bench.compare.recommend import CandidateResult, Recommendation, Verdict
from pdserve_bench.compare.systems import PlainVllm
from pdserve_bench.goodput.result import stalled
from pdserve_bench.graphs.sections import read_sections, reshape, with_model
from pdserve_bench.measure.report import Cell, Column, Report, Rows

_COLUMNS = (
    Column("candidate"),
    Column("goodput", ".3g"),
    Column("between"),
    Column("at", ".3g"),
    Column("kept", ".0%"),
    Column("TTFT p50", ".0f"),
    Column("p90", ".0f"),
    Column("gap p90", ".0f"),
    Column("breaks on"),
)


def report_of(comparison: Comparison, complete: bool, written: Path | None = None) -> Report:
    options, found = comparison.options, comparison.recommendation()
    results = comparison.results()
    report = Report(
        f"Should I disaggregate? {comparison.asked.described}, on {comparison.here}",
        complete=complete,
        data={
            "verdict": found.verdict.value,
            "choice": found.choice.name if found.choice else None,
            "preliminary": not complete,
            "noise": comparison.noise,
            "foreign": comparison.foreign_share,
            "doubts": list(found.doubts),
            "rate": options.rate,
            "results": msgspec.to_builtins(results),
        },
    )
    report.tables.append(_table(comparison, results, found))
    report.notes = _notes(comparison, found)
    if not complete and found.verdict is not Verdict.UNKNOWN:
        report.verdict = f"Preliminary: {found.headline}"
    else:
        report.verdict = found.headline[0].upper() + found.headline[1:]
    report.lead = " ".join(
        filter(None, (*found.doubts, found.reason, found.otherwise, _next_step(comparison, found, written)))
    )
    return report


def _table(comparison: Comparison, results: Sequence[CandidateResult], found: Recommendation) -> Rows:
    options = comparison.options
    best = [place for place, each in enumerate(results) if found.choice and each.name == found.choice.name]
    note = (
        f"Goodput: the highest rate, in requests/s, at which {options.share:.0%} of the requests keep the SLO "
        f"({options.slo}). Between: the rates between which it lies. At: --rate, else the highest rate that the "
        "candidate carries. At this rate: the share that kept the SLO, TTFT, and the longest gap of a request (ms)."
    )
    title = f"{comparison.asked.described}, on {comparison.here}"
    return Rows(title, _COLUMNS, [_row(each) for each in results], note, best[0] if best else None)


def _row(result: CandidateResult) -> list[Cell]:
    if not result.probed:
        return [result.name, None, result.problem or "not measured", *[None] * 6]
    high = f"{result.broken:.3g}" if result.broken is not None else "?"
    load = result.load
    seen: list[Cell] = [None] * 5
    if load is not None:
        times = (load.ttft[0], load.ttft[1], load.gap[1])
        seen = [load.rate, load.share, *(1000 * each for each in times)]
    between = f"{result.carried:.3g} and {high}" if result.carried is not None else f"under {high}"
    return [result.name, result.estimate, between, *seen, result.broke.describe().partition(" ")[0]]


def _notes(comparison: Comparison, found: Recommendation) -> list[str]:
    notes = stalled([probe for each in comparison.entrants for probe in each.probes], comparison.options.slo)
    if (foreign := comparison.foreign_share) is not None:
        notes.append(f"Other programs took {foreign:.0%} of this machine's CPU during the probes.")
    if comparison.noise is not None:
        itself = f"differed from itself by {comparison.noise:.0%}"
        notes.append(f"Noise: the aggregated engine, measured twice, {itself}.")
    return [*notes, *found.notes, *comparison.notes]


def _next_step(comparison: Comparison, found: Recommendation, written: Path | None) -> str:
    candidate = comparison.candidate(found)
    if candidate is None:
        return ""
    if written is not None:
        threads = f"OMP_NUM_THREADS={candidate.threads} " if candidate.threads else ""
        return f"Run it: {threads}{pdserve_command(f'serve -f {written}')}"
    if (candidate.shape.prefill, candidate.shape.decode) == comparison.maker.own_split:
        return f"Run it: {pdserve_command(f'serve -f {comparison.options.file}')}"
    return f"Add --write FILE to write the file of that candidate, for {pdserve_command('serve -f FILE')}."


def winning_file(comparison: Comparison, candidate: Candidate, found: Recommendation) -> str:
    base = with_model(read_sections(comparison.options.file), _model_as_written(comparison))
    sections: dict[str, Any] = reshape(base, candidate.shape)
    head = [
        f"Written by `pdserve compare -f {comparison.options.file}`: {candidate.name}.",
        f"Load: {comparison.asked.described}, SLO: {comparison.options.slo}, on {comparison.here}.",
        found.headline[0].upper() + found.headline[1:],
        *found.doubts,
        found.reason,
    ]
    if isinstance(candidate.system, PlainVllm):
        head.append(
            "It was measured as plain vLLM (`vllm serve` with these arguments), without a frontend before it."
        )
    if candidate.threads:
        head.append(f"It was measured with OMP_NUM_THREADS={candidate.threads}: start it with that too.")
    comment = "".join(f"# {line}\n" for line in head)
    return comment + yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=100)


def _model_as_written(comparison: Comparison) -> str:
    """Return `demo`, a hub id or an absolute path, so that the file works in every folder."""
    for section in read_sections(comparison.options.file).values():
        if section.get("model") == "demo":
            return "demo"
    return comparison.config.model
