"""What is left of the goodput under too much load, and what of a polite client beside a flood.

    python -m pdserve_bench.overload [--real configs/local.yaml] [--seconds 20] [--json FILE]

Capacity is found by a closed loop; then requests arrive at 1, 2, 5 and 10 times that rate (Poisson, whatever becomes
of those before), each with a deadline. Goodput: requests completed within their deadline, by second. Each client has
an API key of its own. Without --real the engines are simulated, so that the load generator is not the bottleneck.
With it, generator, frontend and engines share the machine: `client`, `front` and `rest` are the cores that each took,
and `good/core` is the goodput by core-second of the rest, the engines. `stall` is the longest time that the generator
itself did not get to run: with more than half a second, other work had the machine, and the row says nothing about the
graph.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pdserve_bench.client import Exchange, LoadClient, Outcome, completion
from pdserve_bench.launch import RunningGraph, started
from pdserve_bench.load import ClosedLoop, open_loop
from pdserve_bench.options import program
from pdserve_bench.report import Column, Report, Rows
from pdserve_bench.samples import percentile
from pdserve_bench.simulated import simulated, write
from pdserve_bench.stalls import GeneratorStalls
from pdserve_bench.systems.cpu import CpuMeter, CpuReading

SIMULATED = simulated({"step-seconds": 0.05, "prefill-rate": 4000}, decode={"max-num-seqs": 8})
CLIENTS = 16
"""of the closed loop"""
WORDS, TOKENS = 30, 20
"""of a prompt, and of its answer"""
DEADLINE = 8.0
"""seconds of each request"""
CROWD = [f"crowd-{number}" for number in range(8)]
FLOOD, POLITE = "flood", "polite"
FACTORS = (1, 2, 5, 10)
RAMP = 0.25
"""share of each run before its figures count"""
NAN = float("nan")


class Caller:
    """Sends requests of one kind, each with the API key of a client."""

    def __init__(self, running: RunningGraph) -> None:
        self._graph, self._meter = running.graph, CpuMeter(running.family())
        self._random = random.Random(4711)

    def requests(self, keys: list[str]) -> "Iterator[KeyedExchange]":
        """Yield requests without end, each with one of these keys."""
        while True:
            words = [str(self._random.randrange(1000, 9999)) for _ in range(WORDS)]
            body = completion(self._graph.model, " ".join(words), TOKENS)
            yield KeyedExchange(body, key=self._random.choice(keys))

    async def send(self, exchange: "KeyedExchange") -> None:
        headers = {"authorization": f"Bearer {exchange.key}", "x-request-timeout": f"{DEADLINE}"}
        await LoadClient(self._graph.url, headers).ask(exchange, 3 * DEADLINE)

    async def watched(self, work: "Coroutine[None, None, OverloadRun]") -> "OverloadRun":
        """Run the work, and add the CPU time that was taken and the generator's longest stall."""
        before, client = self._meter.read(), time.process_time()
        async with GeneratorStalls() as stalls:
            run = await work
        taken, client = self._meter.read().since(before), time.process_time() - client
        return replace(run, stall=stalls.longest, cpu=taken, client=client)

    async def closed(self, seconds: float, keys: list[str], clients: int = CLIENTS) -> "OverloadRun":
        """Each client asks again when it is answered; a refused one waits a little."""
        begin = time.monotonic()
        async with ClosedLoop(self.requests(keys), self.send, clients) as loop:
            await asyncio.sleep(seconds)
        return OverloadRun(begin, begin + seconds, loop.done)

    async def open(self, rate: float, seconds: float, keys: list[str]) -> "OverloadRun":
        begin = time.monotonic()
        sent = await open_loop(self.requests(keys), self.send, rate, seconds, seed=4711)
        return OverloadRun(begin, begin + seconds, sent)


@dataclass(eq=False)
class KeyedExchange(Exchange):
    key: str = ""


