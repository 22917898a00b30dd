"""A graph under requests: what each kind of process costs for 1,000 of them."""

import asyncio
import math
import os
from collections.abc import Mapping
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


@dataclass
class ScaleRun:
    """What is known so far."""

    size: GraphSize
    rate: float
    seconds: float
    start: float = 0.0
    """seconds until all workers were registered, and knew each other"""
    idle: Mapping[str, float] = field(default_factory=dict)
    """`Reading.counts` per second"""
    each: Mapping[str, float] = field(default_factory=dict)
    """of `Reading.counts`, for each request that was answered in the steady part, beyond what the idle graph spends"""
    memory: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """MiB of the idle graph, and under load"""
    tally: Tally = field(default_factory=Tally)
    seen: Mapping[str, float] = field(default_factory=dict)
    """`LoadRun.summary`"""
    busy: float = 0.0
    """share of all cores, with what other programs took of them"""
    others: float = 0.0

    async def measure(self, folder: Path) -> None:
        """Raises Unavailable."""
        graph = ScaleGraph(folder, self.size)
        async with AsyncExitStack() as stack:
            begin("starting", 60.0)
            self.start = await graph.start(stack)
            endpoint = Endpoint(graph.url, "demo")
            users = PoissonRequests(await learn_prompts(endpoint, SEED), PROMPT, ANSWER)
            await warm_up(endpoint, users, self.rate, WARM_UP, SEED - 1)
            begin("idle", SETTLE + self.seconds)
            await asyncio.sleep(SETTLE)
            before = await graph.read()
            await asyncio.sleep(self.seconds)
            self.idle, empty = (await graph.read()).rates(before), graph.memory()
            begin(f"{self.rate:g} requests/s", self.seconds)
            made = Probe(self.rate, self.seconds, SEED)
            async with asyncio.TaskGroup() as group:
                group.create_task(probe(endpoint, users, made, JUDGE_LATER))
                await asyncio.sleep(STEADY * self.seconds)
                psutil.cpu_percent()
                before = await graph.read()
                await asyncio.sleep((1 - STEADY) * self.seconds)
                after, self.busy, full = await graph.read(), psutil.cpu_percent() / 100, graph.memory()
        ended = [request.ended for request in made.run.of(Outcome.FINISHED)]
        answered = sum(before.at <= moment < after.at for moment in ended) / (after.at - before.at)
        self.each = {
            name: (rate - self.idle[name]) / answered if answered else math.nan
            for name, rate in after.rates(before).items()
        }
        self.memory = {part: (empty[part], full[part]) for part in PARTS}
        self.tally = Tally.of(SLO, made.run.exchanges, made.run.ended)
        self.seen, self.others = made.run.summary(), made.foreign or 0.0

    def cores(self, part: str) -> float:
        """For 1,000 requests/s: of the idle graph, and what requests cost."""
        return self.idle[part] + 1000 * self.each[part]


def report_of(found: ScaleRun) -> Report:
    size, tally = found.size, found.tally
    kept = tally.kept / max(1, tally.requests)
    what = "carried" if kept >= SHARE else f"too much ({tally.describe()})"
    columns = [Column("part"), Column("CPU s for 1,000 requests", ".2f"), Column("idle, % of a core", ".1f")]
    columns += [Column("MiB idle", ",.0f"), Column("MiB at this rate", ",.0f")]
    columns += [Column("cores for 1,000 requests/s", ".2f")]
    rows: list[list[Cell]] = [
        [part, 1000 * found.each[part], 100 * found.idle[part], *found.memory[part], found.cores(part)]
        for part in PARTS
    ]
    times = (1000 * found.seen[name] for name in ("TTFT p50", "TTFT p99", "longest gap p90"))
    note = (
        "All processes of a kind together, CPU beyond that of the idle graph. A frontend has one core at most; engines "
        f"are simulated. {found.each['nats messages']:.0f} NATS messages for each request, in and out of all servers, "
        f"{found.idle['nats messages']:.0f} a second of the idle graph, and {found.idle['etcd events']:.0f} events of "
        f"etcd. {kept:.0%} of the requests kept {SLO}; "
        "TTFT p50 {:.0f} and p99 {:.0f} ms, longest gaps {:.0f} ms (p90).".format(*times)
    )
    return Report(
        title=f"{size.decode} decode and {size.prefill} prefill workers, {size.frontends} frontends, "
        f"{size.servers} NATS, {size.servers} etcd: {PROMPT} tokens in, {ANSWER} out",
        lead=f"{found.rate:g} requests/s were {what}, with {found.busy:.0%} of this machine's {os.cpu_count()} cores "
        f"busy, {found.others:.0%} by other programs. 1,000 requests/s take as many cores: "
        + ", ".join(f"{found.cores(part):.2f} of {part}" for part in PARTS)
        + ".",
        tables=[Rows("Processes", columns, rows, note)],
        data=asdict(found),
    )
