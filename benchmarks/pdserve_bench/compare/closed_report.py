"""Closed loops as a report: medians for each load, ratios to the best single engine."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from pdserve_bench.compare.closed import ANSWER, CPU, REMOTE, TIMES, TOKENS, ClosedLoops, Measured, score
from pdserve_bench.compare.recommend import QUIET
from pdserve_bench.report import Cell, Chart, Column, Report, Rows, Series
from pdserve_bench.samples import median_ratio

_STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""quantiles of Student's t distribution by its degrees of freedom: 95 % between plus and minus"""
_WORTH_TELLING = 0.03
_SHORTER = 0.05
"""share by which answers may differ in length from the baseline's before a note says so"""
_MOST_ERRORS = 5


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str = ""
    scale: float = 1.0
    more_is_better: bool | None = None
    """None: it gets no ratio to the baseline"""

    @property
    def label(self) -> str:
        arrows = {True: "\N{UPWARDS ARROW} ", False: "\N{DOWNWARDS ARROW} ", None: ""}
        return f"{arrows[self.more_is_better]}{self.name}{self.unit}"


FIGURES = (
    Figure(TOKENS, more_is_better=True),
    *(Figure(name, ", ms", 1000, more_is_better=False) for name in TIMES),
    Figure(CPU, more_is_better=False),
    Figure(REMOTE, ", %", 100),
)


@dataclass(frozen=True)
class Compared:
    """A figure of a system under a load, over the complete rounds."""

    median: float
    ratios: Sequence[float] = ()
    """to the baseline's, round by round; empty: it is the baseline, or that was 0"""
    ratio: float | None = None
    beyond_noise: bool = False


class Figures:
    """What all measurements say, as far as their rounds are complete for a load."""

    def __init__(self, loops: ClosedLoops) -> None:
        self.systems = list(dict.fromkeys(turn.system for turn in loops.turns))
        self.loads = [load for load in loops.options.clients if _complete_rounds(loops, load)]
        self._of = {each.turn: each for each in loops.measured if each.complete}
        self._rounds = {load: _complete_rounds(loops, load) for load in self.loads}

    def measured(self, system: str, load: int) -> list[Measured]:
        """Of complete rounds; of the baseline both turns of each."""
        return [
            found
            for turn, found in self._of.items()
            if (turn.system, turn.clients) == (system, load) and turn.round in self._rounds[load]
        ]

    def rounds(self, load: int) -> int:
        return len(self._rounds[load])

    def values(self, system: str, load: int, figure: str) -> list[float]:
        """One for each round; of the baseline the mean of its turns. Empty where there is no such figure."""
        found = []
        for number in self._rounds[load]:
            turns = [each for each in self.measured(system, load) if each.turn.round == number]
            values = [each.figures[figure] for each in turns if figure in each.figures]
            if not values:
                return []
            found.append(statistics.fmean(values))
        return found

    def noise(self, load: int, figure: str) -> list[float]:
        """The baseline's second turn of a round over its first."""
        turns = self.measured(self.systems[0], load)
        first, again = (
            {each.turn.round: each.figures.get(figure) for each in turns if each.turn.again is second}
            for second in (False, True)
        )
        pairs = [(first[number], again[number]) for number in self._rounds[load]]
        return [after / before for before, after in pairs if before and after]

    def compare(self, system: str, load: int, figure: str) -> Compared | None:
        """None where there is no such figure."""
        ours, base = self.values(system, load, figure), self.values(self.systems[0], load, figure)
        if not ours:
            return None
        if system == self.systems[0] or len(base) != len(ours) or not all(base):
            return Compared(statistics.median(ours))
        ratios = [a / b for a, b in zip(ours, base, strict=True)]
        sure = beyond(ratios, self.noise(load, figure))
        return Compared(statistics.median(ours), ratios, median_ratio(ours, base), sure)


