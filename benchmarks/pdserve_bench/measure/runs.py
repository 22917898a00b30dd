"""One run of load against a server: its requests and their summary."""

import asyncio
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pdserve.process.signals import STOPPERS
from pdserve.util.errors import PdserveError
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.measure.load import arrivals
from pdserve_bench.measure.report import Cell, Column, Report, Rows
from pdserve_bench.measure.samples import percentile
from pdserve_bench.measure.slo import Slo

INTERRUPTED = 130
"""Exit code of an interrupted command that has shown its partial result."""
PATIENCE = 120.0
"""Seconds until a request counts as failed."""


@dataclass
class LoadRun:
    """Has each request from its start on, and can be read at any time."""

    exchanges: list[Exchange] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    """0 while it runs."""
    asks_until: float = 0.0
    """No request starts after this time; 0 if unknown."""

    @property
    def seconds(self) -> float:
        """Duration so far, with the wait for the last responses."""
        return (self.ended or time.monotonic()) - self.began

    @property
    def closes(self) -> float:
        """End of the interval for rates: `asks_until`, because the server is not fully loaded later. The run's end if
        that is earlier, or if all requests started at once."""
        now = self.ended or time.monotonic()
        return min(now, self.asks_until) if self.asks_until > self.began else now

    def of(self, outcome: Outcome) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.outcome is outcome]

    def errors(self) -> list[tuple[str, int]]:
        """Return error texts by count, the most frequent first; texts that differ only in numbers are one."""
        texts: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for exchange in self.of(Outcome.FAILED):
            kind = _NUMBER.sub("#", exchange.error)
            texts.setdefault(kind, exchange.error)
            counts[kind] += 1
        return [(texts[kind], count) for kind, count in counts.most_common()]

    def summary(self, slo: Slo | None = None) -> dict[str, float]:
        """Return statistics: seconds, and requests or tokens per second. Latencies are of finished requests, rates of
        those that finished by `closes`. `kept` is the share of all requests that kept the SLO, `goodput` their number
        per second."""
        finished = self.of(Outcome.FINISHED)
        ttfts = [exchange.ttft for exchange in finished if exchange.ttft is not None]
        gaps = [gap for exchange in finished for gap in exchange.gaps]
        longest = [max(exchange.gaps) for exchange in finished if exchange.gaps]
        whole = [exchange.ended - exchange.started for exchange in finished]
        speeds = [speed for exchange in finished if (speed := exchange.tokens_per_second) is not None]
        in_time = [exchange for exchange in finished if exchange.ended <= self.closes]
        window = max(1e-9, self.closes - self.began)
        figures = {
            "requests": float(len(self.exchanges)),
            "finished": float(len(finished)),
            "failed": float(len(self.of(Outcome.FAILED))),
            "unfinished": float(len(self.of(Outcome.UNFINISHED))),
            "seconds": self.seconds,
            "window": window,
            "requests/s": len(in_time) / window,
            "input tokens/s": sum(exchange.prompt_tokens for exchange in in_time) / window,
            "output tokens/s": sum(exchange.output_tokens for exchange in in_time) / window,
            "tokens/s per request": statistics.fmean(speeds) if speeds else 0.0,
            "TTFT mean": statistics.fmean(ttfts) if ttfts else 0.0,
        }
        for name, samples in (("TTFT", ttfts), ("ITL", gaps), ("longest gap", longest), ("whole", whole)):
            for share in (0.5, 0.9, 0.99):
                figures[f"{name} p{100 * share:g}"] = percentile(samples, share)
        if slo is not None:
            figures["kept"] = sum(map(slo.kept, self.exchanges)) / max(1, len(self.exchanges))
            figures["goodput"] = sum(map(slo.kept, self.exchanges)) / window
        return figures


def cached_share(finished: Iterable[Exchange]) -> float | None:
    """Return the share of prompt tokens that the server found in a prefix cache; None if it does not tell."""
    told = [each for each in finished if each.cached_tokens is not None]
    prompts = sum(each.prompt_tokens for each in told)
    return sum(each.cached_tokens or 0 for each in told) / prompts if prompts else None


