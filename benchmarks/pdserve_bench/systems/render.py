"""The report of a contest: medians for each load, ratios to the baseline, CPU seconds by process, as tables and charts,
and what they say in sentences."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from pdserve.plan.plan import Plan
from pdserve_bench.report import Cell, Chart, Column, Report, Rows, Series
from pdserve_bench.systems.contest import GRAPH, Record
from pdserve_bench.systems.figures import ALL, LOAD_GENERATOR, Compared, Figures, cpu_by_process
from pdserve_bench.systems.loads import ANSWER, CPU, REMOTE, REQUESTS, TOKENS, ClosedLoad, Measurement

NOISY_NEIGHBOURS = 0.1
"""share of each core of the machine from which on other programs are warned of"""
BUSY_IDLE = 0.25
"""share of a core that idle systems may take before it is warned of"""
SHORTER = 0.05
"""share by which answers may differ in length from the baseline's before it is warned of"""
UNSTEADY = 1.5
"""factor between two turns of the baseline from which on it is warned of"""
WORTH_TELLING = 0.03
"""of a ratio: smaller differences stand in the table only"""
LEAST_CPU = 0.005
"""seconds per 1,000 tokens: a process that spends less is not shown"""
_MOST_ERRORS = 5


@dataclass(frozen=True)
class Figure:
    name: str
    """in measurements"""
    title: str
    spec: str
    unit: str = ""
    scale: float = 1.0
    more_is_better: bool | None = None
    """None: it gets no ratio to the baseline"""
    charted: bool = False

    @property
    def column(self) -> Column:
        return Column(f"{self.title}, {self.unit}" if self.unit else self.title, self.spec)


FIGURES = (
    Figure(TOKENS, "tokens/s", ".0f", more_is_better=True, charted=True),
    Figure(REQUESTS, "req/s", ".2f"),
    Figure("TTFT p50", "TTFT p50", ".0f", "ms", 1000, False, charted=True),
    Figure("TTFT p99", "TTFT p99", ".0f", "ms", 1000, False),
    Figure("ITL p50", "ITL p50", ".1f", "ms", 1000, False),
    Figure("ITL p99", "ITL p99", ".0f", "ms", 1000, False),
    Figure("longest gap p99", "longest gap p99", ".0f", "ms", 1000, False, charted=True),
    Figure(CPU, "CPU s per 1k tokens", ".2f", more_is_better=False, charted=True),
    Figure(REMOTE, "remote", ".0f", "%", 100),
)
_SCREENED = [figure for figure in FIGURES if figure.name in (TOKENS, "TTFT p50", "longest gap p99")]
_RATED = [figure for figure in FIGURES if figure.more_is_better is not None]


def make_report(record: Record, plan: Plan, complete: bool) -> Report:
    figures = Figures(record.plan, record.measurements, record.contestants[0].name)
    report = Report(f"One engine against the graph: {plan.config.path.name}", complete=complete)
    report.tables = list(_tables(record, figures))
    report.charts = list(_charts(record, figures))
    report.notes = [*_what(record), *_warnings(record, figures, plan.machine.cores), _accounted(record)]
    report.lead = lead(record, figures)
    report.data = _data(record, figures)
    return report


def lead(record: Record, figures: Figures) -> str:
    """What is better and what is worse under each load, of the graph as it decides."""
    names = [contestant.name for contestant in record.contestants]
    name, told = GRAPH if GRAPH in names else names[-1], list[str]()
    for load in (load.name for load in record.loads if figures.rounds[load.name]):
        good, bad = list[str](), list[str]()
        for figure in _RATED:
            found = figures.compare(name, load, figure.name)
            if found and found.ratio and found.beyond_noise and abs(found.ratio - 1) >= WORTH_TELLING:
                better = (found.ratio > 1) == figure.more_is_better
                (good if better else bad).append(f"{figure.title} {found.ratio:.2f}x")
        parts = [
            f"{word} in {', '.join(items)}" for word, items in (("better", good), ("worse", bad)) if items
        ]
        if failed := _failed(record, name, load):
            parts.append(f"{failed} requests FAILED, so its load was another")
        told.append(f"{load}: {'; '.join(parts) or 'no difference beyond the noise'}.")
    if not told:
        return "No round is complete: nothing can be compared."
    return f"{name} against {names[0]}. {' '.join(told)}"


# tables


