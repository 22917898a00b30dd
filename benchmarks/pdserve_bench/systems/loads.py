"""The loads under which systems are compared, and what is measured in a turn under one of them: figures of a window of
that load, and the CPU seconds that were spent in it."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.goodput.measure import FoundGoodput, GoodputOptions, expected_seconds, find_goodput
from pdserve_bench.goodput.requests import PoissonRequests
from pdserve_bench.load import ClosedLoop
from pdserve_bench.multi_round.workload import MultiRound
from pdserve_bench.progress import Schedule
from pdserve_bench.runs import LoadRun
from pdserve_bench.samples import percentile
from pdserve_bench.systems.alternation import Turn
from pdserve_bench.systems.cpu import CpuMeter, CpuReading

GOODPUT = "goodput, requests/s"
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
    cpu: CpuReading | None = None
    """of the system, in the window; None where its processes are not known"""
    tokens: float = 0.0
    """that came in the window; 0 where CPU seconds are not to be set against them"""
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
    notes: list[str] = field(default_factory=list)
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


@dataclass
class LoadTurn:
    """What a load is given for a turn."""

    endpoint: Endpoint
    prompts: Prompts
    window: Window
    """to be opened once the load is steady, and closed"""
    schedule: Schedule
    phase: str
    """announced with the load's seconds, and gone through by the load"""
    run: LoadRun = field(default_factory=LoadRun)
    """gets all requests when they begin, also those of the warm-up"""
    found: dict[str, float] = field(default_factory=dict)
    """figures that only this load knows"""
    notes: list[str] = field(default_factory=list)

    def fill(self, measurement: Measurement, steady: bool) -> None:
        """With what was seen in the window, which is closed."""
        window, exchanges = self.window, self.run.exchanges
        seconds = window.ended - window.began
        measurement.figures |= self.found
        measurement.notes = self.notes
        measurement.cpu = window.measured if window.measured.seconds else None
        measurement.generator = window.generator
        measurement.idle = window.others.total / seconds
        measurement.strangers = window.strangers / seconds if measurement.cpu else 0.0
        if steady:
            measurement.figures |= window_figures(exchanges, window.began, window.ended)
            measurement.tokens = tokens_between(exchanges, window.began, window.ended)
            measurement.ttfts = ttfts_of(finished_of(exchanges, window.began, window.ended))


class SystemLoad(ABC):
    name: str
    """short: it stands in tables"""
    told: str
    seconds: float
    """that a turn takes, about"""
    steady = True
    """each system is asked the same, so that times, tokens and CPU seconds in the window can be compared"""

    @abstractmethod
    async def measure(self, turn: LoadTurn) -> None:
        """Warm up, open the window, close it, and wait for the last answers. Raises Unavailable. All requests are in
        `turn` also where this is cancelled."""


class ClosedLoad(SystemLoad):
    """So many clients, each of which asks again when it has its answer; every prompt is new."""

    def __init__(
        self, clients: int, prompt_tokens: int, output_tokens: int, warm_up: float, window: float
    ) -> None:
        self.name = f"c={clients}"
        self.told = (
            f"{clients} client{'s' * (clients > 1)} in a closed loop, new prompts of {prompt_tokens} tokens, "
            f"{output_tokens} tokens out"
        )
        self.seconds = warm_up + window + 0.5 + clients / 16  # what the last answers take on two cores
        self.clients, self._warm_up, self._window = clients, warm_up, window
        self._tokens = prompt_tokens, output_tokens

    async def measure(self, turn: LoadTurn) -> None:
        async def send(exchange: Exchange) -> None:
            await turn.endpoint.ask(exchange, _TIMEOUT)

        with turn.schedule.phase(turn.phase, self.seconds):
            async with ClosedLoop(self._requests(turn), send, self.clients) as loop:
                await asyncio.sleep(self._warm_up)
                with suppress(TimeoutError):
                    async with asyncio.timeout((_LONGER - 1) * self._warm_up):
                        await loop.until(lambda _: True, self.clients)
                turn.window.open()
                await asyncio.sleep(self._window)
                turn.window.close()

    def _requests(self, turn: LoadTurn) -> Iterator[Exchange]:
        prompt_tokens, output_tokens = self._tokens
        while True:
            exchange = Exchange(turn.endpoint.body(turn.prompts.of(prompt_tokens), output_tokens))
            turn.run.exchanges.append(exchange)
            yield exchange


class MultiRoundLoad(SystemLoad):
    """Users that come back with a longer chat: what prefix caches are for. Other texts in each turn."""

    name = "multi-round"

    def __init__(self, seconds: float, warm_up: float, seed: int) -> None:
        self._window, self._warm_up, self._seed = seconds, warm_up, seed
        example = MultiRound(seconds=seconds)
        self.told = (
            f"multi-round QA for {seconds:g} s: {example.num_users:g} users, {example.num_rounds} rounds, "
            f"{example.rate:g} questions/s, {example.shared_system_prompt} + {example.user_history_prompt} words, "
            f"{example.answer_len} tokens out"
        )
        self.seconds = warm_up + seconds + 2.0

    async def measure(self, turn: LoadTurn) -> None:
        """The window is the time in which questions are asked; other systems have become idle before."""
        self._seed += 1
        workload = MultiRound(seconds=self._window, seed=self._seed)
        with turn.schedule.phase(turn.phase, self.seconds):
            await asyncio.sleep(self._warm_up)
            async with asyncio.TaskGroup() as group:
                turn.window.open()
                group.create_task(workload.run(turn.endpoint, turn.run))
                await asyncio.sleep(self._window)
                turn.window.close()


class GoodputLoad(SystemLoad):
    """The highest rate of single requests, arriving at random, at which 90 % keep the SLO. Its search asks each system
    at other rates."""

    name = "goodput"
    steady = False

    def __init__(self, options: GoodputOptions, prompt_tokens: int, output_tokens: int) -> None:
        self._options, self._tokens = options, (prompt_tokens, output_tokens)
        self.told = f"the highest rate at which {100 * options.share:g} % keep {options.slo}"
        self.seconds = expected_seconds(options)

    async def measure(self, turn: LoadTurn) -> None:
        found = FoundGoodput(self._options)
        users = PoissonRequests(turn.prompts, *self._tokens)
        turn.window.open()
        try:
            await find_goodput(turn.endpoint, users, found, turn.schedule, turn.phase)
        finally:
            turn.window.close()
            turn.run.exchanges += [each for probe in found.probes for each in probe.run.exchanges]
        turn.found[GOODPUT] = found.search.estimate or 0.0
        turn.notes += found.notes


def window_figures(exchanges: Sequence[Exchange], began: float, ended: float) -> dict[str, float]:
    """Of a load that was steady between these two moments and went on after them. Tokens count when they come and
    requests when they end; times to the first token and longest gaps are those of the requests that began in the
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
    """That began in the window."""
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