def latency_rows(figures: Mapping[str, float]) -> Rows:
    names = {
        "TTFT": "TTFT",
        "ITL": "gap between tokens (ITL)",
        "longest gap": "longest gap of each answer",
        "whole": "whole answer",
    }
    shares = ("p50", "p90", "p99")
    rows: list[list[Cell]] = [
        [shown, *(1000 * figures[f"{name} {share}"] for share in shares)] for name, shown in names.items()
    ]
    return Rows("Times of finished requests", [Column("ms"), *(Column(each, ".1f") for each in shares)], rows)


_NUMBER = re.compile(r"\d+(\.\d+)?")


class Workload(Protocol):
    async def run(self, endpoint: Endpoint, run: LoadRun) -> None:
        """Send the requests, and add each to `run` when it starts. Return when all have ended. Set `run.began`
        and `run.ended`."""


class Scalable(Protocol):
    """A kind of load that can be sent at any rate."""

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Return a workload at `rate` requests per second. Another seed gives other prompts and arrivals."""


Arrival = tuple[float, Callable[[Endpoint], Mapping[str, object]]]


@dataclass
class OpenLoop:
    """A `Workload` that sends requests at fixed times, whether or not earlier ones have ended."""

    requests: Iterable[Arrival]
    """Seconds after the start, and a function that makes the body."""
    seconds: float
    timeout: float
    """Seconds for each request."""

    async def run(self, endpoint: Endpoint, run: LoadRun) -> None:
        run.began = begin = time.monotonic()
        run.asks_until = begin + self.seconds
        try:
            async with asyncio.TaskGroup() as group:
                for due, make in self.requests:
                    body = make(endpoint)
                    await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
                    run.exchanges.append(Exchange(body))
                    group.create_task(endpoint.ask(run.exchanges[-1], self.timeout))
        finally:
            run.ended = time.monotonic()


@dataclass
class PoissonRequests:
    """A `Scalable` with Poisson arrivals of unique prompts."""

    prompts: Prompts
    """From `learn_prompts` of the measured model."""
    prompt_tokens: int = 1300
    answer_tokens: int = 64
    patience: float = PATIENCE

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Another seed gives other arrivals. Prompts are always new, so that no prefix cache has them."""
        due = ((moment, self._body) for moment in arrivals(rate, seconds, seed))
        return OpenLoop(due, seconds, self.patience)

    def _body(self, endpoint: Endpoint) -> dict[str, object]:
        return endpoint.body(self.prompts.of(self.prompt_tokens), self.answer_tokens)


def run_and_show(
    work: Callable[[], Coroutine[None, None, object]],
    report: Callable[[bool], Report | None],
    json: Path | None,
    failed: Callable[[], bool] = lambda: False,
) -> int:
    """Run the work until it ends or a signal arrives, then show and write the report, even after a failure. `report`
    gets whether the work is complete, and returns None if nothing was measured. Returns the exit code."""
    complete, problem = False, None
    try:
        complete = run_until_stopped(work)
    except PdserveError as error:
        problem = error
    if found := report(complete):
        found.show()
        if json is not None:
            found.write(json)
    elif problem is None:
        print("Broken off before anything was measured.", file=sys.stderr)
    if problem:
        raise problem
    return int(failed()) if complete else INTERRUPTED


def run_until_stopped(work: Callable[[], Coroutine[None, None, object]]) -> bool:
    """Run the work and return True. On a signal cancel it, await its cleanup, and return False. A second signal ends
    the cleanup."""

    async def stoppable() -> bool:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def stop() -> None:
            for number in STOPPERS:
                loop.remove_signal_handler(number)
                signal.signal(
                    number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )
            task.cancel()

        for number in STOPPERS:
            loop.add_signal_handler(number, stop)
        await work()
        return True

    try:
        return asyncio.run(stoppable())
    except (asyncio.CancelledError, KeyboardInterrupt):
        return False
