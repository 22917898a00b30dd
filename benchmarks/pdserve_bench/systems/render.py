"""The report of a contest: its tables, its charts, and what they say in sentences."""

from collections.abc import Iterator
from dataclasses import asdict

from pdserve.plan.plan import Plan
from pdserve_bench.report import Report
from pdserve_bench.systems.contest import Record
from pdserve_bench.systems.contestants import GRAPH
from pdserve_bench.systems.figures import Figures
from pdserve_bench.systems.measurement import Measurement
from pdserve_bench.systems.pictures import make_charts
from pdserve_bench.systems.tables import FIGURES, make_tables

NOISY_NEIGHBOURS = 0.1
"""share of each core of the machine from which on other programs are warned of"""
BUSY_IDLE = 0.25
"""share of a core that idle systems may take before it is warned of"""
WORTH_TELLING = 0.03
"""of a ratio: smaller differences stand in the table only"""
_MOST_ERRORS = 5


def make_report(record: Record, plan: Plan, complete: bool) -> Report:
    figures = Figures(record.plan, record.measurements, record.contestants[0].name)
    report = Report(f"One engine against the graph: {plan.config.path.name}", complete=complete)
    report.tables = list(make_tables(record, figures))
    report.charts = list(make_charts(record, figures))
    report.notes = [*_what(record), *_warnings(record, plan.machine.cores), _accounted(record)]
    report.lead = lead(record, figures)
    report.data = _data(record, figures)
    return report


def lead(record: Record, figures: Figures) -> str:
    """What is better and what is worse under each load, of the graph as it decides."""
    names = [contestant.name for contestant in record.contestants]
    name, told = GRAPH if GRAPH in names else names[-1], list[str]()
    for load in (load.name for load in record.loads if figures.rounds[load.name]):
        good, bad = list[str](), list[str]()
        for figure in FIGURES:
            found = figures.compare(name, load, figure.name)
            if found is None or found.ratio is None or figure.more_is_better is None:
                continue
            if found.beyond_noise and abs(found.ratio - 1) >= WORTH_TELLING:
                (good if figure.is_good(found.ratio) else bad).append(f"{figure.title} {found.ratio:.2f}x")
        parts = [
            f"{word} in {', '.join(items)}" for word, items in (("better", good), ("worse", bad)) if items
        ]
        told.append(f"{load}: {'; '.join(parts) or 'no difference beyond the noise'}.")
    if not told:
        return "No round is complete: nothing can be compared."
    return f"{name} against {names[0]}. {' '.join(told)}"


def _what(record: Record) -> Iterator[str]:
    baseline, *others = record.contestants
    chosen = record.baseline
    settings = f"{chosen.hardware}, {chosen.batch_told}" if chosen else "not started"
    yield f"{baseline.name}: {baseline.told}: {settings}."
    for contestant in others:
        yield f"{contestant.name}: {contestant.told}."
    idle = {name: reading for name, reading in record.idle.items() if reading.seconds}
    if idle:
        told = ", ".join(f"{name} {100 * each.total / each.at:.1f} %" for name, each in idle.items())
        beside = "" if record.in_turn else " They ran side by side: each was measured beside the idle others."
        yield f"Idle, of one core: {told}.{beside}"
    yield from record.notes


def _warnings(record: Record, cores: int) -> Iterator[str]:
    measured = [each for each in record.measurements if each.complete]
    if busy := [each.idle for each in measured if each.idle > BUSY_IDLE]:
        yield (
            f"WARNING: in {len(busy)} of {len(measured)} turns the systems that were not measured took up to "
            f"{100 * max(busy):.0f} % of a core: use --in-turn."
        )
    if others := [each.strangers for each in measured if each.strangers > NOISY_NEIGHBOURS * cores]:
        yield (
            f"WARNING: in {len(others)} of {len(measured)} turns other programs took up to {100 * max(others):.0f} % "
            f"of a core, of {cores} cores: measure on a quiet machine."
        )
    for name, same in record.same.items():
        if same.alone_equal < same.alone:
            yield (
                f"WARNING: {name} answered {same.alone - same.alone_equal} of {same.alone} prompts otherwise than "
                f"{record.contestants[0].name}, though asked one at a time."
            )
    screening = [each for screened in record.screened for each in screened.measurements]
    errors = dict.fromkeys(error for each in (*screening, *record.measurements) for error in each.errors)
    yield from (f"Failed: {error}" for error in list(errors)[:_MOST_ERRORS])


def _accounted(record: Record) -> str:
    outcomes = record.outcomes
    told = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
    return f"Requests, warm-up and comparison included: {told or 'none'}."


def _data(record: Record, figures: Figures) -> dict[str, object]:
    """Everything raw: each turn of each round, in seconds and shares of a core."""
    return {
        "baseline": record.baseline
        and {"settings": record.baseline.told, "hardware": record.baseline.hardware},
        "contestants": [asdict(each) for each in record.contestants],
        "loads": {load.name: load.told for load in record.loads},
        "planned_turns": len(record.plan),
        "complete_rounds": figures.rounds,
        "screening": [
            {
                "settings": each.baseline.told,
                "score": each.score,
                "turns": list(map(_turn, each.measurements)),
            }
            for each in record.screened
        ],
        "turns": list(map(_turn, record.measurements)),
        "idle_cpu": {name: each.total / each.at for name, each in record.idle.items() if each.seconds},
        "answers": {name: asdict(each) for name, each in record.same.items()},
        "outcomes": record.outcomes,
    }


def _turn(measurement: Measurement) -> dict[str, object]:
    found = asdict(measurement)
    found |= found.pop("turn")
    found["cpu"] = measurement.cpu and dict(measurement.cpu.seconds)
    found["cpu_per_1000_tokens"] = measurement.cpu_per_token
    return found
