"""The charts of a contest: ratios to the baseline, times to the first token, CPU seconds by process."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pdserve_bench.report import Chart, Series
from pdserve_bench.systems.contest import Record
from pdserve_bench.systems.figures import ALL, LOAD_GENERATOR, Figures, cpu_by_process
from pdserve_bench.systems.loads import GOODPUT, SystemLoad
from pdserve_bench.systems.measurement import CPU, TOKENS
from pdserve_bench.systems.tables import FIGURES, LEAST_CPU, Figure

_CHARTED = (GOODPUT, TOKENS, "TTFT p50", "longest gap p99", CPU)


def make_charts(record: Record, figures: Figures) -> Iterator[Chart]:
    names = [contestant.name for contestant in record.contestants]
    loads = [load for load in record.loads if figures.rounds[load.name]]
    for figure in FIGURES:
        if figure.name in _CHARTED and (series := list(_ratios(figure, names, loads, figures))):
            title = f"{figure.title}, ratio to {names[0]}"
            better: Literal["higher", "lower"] = "higher" if figure.more_is_better else "lower"
            yield Chart(title, "bars", "load", "ratio", series, across={names[0]: 1.0}, better=better)
    for load in loads:
        if series := list(_ttfts(load, names, figures)):
            title = f"Time to the first token, {load.name}"
            yield Chart(title, "cdf", "TTFT", "share of requests", series, x_unit="s", better="lower")
    for load in loads:
        if series := list(_cpu(load, names, figures)):
            title = f"CPU seconds per 1,000 output tokens, {load.name}"
            yield Chart(title, "bars", "system", "CPU s", series, better="lower")


def _ratios(
    figure: Figure, names: Sequence[str], loads: Sequence[SystemLoad], figures: Figures
) -> Iterator[Series]:
    for name in names[1:]:
        found = {load.name: figures.compare(name, load.name, figure.name) for load in loads}
        kept = {load: each for load, each in found.items() if each is not None and each.ratios}
        if kept:
            low, high = ([end(each.ratios) for each in kept.values()] for end in (min, max))
            yield Series(name, list(kept), [each.ratio for each in kept.values()], low, high)


def _ttfts(load: SystemLoad, names: Sequence[str], figures: Figures) -> Iterator[Series]:
    for name in names:
        samples = [ttft for each in figures.measured(name, load.name) for ttft in each.ttfts]
        if samples:
            yield Series(name, samples, [], baseline=name == names[0])


def _cpu(load: SystemLoad, names: Sequence[str], figures: Figures) -> Iterator[Series]:
    """A group of bars for each system, and in it a bar for each kind of process."""
    spent = {name: cpu_by_process(figures.measured(name, load.name)) for name in names}
    known = {name: found for name, found in spent.items() if ALL in found}
    labels = dict.fromkeys(
        label
        for found in known.values()
        for label, value in found.items()
        if label not in (ALL, LOAD_GENERATOR) and value >= LEAST_CPU
    )
    for label in labels:
        yield Series(label, list(known), [found.get(label) for found in known.values()])
