"""A run of load against one server: every request of it, and what they say together."""

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
from pdserve_bench.measure.report import Report
from pdserve_bench.measure.samples import percentile
from pdserve_bench.measure.slo import Slo

INTERRUPTED = 130
"""exit code of a command that was broken off by a signal, after it has shown what it has"""
PATIENCE = 120.0
"""seconds until a request without an end has failed"""


@dataclass
class LoadRun:
    """Requests are in it from when they begin, so that it can be read at any time."""

    exchanges: list[Exchange] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    """0 while it runs"""
    asks_until: float = 0.0
    """no request begins after this moment, only answers are waited for; 0 where that is not known beforehand"""

    @property
    def seconds(self) -> float:
        """So far, with the wait for the last answers."""
        return (self.ended or time.monotonic()) - self.began

    @property
    def closes(self) -> float:
        """The end of what rates are taken of: when the last request could begin, or sooner where it was broken off.
        While the last answers are waited for a server has less and less to do, so that time would say too little."""
        now = self.ended or time.monotonic()
        return min(now, self.asks_until) if self.asks_until else now

    def of(self, outcome: Outcome) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.outcome is outcome]

    def errors(self) -> list[tuple[str, int]]:
        """What failed requests say, and how many; the most frequent first. Texts that differ in numbers alone, as of
        tokens or ports, count as the first of them."""
        texts: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for exchange in self.of(Outcome.FAILED):
            kind = _NUMBER.sub("#", exchange.error)
            texts.setdefault(kind, exchange.error)
            counts[kind] += 1
        return [(texts[kind], count) for kind, count in counts.most_common()]

    def summary(self, slo: Slo | None = None) -> dict[str, float]:
        """Times in seconds, rates per second. Gaps are those between tokens of one request (ITL); `longest gap` has one
        sample for each request. Times are those of finished requests, rates those of requests that finished before the
        run closed; `kept` and `goodput` are of all requests that were begun."""
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


_NUMBER = re.compile(r"\d+(\.\d+)?")


class Workload(Protocol):
    """What users do, as a program that does it."""

    async def run(self, endpoint: Endpoint, run: LoadRun) -> None:
        """Send all of it and put every request into `run` when it begins; end when the last answer has ended, within a
        bound of its own. Sets when `run` began and ended. May be cancelled: what was begun stays in `run`."""


class Scalable(Protocol):
    """Users of one kind, as many as it takes for a rate."""

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """A workload of so many seconds, `rate` requests per second on average; other seeds make other prompts and
        arrivals."""


@dataclass
class OpenLoop:
    """A `Workload`: requests at their moments, whatever becomes of those before."""

    requests: Iterable[tuple[float, Callable[[Endpoint], Mapping[str, object]]]]
    """seconds after the beginning, and what makes the body"""
    seconds: float
    timeout: float
    """seconds, of each request"""

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
    """A `Scalable`: each request has a prompt of `prompt_tokens` that no request had before, and an answer of
    `answer_tokens`; they arrive independently of each other (Poisson)."""

    prompts: Prompts
    """of the model that is measured: `learn_prompts`"""
    prompt_tokens: int = 1300
    answer_tokens: int = 64
    patience: float = PATIENCE

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Other seeds make other arrivals. Prompts are new each time: none is in a prefix cache already."""
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
    """Run the work to its end or until a signal; then show and write what there is, also where it has failed. `report`
    receives whether the work is complete, and returns None where nothing was measured. Returns the command's exit
    code; raises the work's PdserveError."""
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
    """Run it to its end; on Ctrl-C and the like cancel it, so that it stops what it has started. False then. A second
    signal while it does so ends this process by itself."""

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
