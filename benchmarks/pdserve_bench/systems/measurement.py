"""What is measured in a turn: figures of a window of steady load, and the CPU seconds that were spent in it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.samples import percentile
from pdserve_bench.systems.alternation import Turn
from pdserve_bench.systems.cpu import CpuMeter, CpuReading

TOKENS = "output tokens/s"
REQUESTS = "requests/s"
CPU = "CPU s per 1,000 tokens"
REMOTE = "remote prefills"
"""a share of the requests"""


@dataclass
class Measurement:
    turn: Turn
    figures: dict[str, float]
    """times in seconds, rates per second, shares; named as in `LoadRun.summary`"""
    outcomes: dict[str, int]
    """of all requests of the turn, those of the warm-up included"""
    cpu: CpuReading | None = None
    """of the system, in the window; None where its processes are not known"""
    tokens: float = 0.0
    """that came in the window"""
    generator: float = 0.0
    """CPU seconds of the load generator, in the window"""
    idle: float = 0.0
    """share of a core that the systems took which were not measured"""
    strangers: float = 0.0
    """share of a core that all other programs of the machine took"""
    ttfts: list[float] = field(default_factory=list)
    """seconds"""
    errors: list[str] = field(default_factory=list)
    """each once, of failed requests"""
    complete: bool = True
    """false: broken off"""

    @property
    def cpu_per_token(self) -> dict[str, float]:
        """Seconds per 1,000 output tokens, by what the process is."""
        if self.cpu is None or not self.tokens:
            return {}
        return {name: 1000 * seconds / self.tokens for name, seconds in self.cpu.seconds.items()}


class Window:
    """The part of a turn that counts: when it began and ended, and what the CPUs did meanwhile."""

    def __init__(self, measured: CpuMeter, others: CpuMeter) -> None:
        self.began = self.ended = 0.0
        self.measured, self.others = CpuReading(), CpuReading()
        self.generator = self.busy = 0.0
        self._meters = measured, others

    def open(self) -> None:
        self.began = time.monotonic()
        self._before = self._read()

    def close(self) -> None:
        self.ended = time.monotonic()
        (measured, others, generator, busy), before = self._read(), self._before
        self.measured, self.others = measured.since(before[0]), others.since(before[1])
        self.generator, self.busy = generator - before[2], busy - before[3]

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def has(self, moment: float) -> bool:
        return self.began <= moment < self.ended

    @property
    def strangers(self) -> float:
        """CPU seconds of programs that are none of ours. Processes that began meanwhile are among them."""
        ours = self.measured.total + self.others.total + self.generator
        return max(0.0, self.busy - ours)

    def _read(self) -> tuple[CpuReading, CpuReading, float, float]:
        measured, others = self._meters
        return measured.read(), others.read(), time.process_time(), busy_seconds()


def busy_seconds() -> float:
    """Of all cores of the machine, since it was booted."""
    times = psutil.cpu_times()
    return float(
        sum(times)
        - times.idle
        - times.iowait
        - getattr(times, "guest", 0.0)
        - getattr(times, "guest_nice", 0.0)
    )


def window_figures(exchanges: Sequence[Exchange], began: float, ended: float) -> dict[str, float]:
    """Of a load that was steady between these two moments and went on after them. Tokens count when they come and
    requests when they end; times to the first token and longest gaps are those of the requests that began in the
    window and were followed to their end; a gap counts where it ends."""
    seconds = ended - began
    finished = [exchange for exchange in exchanges if exchange.outcome is Outcome.FINISHED]
    ours = [exchange for exchange in finished if began <= exchange.started < ended]
    ttfts = [exchange.ttft for exchange in ours if exchange.ttft is not None]
    longest = [max(exchange.gaps) for exchange in ours if exchange.gaps]
    gaps = [
        gap
        for exchange in finished
        for gap, arrival in zip(exchange.gaps, exchange.arrivals[1:], strict=True)
        if began <= arrival < ended
    ]
    figures = {
        TOKENS: tokens_between(exchanges, began, ended) / seconds,
        REQUESTS: sum(began <= exchange.ended < ended for exchange in finished) / seconds,
        "requests": float(len(ours)),
    }
    for name, samples in (("TTFT", ttfts), ("ITL", gaps), ("longest gap", longest)):
        if samples:  # else it is not known, which is not 0
            figures |= {f"{name} p{100 * share:g}": percentile(samples, share) for share in (0.5, 0.99)}
    placed = [exchange.prefill for exchange in ours if exchange.prefill]
    if placed:
        figures[REMOTE] = placed.count("remote") / len(placed)
    return figures


def tokens_between(exchanges: Sequence[Exchange], began: float, ended: float) -> float:
    """Output tokens that came in that time. An event may carry several: each counts for its share of its answer."""
    total = 0.0
    for exchange in exchanges:
        if inside := sum(began <= arrival < ended for arrival in exchange.arrivals):
            total += exchange.output_tokens * inside / len(exchange.arrivals)
    return total


def count_outcomes(exchanges: Sequence[Exchange]) -> dict[str, int]:
    counts = {outcome.value: 0 for outcome in Outcome}
    for exchange in exchanges:
        counts[exchange.outcome.value] += 1
    return counts


def different_errors(exchanges: Sequence[Exchange]) -> list[str]:
    return list(dict.fromkeys(exchange.error for exchange in exchanges if exchange.error))