def _complete_rounds(loops: ClosedLoops, load: int) -> list[int]:
    """Those in which every turn of this load was measured: medians are taken over these."""
    done = {each.turn for each in loops.measured if each.complete}
    ours = [turn for turn in loops.turns if turn.clients == load]
    missing = {turn.round for turn in ours if turn not in done}
    return sorted({turn.round for turn in ours} - missing)


def beyond(ratios: Sequence[float], noise: Sequence[float]) -> bool:
    """Whether such ratios say something: they are all on one side of 1, and their mean is farther from it than the
    baseline from itself explains (95 %, Student's t, logarithms). A turn that varies by s has noise of variance 2 s^2,
    and a ratio to the mean of two turns has 1.5 s^2."""
    if not noise or min(ratios) <= 0 or min(ratios) <= 1 <= max(ratios):
        return False
    spread = math.sqrt(statistics.fmean(math.log(each) ** 2 for each in noise) / 2)
    bound = _STUDENT[min(len(noise), len(_STUDENT) - 1)] * spread * math.sqrt(1.5 / len(ratios))
    return abs(statistics.fmean(map(math.log, ratios))) > bound


# ----- the report


def closed_report(loops: ClosedLoops, complete: bool) -> Report:
    figures, options = Figures(loops), loops.options
    report = Report(
        f"The best single engine against the graph: closed loops, {options.prompt_tokens} tokens in, "
        f"{options.answer_len} out, on {loops.here}",
        _lead(loops, figures),
        complete=complete,
        notes=list(_notes(loops, figures)),
    )
    if loops.screened:
        report.tables.append(_screened(loops))
    if figures.loads:
        report.tables.append(_ratios(figures))
        report.charts = [_chart(figures)]
    report.data = {
        "baseline": loops.baseline and loops.baseline.name,
        "screened": [
            {"name": each.name, "score": score(found), "turns": list(map(asdict, found))}
            for each, found in loops.screened
        ],
        "planned_turns": len(loops.turns),
        "turns": list(map(asdict, loops.measured)),
        "answers": {name: asdict(same) for name, same in loops.same.items()},
        "outcomes": loops.outcomes,
    }
    return report


def _lead(loops: ClosedLoops, figures: Figures) -> str:
    """What is better and what is worse under each load, of the graph as its file decides."""
    if not figures.loads:
        return "No round is complete: nothing can be compared."
    baseline, ours = figures.systems[0], figures.systems[-1]
    sentences = [f"{ours} against {baseline}."]
    for load in figures.loads:
        sides: dict[str, list[str]] = {"better": [], "worse": []}
        for figure in (each for each in FIGURES if each.more_is_better is not None):
            found = figures.compare(ours, load, figure.name)
            if found and found.ratio and found.beyond_noise and abs(found.ratio - 1) >= _WORTH_TELLING:
                side = "better" if (found.ratio > 1) == figure.more_is_better else "worse"
                sides[side].append(f"{figure.name} {found.ratio:.2f}x")
        parts = [f"{side} in {', '.join(items)}" for side, items in sides.items() if items]
        if failed := _failed(loops, ours, load):
            parts.append(f"{failed} requests FAILED, so its load was another")
        sentences.append(f"{_name(load)}: {'; '.join(parts) or 'no difference beyond the noise'}.")
    doubts = [each.foreign for each in loops.measured if each.foreign is not None]
    if doubts and statistics.fmean(doubts) > QUIET:
        sentences.insert(
            0, f"In doubt: other programs took {statistics.fmean(doubts):.0%} of this machine's CPU."
        )
    return " ".join(sentences)


def _name(load: int) -> str:
    return f"{load} client{'s' * (load > 1)}"


def _failed(loops: ClosedLoops, system: str, load: int) -> int:
    turns = [each for each in loops.measured if (each.turn.system, each.turn.clients) == (system, load)]
    return sum(each.outcomes["failed"] for each in turns)