def _tables(record: Record, figures: Figures) -> Iterator[Rows]:
    names = [contestant.name for contestant in record.contestants]
    loads = [load for load in record.loads if figures.rounds[load.name]]
    if any(found.complete for found in record.screening):
        yield _screening(record, names[0])
    for load in loads:
        yield _of_load(load, names, record, figures)
    if loads and len(names) > 1:
        yield _ratios(loads, names, figures)
    if rows := list(_cpu_rows(loads, names, figures)):
        columns = [Column("system"), Column("process"), *(Column(load.name, ".2f") for load in loads)]
        note = "The load generator is in no sum."
        yield Rows("CPU seconds per 1,000 output tokens, by process", columns, rows, note)
    if record.same:
        answers: list[list[Cell]] = [
            [name, f"{each.alone_equal} of {each.alone}", f"{each.together_equal} of {each.together}"]
            for name, each in record.same.items()
        ]
        yield Rows(
            f"Answers, token for token against {names[0]}",
            [Column("system"), Column("equal, asked one at a time"), Column("equal, asked at once")],
            answers,
            "With 16-bit types a batch of another size rounds differently, and a greedy answer may turn out "
            "otherwise: --dtype float32 compares exactly.",
        )


def _screening(record: Record, baseline: str) -> Rows:
    loads = list(dict.fromkeys(found.turn.load for found in record.screening))
    columns = [
        replace(each.column, name=f"{load}: {each.column.name}") for load in loads for each in _SCREENED
    ]
    rows: list[list[Cell]] = []
    for tried in record.screened:
        of = {found.turn.load: found.figures for found in tried.measurements}
        cells = [_scaled(of.get(load, {}).get(each.name), each) for load in loads for each in _SCREENED]
        rows.append([tried.baseline.told, *cells])
    mean = " (geometric mean)" if len(loads) > 1 else ""
    note = f"The best by tokens/s{mean} takes part. A short run each: small differences are noise."
    best = next((at for at, each in enumerate(record.screened) if each.baseline == record.baseline), None)
    title = f"Settings of {baseline}, tried first"
    return Rows(title, [Column("settings"), *columns], rows, note, best if len(rows) > 1 else None)


def _of_load(load: ClosedLoad, names: Sequence[str], record: Record, figures: Figures) -> Rows:
    compared = {
        name: {each: figures.compare(name, load.name, each.name) for each in FIGURES} for name in names
    }
    present = [each for each in FIGURES if any(compared[name][each] for name in names)]
    failed = {name: _failed(record, name, load.name) for name in names}
    columns = [Column("system"), *(each.column for each in present)]
    rows: list[list[Cell]] = [
        [name, *(_scaled(found.median if (found := of[each]) else None, each) for each in present)]
        for name, of in compared.items()
    ]
    if any(failed.values()):
        columns.append(Column("FAILED", ".0f"))
        rows = [[*row, failed[name]] for name, row in zip(names, rows, strict=True)]
    rounds = len(figures.rounds[load.name])
    note = f"Medians of {rounds} round{'s' * (rounds != 1)}."
    return Rows(f"{load.name}: {load}", columns, rows, note)


def _scaled(value: float | None, figure: Figure) -> float | None:
    return None if value is None else value * figure.scale


def _ratios(loads: Sequence[ClosedLoad], names: Sequence[str], figures: Figures) -> Rows:
    columns = [Column("load"), Column("figure"), *(Column(name) for name in names[1:]), Column("noise")]
    rows: list[list[Cell]] = []
    for load in loads:
        for figure in _RATED:
            found = [figures.compare(name, load.name, figure.name) for name in names[1:]]
            if any(each and each.ratios for each in found):
                arrow = "\N{UPWARDS ARROW}" if figure.more_is_better else "\N{DOWNWARDS ARROW}"
                noise = figures.noise(load.name, figure.name)
                rows.append([load.name, f"{arrow} {figure.title}", *map(_ratio, found), _span(noise)])
    note = (
        "Medians of the ratios round by round, and the least and the largest of them; an arrow up: more is better. "
        "Noise: the baseline against itself.\n"
        "~ may well be noise: not beyond what that explains (95 %, Student's t), or not the same way in each round."
    )
    return Rows(f"Ratios to {names[0]}", columns, rows, note)


def _ratio(found: Compared | None) -> str:
    if found is None or found.ratio is None:
        return ""
    span = f" ({_span(found.ratios)})" if len(found.ratios) > 1 else ""
    return f"{'' if found.beyond_noise else '~'}{found.ratio:.2f}{span}"


def _span(ratios: Sequence[float]) -> str:
    return "-".join(dict.fromkeys(f"{end:.2f}" for end in (min(ratios), max(ratios)))) if ratios else ""


def _cpu_rows(loads: Sequence[ClosedLoad], names: Sequence[str], figures: Figures) -> Iterator[list[Cell]]:
    for name in names:
        spent = [cpu_by_process(figures.measured(name, load.name)) for load in loads]
        for process in dict.fromkeys(process for each in spent for process in each):
            values = [each.get(process) for each in spent]
            if max(value or 0.0 for value in values) >= LEAST_CPU:
                yield [name, process, *values]


def _failed(record: Record, name: str, load: str) -> int:
    turns = [each for each in record.measurements if (each.turn.system, each.turn.load) == (name, load)]
    return sum(each.outcomes.get("failed", 0) for each in turns)


# charts


