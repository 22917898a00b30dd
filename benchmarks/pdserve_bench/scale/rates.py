"""A graph at rising rates of requests: what each kind of process costs for 1,000 of them."""

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from pdserve_bench.client import Outcome
from pdserve_bench.endpoint import Endpoint, learn_prompts
from pdserve_bench.goodput.measure import JUDGE_LATER, Probe, probe, warm_up
from pdserve_bench.goodput.requests import PoissonRequests
from pdserve_bench.progress import begin
from pdserve_bench.report import Cell, Column, Report, Rows
from pdserve_bench.scale.graph import GraphSize, ScaleGraph
from pdserve_bench.slo import SHARE, Slo, Tally

PARTS = ("frontend", "nats", "etcd", "workers")
PROMPT, ANSWER = 1300, 64
SLO = Slo(ttft=0.5, gap=0.25)
"""a step of the simulated engines takes 50 ms"""
WARM_UP, SETTLE = 5.0, 3.0
"""seconds of load, and after it"""
STEADY = 0.25
"""of a load's time, after which as many requests end as begin"""
SEED = 1


@dataclass(frozen=True)
class RatedLoad:
    """The graph at one rate."""

    rate: float
    tally: Tally
    seen: Mapping[str, float]
    """`LoadRun.summary`"""
    each: Mapping[str, float]
    """of `Reading.counts`, for each request that was answered in the steady part, beyond what the idle graph spends"""
    memory: Mapping[str, float]
    busy: float
    """share of all cores, with what other programs took of them"""
    others: float

    @property
    def kept(self) -> float:
        return self.tally.kept / max(1, self.tally.requests)


@dataclass
class ScaleRun:
    """What is known so far."""

    size: GraphSize
    rates: Sequence[float]
    seconds: float
    start: float = 0.0
    """seconds until all workers were registered, and knew each other"""
    idle: Mapping[str, float] = field(default_factory=dict)
    """`Reading.counts` per second"""
    memory: Mapping[str, float] = field(default_factory=dict)
    """MiB of the idle graph"""
    loads: list[RatedLoad] = field(default_factory=list)

    async def measure(self, folder: Path) -> None:
        """Raises Unavailable."""
        graph = ScaleGraph(folder, self.size)
        async with AsyncExitStack() as stack:
            begin("starting", 60.0)
            self.start = await graph.start(stack)
            endpoint = Endpoint(graph.url, "demo")
            users = PoissonRequests(await learn_prompts(endpoint, SEED), PROMPT, ANSWER)
            await warm_up(endpoint, users, min(self.rates), WARM_UP, SEED - 1)
            begin("idle", SETTLE + self.seconds)
            await asyncio.sleep(SETTLE)
            before = await graph.read()
            await asyncio.sleep(self.seconds)
            self.idle, self.memory = (await graph.read()).rates(before), graph.memory()
            for number, rate in enumerate(self.rates):
                begin(f"{rate:g} requests/s", self.seconds)
                made = Probe(rate, self.seconds, SEED + number)
                self.loads.append(await self._load(graph, endpoint, users, made))

    async def _load(
        self, graph: ScaleGraph, endpoint: Endpoint, users: PoissonRequests, made: Probe
    ) -> RatedLoad:
        async with asyncio.TaskGroup() as group:
            group.create_task(probe(endpoint, users, made, JUDGE_LATER))
            await asyncio.sleep(STEADY * self.seconds)
            psutil.cpu_percent()
            before = await graph.read()
            await asyncio.sleep((1 - STEADY) * self.seconds)
            after, busy, memory = await graph.read(), psutil.cpu_percent() / 100, graph.memory()
        ended = [request.ended for request in made.run.of(Outcome.FINISHED)]
        answered = sum(before.at <= moment < after.at for moment in ended) / (after.at - before.at)
        each = {
            name: (rate - self.idle[name]) / answered if answered else math.nan
            for name, rate in after.rates(before).items()
        }
        tally = Tally.of(SLO, made.run.exchanges, made.run.ended)
        return RatedLoad(made.rate, tally, made.run.summary(), each, memory, busy, made.foreign or 0.0)

    def cores(self, part: str) -> float:
        """For 1,000 requests/s: of the idle graph, and what requests cost at the highest rate that was carried; where
        none was, at the last."""
        best = next((load for load in reversed(self.loads) if load.kept >= SHARE), self.loads[-1])
        return self.idle[part] + 1000 * best.each[part]


def report_of(found: ScaleRun, complete: bool) -> Report:
    size, last = found.size, found.loads[-1]
    what = "carried" if last.kept >= SHARE else f"too much ({last.tally.describe()})"
    return Report(
        title=f"{size.decode} decode and {size.prefill} prefill workers, {size.frontends} frontends, "
        f"{size.servers} NATS, {size.servers} etcd: {PROMPT} tokens in, {ANSWER} out",
        lead=f"{last.rate:g} requests/s were {what}, with {last.busy:.0%} of this machine's {os.cpu_count()} cores "
        f"busy, {last.others:.0%} by other programs. 1,000 requests/s take as many cores: "
        + ", ".join(f"{found.cores(part):.2f} of {part}" for part in PARTS)
        + ".",
        tables=[_rates(found.loads), _parts(found)],
        data=asdict(found),
        complete=complete,
    )


def _rates(loads: Sequence[RatedLoad]) -> Rows:
    columns = [Column("requests/s", "g"), Column("kept, %", ".1f"), Column("TTFT p50", ".0f")]
    columns += [Column("p99", ".0f"), Column("gap p90", ".0f")]
    columns += [Column(f"{part}, s", ".2f") for part in PARTS]
    columns += [Column("messages", ".0f"), Column("busy, %", ".0f"), Column("others, %", ".0f")]
    rows: list[list[Cell]] = [
        [
            load.rate,
            100 * load.kept,
            *(1000 * load.seen[name] for name in ("TTFT p50", "TTFT p99", "longest gap p90")),
            *(1000 * load.each[part] for part in PARTS),
            load.each["nats messages"],
            100 * load.busy,
            100 * load.others,
        ]
        for load in loads
    ]
    note = (
        f"Kept: {SLO}; times in ms, gaps: the longest of each request. Seconds of CPU for 1,000 requests, beyond those "
        "of the idle graph; NATS messages for each, in and out of all servers. All prompts are prefilled remotely."
    )
    return Rows("Rates", columns, rows, note)


def _parts(found: ScaleRun) -> Rows:
    columns = [Column("part"), Column("idle, % of a core", ".1f"), Column("idle, MiB", ",.0f")]
    columns += [Column("at the last rate", ",.0f"), Column("cores for 1,000 requests/s", ".2f")]
    memory = found.loads[-1].memory
    rows: list[list[Cell]] = [
        [part, 100 * found.idle[part], found.memory[part], memory[part], found.cores(part)] for part in PARTS
    ]
    note = (
        "All processes of a kind together. A frontend has one core at most; engines are simulated. Idle: "
        f"{found.idle['nats messages']:.0f} NATS messages/s, {found.idle['etcd events']:.0f} events/s of etcd."
    )
    return Rows("Processes", columns, rows, note)
