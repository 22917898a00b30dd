"""The tables of a contest: medians for each load, ratios to the baseline, CPU seconds by process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve_bench.report import Cell, Column, Rows
from pdserve_bench.systems.contest import Record
from pdserve_bench.systems.figures import Compared, Figures, cpu_by_process
from pdserve_bench.systems.loads import GOODPUT, SystemLoad
from pdserve_bench.systems.measurement import CPU, REMOTE, REQUESTS, TOKENS, Measurement

LEAST_CPU = 0.005
"""seconds per 1,000 tokens: a process that spends less is not shown"""


@dataclass(frozen=True)
class Figure:
    name: str
    """in measurements"""
    title: str
    unit: str = ""
    spec: str = ".2f"
    scale: float = 1.0
    more_is_better: bool | None = None
    """None: it gets no ratio to the baseline"""

    @property
    def column(self) -> Column:
        return Column(f"{self.title}, {self.unit}" if self.unit else self.title, self.spec)

    def is_good(self, ratio: float) -> bool:
        return (ratio > 1) == self.more_is_better


FIGURES = (
    Figure(GOODPUT, "goodput", "req/s", more_is_better=True),
    Figure(TOKENS, "tokens/s", spec=".0f", more_is_better=True),
    Figure(REQUESTS, "req/s"),
    Figure("TTFT p50", "TTFT p50", "ms", ".0f", 1000, False),
    Figure("TTFT p99", "TTFT p99", "ms", ".0f", 1000, False),
    Figure("ITL p50", "ITL p50", "ms", ".1f", 1000, False),
    Figure("ITL p99", "ITL p99", "ms", ".0f", 1000, False),
    Figure("longest gap p99", "longest gap p99", "ms", ".0f", 1000, False),
    Figure(CPU, "CPU s per 1k tokens", "", ".2f", 1, False),
    Figure(REMOTE, "remote", "%", ".0f", 100),
)


def make_tables(record: Record, figures: Figures) -> Iterator[Rows]:
    names = [contestant.name for contestant in record.contestants]
    loads = [load for load in record.loads if figures.rounds[load.name]]
    yield from _screening(record)
    for load in loads:
        yield _of_load(load, names, record, figures)
    if loads and len(names) > 1:
        yield _ratios(loads, names, figures)
    if rows := list(_cpu(loads, names, figures)):
        columns = [Column("system"), Column("process"), *(Column(load.name, ".2f") for load in loads)]
        note = "The load generator is in no sum."
        yield Rows("CPU seconds per 1,000 output tokens, by process", columns, rows, note)
    if record.same:
        yield _answers(record, names[0])


def _screening(record: Record) -> Iterator[Rows]:
    screened = [each for each in record.screened if any(found.complete for found in each.measurements)]
    if not screened:
        return
    loads = list(dict.fromkeys(found.turn.load for each in screened for found in each.measurements))
    columns = [Column("settings")]
    for load in loads:
        columns += [Column(f"{load}: tokens/s", ".0f"), Column(f"{load}: TTFT p50, ms", ".0f")]
        columns.append(Column(f"{load}: longest gap p99, ms", ".0f"))
    rows = [[each.baseline.told, *_screened(each.measurements, loads)] for each in screened]
    best = next((number for number, each in enumerate(screened) if each.baseline == record.baseline), None)
    note = "The best by tokens/s (geometric mean) takes part. A short run each: small differences are noise."
    title = f"Settings of {record.contestants[0].name}, tried first"
    yield Rows(title, columns, rows, note, best if len(screened) > 1 else None)


def _screened(measurements: Sequence[Measurement], loads: Sequence[str]) -> Iterator[Cell]:
    for load in loads:
        found = next((each.figures for each in measurements if each.turn.load == load and each.complete), {})
        yield found.get(TOKENS)
        for name in ("TTFT p50", "longest gap p99"):
            yield 1000 * found[name] if name in found else None


def _of_load(load: SystemLoad, names: Sequence[str], record: Record, figures: Figures) -> Rows:
    compared = {
        (name, each): figures.compare(name, load.name, each.name) for name in names for each in FIGURES
    }
    present = [each for each in FIGURES if any(compared[name, each] for name in names)]
    failed = {
        name: sum(each.outcomes["failed"] for each in record.measurements if _is(each, name, load.name))
        for name in names
    }
    columns = [Column("system"), *(each.column for each in present)]
    rows: list[list[Cell]] = [
        [name, *(_median(compared[name, each], each) for each in present)] for name in names
    ]
    if any(failed.values()):
        columns.append(Column("FAILED", ".0f"))
        for row, count in zip(rows, failed.values(), strict=True):
            row.append(count)
    rounds = len(figures.rounds[load.name])
    note = f"Medians of {rounds} round{'s' * (rounds != 1)}."
    return Rows(f"{load.name}: {load.told}", columns, rows, note)


def _median(found: Compared | None, figure: Figure) -> float | None:
    return None if found is None else found.median * figure.scale


def _ratios(loads: Sequence[SystemLoad], names: Sequence[str], figures: Figures) -> Rows:
    columns = [Column("load"), Column("figure"), *(Column(name) for name in names[1:]), Column("noise")]
    rows: list[list[Cell]] = []
    for load in loads:
        for figure in (each for each in FIGURES if each.more_is_better is not None):
            found = [figures.compare(name, load.name, figure.name) for name in names[1:]]
            if any(each is not None and each.ratio is not None for each in found):
                arrow = "\N{UPWARDS ARROW}" if figure.more_is_better else "\N{DOWNWARDS ARROW}"
                noise = figures.noise(load.name, figure.name).ratios
                rows.append(
                    [load.name, f"{arrow} {figure.title}", *map(_ratio, found), _span(noise) if noise else ""]
                )
    note = (
        "Medians of the ratios round by round, and the least and the largest of them; an arrow up: more is better. "
        "Noise: the baseline against itself.\n"
        "~ is no difference: inside of the noise, or not the same way in each round."
    )
    return Rows(f"Ratios to {names[0]}", columns, rows, note)


def _ratio(found: Compared | None) -> str:
    if found is None or found.ratio is None:
        return ""
    span = f" ({_span(found.ratios)})" if len(found.ratios) > 1 else ""
    return f"{'' if found.beyond_noise else '~'}{found.ratio:.2f}{span}"


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}" if len(ratios) > 1 else f"{ratios[0]:.2f}"


def _cpu(loads: Sequence[SystemLoad], names: Sequence[str], figures: Figures) -> Iterator[list[Cell]]:
    for name in names:
        spent = [cpu_by_process(figures.measured(name, load.name)) for load in loads]
        for process in dict.fromkeys(process for each in spent for process in each):
            values = [each.get(process) for each in spent]
            if max(value or 0.0 for value in values) >= LEAST_CPU:
                yield [name, process, *values]


def _answers(record: Record, baseline: str) -> Rows:
    columns = [Column("system"), Column("equal, asked one at a time"), Column("equal, asked at once")]
    rows = [
        [name, f"{each.alone_equal} of {each.alone}", f"{each.together_equal} of {each.together}"]
        for name, each in record.same.items()
    ]
    note = (
        "With 16-bit types a batch of another size rounds differently, and a greedy answer may turn out otherwise: "
        "--dtype float32 compares exactly."
    )
    return Rows(f"Answers, token for token against {baseline}", columns, rows, note)


def _is(measurement: Measurement, name: str, load: str) -> bool:
    return measurement.turn.system == name and measurement.turn.load == load
