"""What the KV hop found in each round, and the tables and charts that are made of it."""

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

from pdserve_bench.hops.kv_pair import Measured
from pdserve_bench.hops.section import spread
from pdserve_bench.report import Cell, Chart, Column, Report, Rows, Series
from pdserve_bench.samples import median_ratio, percentile

Kind = str
"""what was measured: `KV`, or its baseline, which is `copy` on one host and `TCP` over the link"""


@dataclass(frozen=True)
class KvCase:
    over_link: bool
    layout: str
    size: int
    """bytes of a transfer"""
    pieces: int
    """of which it is made: one for each layer and block"""
    blocks: int
    in_flight: int = 1
    smallest: bool = False
    """the time of a single block is wanted, not the speed"""


@dataclass(frozen=True)
class KvFigure:
    """Figures of one round."""

    rate: float
    """bytes per second: of the median transfer or, of several in flight, of all together"""
    median: float
    """seconds of a transfer, like the next; of several in flight, while all of them were"""
    p99: float
    held: float
    """seconds until the call returned that began a transfer (median)"""
    fairness: float
    """rate of the slowest of those in flight by that of the fastest"""
    reader_cpu: float
    """seconds per 10^9 bytes, like the next"""
    lender_cpu: float
    transfers: int


@dataclass
class KvFigures:
    link: str
    """as the user gave it"""
    rate: float
    """of the link, bits per second"""
    no_link: str = ""
    """why there are no figures of a link"""
    handshakes: dict[tuple[bool, str], list[float]] = field(default_factory=dict)
    """seconds, of each round, by whether it was over the link, and layout"""
    found: dict[tuple[KvCase, Kind], list[KvFigure]] = field(default_factory=dict)
    """by round"""

    def add(self, case: KvCase, kind: Kind, measured: Measured) -> None:
        self.found.setdefault((case, kind), []).append(_figure(case, measured))

    def cases(self, *, over_link: bool, smallest: bool = False) -> list[KvCase]:
        return [
            case
            for case, kind in self.found
            if kind == "KV" and case.over_link == over_link and case.smallest == smallest
        ]

    def median(self, case: KvCase, kind: Kind, name: str) -> float:
        return statistics.median(self.samples(case, kind, name))

    def samples(self, case: KvCase, kind: Kind, name: str) -> list[float]:
        return [getattr(figure, name) for figure in self.found[case, kind]]


def _figure(case: KvCase, measured: Measured) -> KvFigure:
    taken = measured.taken
    moved = case.size * sum(map(len, taken.samples))
    flights = taken.samples
    if case.in_flight > 1:  # while the first ones began and the last ones ended, less than all were in flight
        flights = [flight[1:-1] for flight in flights]
    samples = [seconds for flight in flights for seconds in flight]
    means = [statistics.fmean(flight) for flight in flights]
    median = statistics.median(samples)
    return KvFigure(
        rate=case.size / median if case.in_flight == 1 else moved / taken.wall,
        median=median,
        p99=percentile(samples, 0.99),
        held=statistics.median(taken.held) if taken.held else 0.0,
        fairness=min(means) / max(means),
        reader_cpu=taken.cpu / moved * 1e9,
        lender_cpu=measured.lender_cpu / moved * 1e9,
        transfers=len(samples),
    )


def section(figures: KvFigures) -> Report:
    single = [case for case in figures.cases(over_link=False) if case.in_flight == 1]
    crowd = [case for case in figures.cases(over_link=False) if case.in_flight > 1]
    linked = figures.cases(over_link=True)
    found = Report("")
    if single:
        smallest = [case for link in (False, True) for case in figures.cases(over_link=link, smallest=True)]
        found.tables += [
            _table(
                figures,
                "KV between two processes of this host, and a copy of as much inside one",
                single,
                "KV of | MB each | pieces | GB/s | ± % | ms p50 | held, ms | copy, GB/s | of copy | CPU s/GB | "
                "lender's",
            ),
            _table(
                figures,
                "The smallest transfer, and the handshake of a fresh pair",
                smallest,
                "KV of | kB each | pieces | ms p50 | ms p99 | handshake, ms",
            ),
        ]
        found.charts.append(_speed_chart(figures, single))
    if crowd:
        found.tables.append(
            _table(
                figures,
                "Many transfers in flight from one agent, on this host",
                crowd,
                "KV of | in flight | MB each | GB/s | ± % | slowest/fastest | ms p50 | ms p99",
            )
        )
    if linked:
        found.tables.append(
            _table(
                figures,
                f"KV over a link of {figures.link}, between two network namespaces (UCX_TLS=tcp)",
                linked,
                "KV of | in flight | MB each | Mbit/s | % of line | ± % | TCP, % of line | slowest/fastest | ms p50 | "
                "CPU s/GB | lender's",
            )
        )
    found.notes += list(_notes(figures))
    if single:
        found.lead = _lead(figures, single[-1], [case for case in linked if case.in_flight == 1])
    found.data = {
        "link": {"rate": figures.link, "bits_per_second": figures.rate},
        "handshakes": [
            {"over_link": over_link, "layout": layout, "seconds": seconds}
            for (over_link, layout), seconds in figures.handshakes.items()
        ],
        "figures": [
            {**asdict(case), "kind": kind, "rounds": [asdict(figure) for figure in rounds]}
            for (case, kind), rounds in figures.found.items()
        ],
    }
    return found


