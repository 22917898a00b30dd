"""The load under which systems are compared, and what is measured in a turn under it: figures of a window of that load,
and the CPU seconds that were spent in it."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import psutil

from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.load import ClosedLoop
from pdserve_bench.samples import percentile
from pdserve_bench.systems.alternation import Turn
from pdserve_bench.systems.cpu import CpuMeter, CpuReading

TOKENS = "output tokens/s"
REQUESTS = "requests/s"
CPU = "CPU s per 1,000 tokens"
ANSWER = "output tokens per answer"
REMOTE = "remote prefills"
"""a share of the requests"""
_TIMEOUT = 60.0
"""seconds for a request of a closed loop"""
_LONGER = 4.0
"""times its warm-up, at most, that a closed loop warms up: until it has had as many answers as it has clients"""


@dataclass
class Measurement:
    turn: Turn
    figures: dict[str, float]
    """times in seconds, rates per second, shares"""
    outcomes: dict[str, int]
    """of all requests of the turn, those of the warm-up included"""
    cpu: CpuReading = field(default_factory=CpuReading)
    """of the system, in the window"""
    tokens: float = 0.0
    """that came in the window"""
    generator: float = 0.0
    """CPU seconds of the load generator, in the window"""
    idle: float = 0.0
    """share of a core that the systems took which were not measured"""
    strangers: float = 0.0
    """share of a core that all other programs of the machine took"""
    ttfts: list[float] = field(default_factory=list)
    """seconds, of finished requests that began in the window"""
    errors: list[str] = field(default_factory=list)
    """each once, of failed requests"""
    complete: bool = True
    """false: broken off"""

    @property
    def cpu_per_token(self) -> dict[str, float]:
        """Seconds per 1,000 output tokens, by what the process is."""
        if not self.tokens:
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
    def strangers(self) -> float:
        """CPU seconds of programs that are none of ours. Processes that began meanwhile are among them."""
        ours = self.measured.total + self.others.total + self.generator
        return max(0.0, self.busy - ours)

    def _read(self) -> tuple[CpuReading, CpuReading, float, float]:
        """The last is what all cores of the machine were busy since it was booted. Linux counts guests as users too."""
        measured, others = self._meters
        times = psutil.cpu_times()
        busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        return measured.read(), others.read(), time.process_time(), float(busy)


@dataclass(frozen=True)
class ClosedLoad:
    """So many clients, each of which asks again when it has its answer; every prompt is new."""

    clients: int
    prompt_tokens: int
    output_tokens: int
    warm_up: float
    """seconds before the window, at least"""
    window: float
    """seconds"""

    @property
    def name(self) -> str:
        return f"c={self.clients}"

    def __str__(self) -> str:
        return (
            f"{self.clients} client{'s' * (self.clients > 1)} in a closed loop, new prompts of {self.prompt_tokens} "
            f"tokens, {self.output_tokens} tokens out"
        )

    @property
    def seconds(self) -> float:
        """About how long a turn takes, with the last answers on two cores."""
        return self.warm_up + self.window + 0.5 + self.clients / 16

    async def run(self, endpoint: Endpoint, prompts: Prompts, window: Window, sent: list[Exchange]) -> None:
        """Warm up, open the window, close it, and wait for the last answers. `sent` gets each request when it begins,
        also those of the warm-up."""

        def requests() -> Iterator[Exchange]:
            while True:
                sent.append(Exchange(endpoint.body(prompts.of(self.prompt_tokens), self.output_tokens)))
                yield sent[-1]

        send = partial(endpoint.ask, timeout=_TIMEOUT)
        async with ClosedLoop(requests(), send, self.clients) as loop:
            await asyncio.sleep(self.warm_up)
            with suppress(TimeoutError):
                async with asyncio.timeout((_LONGER - 1) * self.warm_up):
                    await loop.until(lambda _: True, self.clients)
            window.open()
            await asyncio.sleep(self.window)
            window.close()


def measured(turn: Turn, window: Window, sent: Sequence[Exchange], complete: bool) -> Measurement:
    """What was seen in a turn; of one that was broken off only the outcomes."""
    found = Measurement(turn, {}, count_outcomes(sent), complete=complete)
    found.errors = list(dict.fromkeys(each.error for each in sent if each.error))
    if complete:
        began, ended = window.began, window.ended
        found.cpu, found.generator = window.measured, window.generator
        found.idle = window.others.total / (ended - began)
        found.strangers = window.strangers / (ended - began)
        found.figures = window_figures(sent, began, ended)
        found.tokens = tokens_between(sent, began, ended)
        found.ttfts = ttfts_of(finished_of(sent, began, ended))
    return found


def window_figures(exchanges: Sequence[Exchange], began: float, ended: float) -> dict[str, float]:
    """Figures of a load that was steady between these two moments and went on after them. Tokens count when they come
    and requests when they end; times to the first token and longest gaps are those of the requests that began in the
    window and were followed to their end; a gap counts where it ends."""
    seconds = ended - began
    finished = [exchange for exchange in exchanges if exchange.outcome is Outcome.FINISHED]
    ours = finished_of(exchanges, began, ended)
    gaps = [
        gap
        for exchange in finished
        for gap, arrival in zip(exchange.gaps, exchange.arrivals[1:], strict=True)
        if began <= arrival < ended
    ]
    longest = [max(exchange.gaps) for exchange in ours if exchange.gaps]
    figures = {
        TOKENS: tokens_between(exchanges, began, ended) / seconds,
        REQUESTS: sum(began <= exchange.ended < ended for exchange in finished) / seconds,
    }
    for name, samples in (("TTFT", ttfts_of(ours)), ("ITL", gaps), ("longest gap", longest)):
        if samples:  # else it is not known, which is not 0
            figures |= {f"{name} p{100 * share:g}": percentile(samples, share) for share in (0.5, 0.99)}
    if ours:
        figures[ANSWER] = sum(exchange.output_tokens for exchange in ours) / len(ours)
    if placed := [exchange.prefill for exchange in ours if exchange.prefill]:
        figures[REMOTE] = placed.count("remote") / len(placed)
    return figures


def finished_of(exchanges: Sequence[Exchange], began: float, ended: float) -> list[Exchange]:
    """Finished requests that began in the window."""
    return [each for each in exchanges if each.outcome is Outcome.FINISHED and began <= each.started < ended]


def ttfts_of(exchanges: Sequence[Exchange]) -> list[float]:
    return [exchange.ttft for exchange in exchanges if exchange.ttft is not None]


def tokens_between(exchanges: Sequence[Exchange], began: float, ended: float) -> float:
    """Output tokens that came in that time. An event may carry several: each counts for its share of its answer."""
    total = 0.0
    for exchange in exchanges:
        if inside := sum(began <= arrival < ended for arrival in exchange.arrivals):
            total += exchange.output_tokens * inside / len(exchange.arrivals)
    return total


def count_outcomes(exchanges: Sequence[Exchange]) -> dict[str, int]:
    found = [exchange.outcome for exchange in exchanges]
    return {outcome.value: found.count(outcome) for outcome in Outcome}
