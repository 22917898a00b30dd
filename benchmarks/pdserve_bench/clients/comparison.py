"""Compare the file's graph with plain vLLM in closed loops of N clients. Each client sends a request when it has the
response to its last one. With one client, this shows what a lone request costs.

All systems are started once and measured in turn, each count of clients in the order ABBA twice, so that steady drift
of the machine favours no system. Meanwhile, each idle system uses 2 to 3 % of a core.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.util.errors import ConfigError, Unavailable
from pdserve_bench.client import Exchange
from pdserve_bench.compare.candidates import Candidate, CandidateMaker, HardwareKind
from pdserve_bench.endpoint import Endpoint, Prompts, learn_prompts
from pdserve_bench.measure.foreign_cpu import ForeignLoad
from pdserve_bench.measure.load import ClosedLoop
from pdserve_bench.measure.report import Cell, Column, Report, Rows
from pdserve_bench.measure.runs import PATIENCE, LoadRun
from pdserve_bench.progress import begin

PAUSE = 1.2
"""Seconds before each turn: vLLM's processes spin for a second after their last message."""
WARM_UP = 2.0
FIGURES = {
    "tokens/s": ("output tokens/s", 1.0),
    "TTFT p50": ("TTFT p50", 1000.0),
    "TTFT p90": ("TTFT p90", 1000.0),
    "gap p50": ("ITL p50", 1000.0),
    "finish p50": ("whole p50", 1000.0),
    "finish p90": ("whole p90", 1000.0),
}
"""By column: key in `LoadRun.summary`, and a factor."""


@dataclass
class ClientsComparison:
    maker: CandidateMaker
    counts: Sequence[int]
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    """For all turns together."""
    seed: int
    runs: dict[tuple[int, str], list[LoadRun]] = field(default_factory=dict)
    """By number of clients and system: one run for each turn that has ended."""
    foreign: float = 0.0
    """Largest CPU share of other programs in a turn."""

    @property
    def systems(self) -> list[Candidate]:
        """The file's graph, then plain vLLM (on a CPU, for each thread count) or, with simulated engines, an aggregated
        graph. Raises ConfigError."""
        if self.maker.here.kind is HardwareKind.GPU:
            raise ConfigError(
                ["--clients keeps all systems running, for which one machine's GPUs do not suffice."]
            )
        graph = self.maker.disaggregated()[0]
        first, *others = self.maker.aggregated()
        like = [each for each in others if (each.split, each.shape) == (first.split, first.shape)]
        return [graph, first, *like]

    async def run(self) -> None:
        """Raises Unavailable if a system does not start, or fails a request of the warm-up."""
        systems = self.systems
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-compare-")))
            begin(f"starting {len(systems)} systems", 60.0)
            starting = (self._start(stack, each, folder / str(place)) for place, each in enumerate(systems))
            endpoints = dict(
                zip([each.name for each in systems], await asyncio.gather(*starting), strict=True)
            )
            prompts = {name: await learn_prompts(each, self.seed) for name, each in endpoints.items()}
            turns = list(_turns(self.counts, list(endpoints)))
            seconds = max(2.0, self.seconds / len(turns) - PAUSE)
            for name, endpoint in endpoints.items():
                warm = await self._turn(endpoint, prompts[name], max(self.counts), WARM_UP)
                if errors := warm.errors():
                    raise Unavailable(f"{name} fails requests: {errors[0][0]}")
            for count, name in turns:
                begin(f"{name}, {count} clients", seconds)
                await asyncio.sleep(PAUSE)
                others = ForeignLoad()
                run = await self._turn(endpoints[name], prompts[name], count, seconds)
                self.foreign = max(self.foreign, others.share() or 0.0)
                self.runs.setdefault((count, name), []).append(run)

    async def _start(self, stack: AsyncExitStack, system: Candidate, folder: Path) -> Endpoint:
        await asyncio.to_thread(folder.mkdir)
        return await stack.enter_async_context(system.system.start(folder))

    async def _turn(self, endpoint: Endpoint, prompts: Prompts, clients: int, seconds: float) -> LoadRun:
        run = LoadRun()

        def requests() -> Iterator[Exchange]:
            while True:
                run.exchanges.append(
                    Exchange(endpoint.body(prompts.of(self.prompt_tokens), self.answer_tokens))
                )
                yield run.exchanges[-1]

        async def send(exchange: Exchange) -> None:
            await endpoint.ask(exchange, PATIENCE)

        async with ClosedLoop(requests(), send, clients):
            await asyncio.sleep(seconds)
            run.asks_until = time.monotonic()
        run.ended = time.monotonic()
        return run

    # the result

    def figures(self, count: int, name: str) -> dict[str, float]:
        """All turns of a system together; tokens/s are the mean of its turns."""
        runs = self.runs[count, name]
        whole = LoadRun([each for run in runs for each in run.exchanges])
        found = whole.summary()
        found["output tokens/s"] = sum(run.summary()["output tokens/s"] for run in runs) / len(runs)
        return found

    def report(self, complete: bool) -> Report | None:
        names = [each.name for each in self.systems]
        measured = [count for count in self.counts if all((count, name) in self.runs for name in names)]
        if not measured:
            return None
        found = {(count, name): self.figures(count, name) for count in measured for name in names}
        columns = [Column("clients", "d"), Column("system"), *(Column(name, ".1f") for name in FIGURES)]
        columns.append(Column("failed", "d"))
        rows: list[list[Cell]] = [
            [
                count,
                name,
                *(figures[key] * factor for key, factor in FIGURES.values()),
                int(figures["failed"]),
            ]
            for (count, name), figures in found.items()
        ]
        ours, *plain = names
        ratios = []
        for count in measured:
            best = max(plain, key=lambda name: found[count, name]["output tokens/s"])
            mine, theirs = found[count, ours], found[count, best]
            ratios.append(
                f"{count} clients: "
                + ", ".join(
                    f"{name} {mine[key] / theirs[key]:.2f}"
                    for name, (key, _) in FIGURES.items()
                    if theirs[key]
                )
                + f" (of {best})"
            )
        return Report(
            f"{self.prompt_tokens} tokens in, {self.answer_tokens} out, closed loop",
            f"The graph's figures divided by those of vLLM's fastest setting. {'; '.join(ratios)}.",
            [Rows("times in ms", columns, rows)],
            [f"Other programs took up to {self.foreign:.0%} of the CPU in a turn."],
            complete,
            {
                "figures": [
                    {"clients": count, "system": name, **each} for (count, name), each in found.items()
                ]
            },
        )


def _turns(counts: Sequence[int], names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """For each count, yield all systems forwards, then backwards, and both once more."""
    for count in counts:
        for order in (names, names[::-1], names, names[::-1]):
            yield from ((count, name) for name in order)