def _lead(figures: KvFigures, largest: KvCase, linked: Sequence[KvCase]) -> str:
    rate = figures.median(largest, "KV", "rate") / 1e9
    told = (
        f"KV: {largest.size / 1e6:.3g} MB ({largest.layout}) pass from process to process at {rate:.2g} GB/s, "
        f"{_of_copy(figures, largest):.2g} of the speed of a copy inside one"
    )
    if linked:
        size, share = linked[-1].size / 1e6, _share(figures, linked[-1], "KV")
        told += f", and {size:.3g} MB over {figures.link} at {share:.0f} % of the line"
    return f"{told}."


def _of_copy(figures: KvFigures, case: KvCase) -> float:
    return median_ratio(*(figures.samples(case, kind, "rate") for kind in ("KV", "copy")))


def _columns(figures: KvFigures) -> dict[Column, Callable[[KvCase], Cell]]:
    """All that tables are made of."""

    def median(name: str, scale: float = 1.0, kind: Kind = "KV") -> Callable[[KvCase], float]:
        return lambda case: figures.median(case, kind, name) * scale

    return {
        Column("KV of"): lambda case: case.layout + (f" over {figures.link}" if case.over_link else ""),
        Column("in flight", "d"): lambda case: case.in_flight,
        Column("MB each", ".4g"): lambda case: case.size / 1e6,
        Column("kB each", ".1f"): lambda case: case.size / 1e3,
        Column("pieces", "d"): lambda case: case.pieces,
        Column("GB/s", ".2f"): median("rate", 1e-9),
        Column("Mbit/s", ".4g"): median("rate", 8e-6),
        Column("% of line", ".1f"): lambda case: _share(figures, case, "KV"),
        Column("± %", ".0f"): lambda case: spread(figures.samples(case, "KV", "rate")),
        Column("TCP, % of line", ".1f"): lambda case: _share(figures, case, "TCP"),
        Column("ms p50", ".3f"): median("median", 1e3),
        Column("ms p99", ".3f"): median("p99", 1e3),
        Column("held, ms", ".2f"): median("held", 1e3),
        Column("slowest/fastest", ".2f"): lambda case: (
            figures.median(case, "KV", "fairness") if case.in_flight > 1 else None
        ),
        Column("copy, GB/s", ".2f"): median("rate", 1e-9, "copy"),
        Column("of copy", ".2f"): lambda case: _of_copy(figures, case),
        Column("CPU s/GB", ".2f"): median("reader_cpu"),
        Column("lender's", ".2f"): median("lender_cpu"),
        Column("handshake, ms", ".1f"): lambda case: (
            statistics.median(figures.handshakes[case.over_link, case.layout]) * 1e3
        ),
    }


def _table(figures: KvFigures, title: str, cases: Iterable[KvCase], names: str) -> Rows:
    """`names` of columns, between bars."""
    known = {column.name: (column, of) for column, of in _columns(figures).items()}
    chosen = [known[name] for name in names.split(" | ")]
    return Rows(title, [column for column, _ in chosen], [[of(case) for _, of in chosen] for case in cases])


def _share(figures: KvFigures, case: KvCase, kind: Kind) -> float | None:
    """Share of the line's rate, in %."""
    if (case, kind) not in figures.found:
        return None
    return figures.median(case, kind, "rate") * 8 / figures.rate * 100


def _speed_chart(figures: KvFigures, cases: Sequence[KvCase]) -> Chart:
    series = []
    for layout in dict.fromkeys(case.layout for case in cases):
        own = [case for case in cases if case.layout == layout]
        sizes = [case.size / 1e6 for case in own]
        for kind, label in (("KV", f"KV of {layout}"), ("copy", f"copy, {layout}")):
            rates = [[rate / 1e9 for rate in figures.samples(case, kind, "rate")] for case in own]
            series.append(
                Series(
                    label,
                    sizes,
                    [statistics.median(each) for each in rates],
                    [min(each) for each in rates],
                    [max(each) for each in rates],
                    baseline=kind == "copy",
                )
            )
    return Chart(
        "KV between two processes of one host",
        "lines",
        "MB per transfer",
        "GB/s",
        series,
        log_x=True,
        log_y=True,
        better="higher",
    )


def _notes(figures: KvFigures) -> Iterable[str]:
    yield (
        "KV: what was read is compared, word by word, with what was lent, before the clock starts and after it stops. "
        "`held` is how long the call that begins a transfer keeps its caller: over shared memory that call copies, and "
        "an engine's step waits for it. GB are 10^9 bytes; the CPU time is that of all threads of the process, waiting "
        "and looking whether the read is done included."
    )
    if chosen := os.environ.get("UCX_TLS"):
        yield f"KV: UCX_TLS={chosen} in the environment decides how the two processes of one host reach each other."
    if figures.no_link:
        yield f"KV: no figures over a link between two network namespaces: {figures.no_link}."