@dataclass(frozen=True)
class OverloadRun:
    begin: float
    end: float
    exchanges: Sequence[Exchange]
    stall: float = 0.0
    cpu: CpuReading = field(default_factory=CpuReading)
    """of the graph, until the last answer"""
    client: float = 0.0
    """CPU seconds of the generator, by then"""

    @property
    def in_time(self) -> list[Exchange]:
        """All of the answer, within the deadline."""
        return [
            exchange
            for exchange in self.exchanges
            if exchange.outcome is Outcome.FINISHED and exchange.ended - exchange.started <= DEADLINE
        ]

    @property
    def goodput(self) -> float:
        """Requests per second that ended in time after the ramp."""
        start = self.begin + RAMP * (self.end - self.begin)
        return sum(start <= exchange.ended < self.end for exchange in self.in_time) / (self.end - start)

    @property
    def ttfts(self) -> list[float]:
        return [exchange.ttft for exchange in self.in_time if exchange.ttft is not None]

    def row(self) -> dict[str, float]:
        good = len(self.in_time)
        in_vain = sum(exchange.status in (200, 503, 504) for exchange in self.exchanges) - good
        refused = [x.ended - x.started for x in self.exchanges if x.status == 429]
        front = self.cpu.seconds.get("frontend", 0.0)
        rest = self.cpu.total - front
        return {
            "offered/s": len(self.exchanges) / (self.end - self.begin),
            "goodput/s": self.goodput,
            "429": len(refused),
            "late": in_vain,
            "other": len(self.exchanges) - good - len(refused) - in_vain,
            "TTFT p50": percentile(self.ttfts, 0.5, none=NAN),
            "TTFT p99": percentile(self.ttfts, 0.99, none=NAN),
            "429 p99": percentile(refused, 0.99, none=NAN),
            "client": self.client / self.cpu.at,
            "front": front / self.cpu.at,
            "rest": rest / self.cpu.at,
            "good/core": good / rest,
            "stall": self.stall,
        }


async def measure(caller: Caller, seconds: float) -> Report:
    await caller.closed(3, CROWD)
    runs = {"closed": await caller.watched(caller.closed(seconds, CROWD))}
    capacity = runs["closed"].goodput
    for factor in FACTORS:
        runs[f"{factor}x"] = await caller.watched(caller.open(factor * capacity, seconds, CROWD))
    peak = max(run.goodput for run in runs.values())
    rows = {name: {**run.row(), "of peak": run.goodput / peak} for name, run in runs.items()}
    polite = await _fairness(caller, capacity, seconds)
    return Report(
        "Overload",
        f"Capacity: {capacity:.2f} requests/s, by a closed loop of {CLIENTS}.",
        [_table("Load", rows), _table("A polite client beside a flood of 10x", {POLITE: polite})],
    )


async def _fairness(caller: Caller, capacity: float, seconds: float) -> dict[str, float]:
    """A polite client asks one request after the other."""
    alone = await caller.closed(seconds / 4, [POLITE], 1)
    flood = asyncio.create_task(caller.open(10 * capacity, seconds, [FLOOD]))
    await asyncio.sleep(RAMP * seconds)
    beside = await caller.closed((1 - RAMP) * seconds, [POLITE], 1)
    flooded = await flood
    before, median = statistics.median(alone.ttfts), percentile(beside.ttfts, 0.5, none=NAN)
    return {
        "TTFT alone p50": before,
        "TTFT beside p50": median,
        "TTFT beside p99": percentile(beside.ttfts, 0.99, none=NAN),
        "asked": len(beside.exchanges),
        "answered": len(beside.in_time),
        "flood answered": len(flooded.in_time) / len(flooded.exchanges),
        "TTFT ratio": median / before,
    }


def _table(title: str, rows: dict[str, dict[str, float]]) -> Rows:
    columns = [Column("load"), *(Column(name, ".2f") for name in next(iter(rows.values())))]
    return Rows(title, columns, [[name, *row.values()] for name, row in rows.items()])


async def _measured(file: Path | None, seconds: float, folder: Path) -> Report:
    keys = {"PDSERVE_API_KEYS": ",".join([*CROWD, FLOOD, POLITE])}
    file = file or write(SIMULATED, folder / "sim.yaml")
    async with started(file, folder, partial(print, file=sys.stderr), variables=keys) as running:
        return await measure(Caller(running), seconds)


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("--real", type=Path, metavar="FILE", help="real engines: this graph's")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-overload-") as folder:
        report = asyncio.run(_measured(args.real, args.seconds, Path(folder)))
    report.show()
    report.write(args.json, None)


if __name__ == "__main__":
    main()