def _charts(record: Record, figures: Figures) -> Iterator[Chart]:
    names = [contestant.name for contestant in record.contestants]
    loads = [load.name for load in record.loads if figures.rounds[load.name]]
    for figure in (each for each in FIGURES if each.charted):
        if series := list(_ratio_bars(figure.name, names, loads, figures)):
            title = f"{figure.title}, ratio to {names[0]}"
            better: Literal["higher", "lower"] = "higher" if figure.more_is_better else "lower"
            yield Chart(title, "bars", "load", "ratio", series, across={names[0]: 1.0}, better=better)
    for load in loads:
        samples = {
            name: [ttft for each in figures.measured(name, load) for ttft in each.ttfts] for name in names
        }
        if series := [
            Series(name, ttfts, [], baseline=name == names[0]) for name, ttfts in samples.items() if ttfts
        ]:
            title = f"Time to the first token, {load}"
            yield Chart(title, "cdf", "TTFT", "share of requests", series, x_unit="s", better="lower")
    for load in loads:
        if series := list(_cpu_bars(load, names, figures)):
            title = f"CPU seconds per 1,000 output tokens, {load}"
            yield Chart(title, "bars", "system", "CPU s", series, better="lower")


def _ratio_bars(
    figure: str, names: Sequence[str], loads: Sequence[str], figures: Figures
) -> Iterator[Series]:
    for name in names[1:]:
        found = {load: figures.compare(name, load, figure) for load in loads}
        kept = {load: each for load, each in found.items() if each and each.ratios}
        if kept:
            low, high = ([end(each.ratios) for each in kept.values()] for end in (min, max))
            yield Series(name, list(kept), [each.ratio for each in kept.values()], low, high)


def _cpu_bars(load: str, names: Sequence[str], figures: Figures) -> Iterator[Series]:
    """A group of bars for each system, and in it a bar for each kind of process."""
    spent = {name: cpu_by_process(figures.measured(name, load)) for name in names}
    known = {name: found for name, found in spent.items() if ALL in found}
    labels = dict.fromkeys(
        label
        for found in known.values()
        for label, value in found.items()
        if label not in (ALL, LOAD_GENERATOR) and value >= LEAST_CPU
    )
    for label in labels:
        yield Series(label, list(known), [found.get(label) for found in known.values()])


# notes


def _what(record: Record) -> Iterator[str]:
    baseline, *others = record.contestants
    chosen = record.baseline
    settings = f"{chosen.hardware}, {chosen.batch_told}" if chosen else "not started"
    yield f"{baseline.name}: {baseline.told}: {settings}."
    for contestant in others:
        yield f"{contestant.name}: {contestant.told}."
    if not record.in_turn:
        yield "They ran side by side: each was measured beside the idle others."
    yield from record.notes


def _warnings(record: Record, figures: Figures, cores: int) -> Iterator[str]:
    baseline = record.contestants[0].name
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
                f"{baseline}, though asked one at a time."
            )
    for load in record.loads:
        noise = figures.noise(load.name, TOKENS)
        if noise and max(*noise, 1 / min(noise)) > UNSTEADY:
            yield (
                f"WARNING: {load.name}: {baseline} differs from itself by a factor of up to "
                f"{max(*noise, 1 / min(noise)):.1f} in tokens/s: ratios to it say little."
            )
        for contestant in record.contestants[1:]:
            found = figures.compare(contestant.name, load.name, ANSWER)
            if found and found.ratio and abs(found.ratio - 1) > SHORTER:
                yield (
                    f"WARNING: {load.name}: {contestant.name}'s answers have {found.median:.0f} tokens, "
                    f"{found.ratio:.2f} times those of {baseline}: its load was another."
                )
    tried = (*record.screening, *record.measurements)
    errors = [error for each in tried for error in each.errors]
    errors += [each.error for each in record.compared if each.error]
    yield from (f"Failed: {error}" for error in list(dict.fromkeys(errors))[:_MOST_ERRORS])


def _accounted(record: Record) -> str:
    told = ", ".join(f"{count:,} {outcome}" for outcome, count in record.outcomes.items())
    return f"Requests, warm-up and comparison included: {told}."


def _data(record: Record, figures: Figures) -> dict[str, object]:
    """Everything raw: each turn of each round, in seconds and shares of a core."""
    return {
        "baseline": record.baseline
        and {"settings": record.baseline.told, "hardware": record.baseline.hardware},
        "contestants": [asdict(each) for each in record.contestants],
        "loads": {load.name: str(load) for load in record.loads},
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
        "answers": {name: asdict(each) for name, each in record.same.items()},
        "outcomes": record.outcomes,
    }


def _turn(measurement: Measurement) -> dict[str, object]:
    found = asdict(measurement)
    found |= found.pop("turn")
    found["cpu"] = dict(measurement.cpu.seconds)
    found["cpu_per_1000_tokens"] = measurement.cpu_per_token
    return found