def _screened(loops: ClosedLoops) -> Rows:
    loads = [each.turn.clients for each in loops.screened[0][1]]
    columns = [Column("setting"), *(Column(f"{_name(load)}: tokens/s", ".0f") for load in loads)]
    rows: list[list[Cell]] = []
    for candidate, found in loops.screened:
        seen = {each.turn.clients: each.figures.get(TOKENS) for each in found}
        rows.append([candidate.name, *(seen.get(load) for load in loads)])
    names = [candidate.name for candidate, _ in loops.screened]
    best = names.index(loops.baseline.name) if loops.baseline else None
    note = "The best by tokens/s (geometric mean) is the baseline. A short run each: small differences are noise."
    return Rows("Single engines, tried first", columns, rows, note, best)


def _ratios(figures: Figures) -> Rows:
    baseline, *others = figures.systems
    rows: list[list[Cell]] = []
    for load in figures.loads:
        for figure in FIGURES:
            base, *found = (figures.compare(name, load, figure.name) for name in figures.systems)
            if base or any(found):
                noise = _span(figures.noise(load, figure.name))
                cells = [_ratio(each, figure) for each in found]
                rows.append([load, figure.label, base.median * figure.scale if base else None, *cells, noise])
    rounds = ", ".join(f"{figures.rounds(load)} at {_name(load)}" for load in figures.loads)
    note = (
        f"Medians of the complete rounds: {rounds}. Of the baseline the figure, of the others the ratio to it round by "
        "round, with the least and the largest; an arrow up: more is better. Noise: the baseline against itself.\n"
        "~ may well be noise: not beyond what that explains (95 %, Student's t), or not the same way in each round."
    )
    columns = [
        Column("clients", "d"),
        Column("figure"),
        Column(baseline, ".3g"),
        *map(Column, others),
        Column("noise"),
    ]
    return Rows("In turn, under the same load", columns, rows, note)


def _ratio(found: Compared | None, figure: Figure) -> Cell:
    if found is None or figure.more_is_better is None:
        return f"{found.median * figure.scale:.0f}" if found else None
    if found.ratio is None:
        return None
    span = f" ({_span(found.ratios)})" if len(found.ratios) > 1 else ""
    return f"{'' if found.beyond_noise else '~'}{found.ratio:.2f}{span}"


def _span(ratios: Sequence[float]) -> str:
    return "-".join(dict.fromkeys(f"{end:.2f}" for end in (min(ratios), max(ratios)))) if ratios else ""


def _chart(figures: Figures) -> Chart:
    series = []
    for name in figures.systems:
        found = [figures.compare(name, load, TOKENS) for load in figures.loads]
        medians = [each.median if each else None for each in found]
        series.append(
            Series(name, list(map(_name, figures.loads)), medians, baseline=name == figures.systems[0])
        )
    return Chart(TOKENS, "bars", "", TOKENS, series, better="higher")


def _notes(loops: ClosedLoops, figures: Figures) -> Iterator[str]:
    for name, same in loops.same.items():
        yield (
            f"Answers of {name}, token for token against the baseline's: {same.alone_equal} of {same.alone} equal "
            f"asked one at a time, {same.together_equal} of {same.together} asked at once."
        )
        if same.alone_equal < same.alone or same.together_equal < same.together:
            yield (
                "With 16-bit types a batch of another size rounds differently, and a greedy answer may turn out "
                "otherwise: `dtype: float32` in the file compares exactly."
            )
    for load in figures.loads:
        for name in figures.systems[1:]:
            found = figures.compare(name, load, ANSWER)
            if found and found.ratio and abs(found.ratio - 1) > _SHORTER:
                yield (
                    f"{_name(load)}: {name}'s answers have {found.median:.0f} tokens, {found.ratio:.2f} times those "
                    "of the baseline: its load was another."
                )
    if loops.measured and len({turn.system for turn in loops.turns}) > 1 and loops.here.kind != "gpu":
        yield "The systems ran side by side: each was measured beside the idle others."
    errors = [error for each in loops.measured for error in each.errors]
    errors += [each.error for each in loops.compared if each.error]
    yield from (f"Failed: {error}" for error in list(dict.fromkeys(errors))[:_MOST_ERRORS])
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(loops.outcomes.items()))
    yield f"Requests, warm-up and comparison included: {counts}."
