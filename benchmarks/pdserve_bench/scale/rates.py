"""A graph at rising rates of requests: what each kind of process costs for 1,000 of them."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

import psutil

from pdserve_bench.client import COMPLETIONS, Exchange, LoadClient, Outcome
from pdserve_bench.endpoint import Endpoint, learn_prompts
from pdserve_bench.goodput.measure import JUDGE_LATER, Probe, probe, warm_up
from pdserve_bench.goodput.requests import PoissonRequests
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Cell, Column, Report, Rows
from pdserve_bench.scale.graph import GraphSize, ScaleGraph
from pdserve_bench.slo import SHARE, Slo, Tally

PARTS = ("frontend", "nats", "etcd", "workers")
PROMPT, ANSWER = 1300, 64
SLO = Slo(ttft=0.5, gap=0.25)
"""a step of the simulated engines takes 50 ms"""
WARM_UP, SETTLE = 5.0, 3.0
"""seconds of load, and after it"""
SEED = 1


@dataclass(frozen=True)
class Spread(Endpoint):
    """Several frontends, asked in turn."""

    turn: Iterator[str] = field(default_factory=lambda: iter(()))

    async def ask(self, exchange: Exchange, timeout: float) -> None:
        await LoadClient(next(self.turn), self.headers).ask(exchange, timeout, COMPLETIONS)


@dataclass
class RatedLoad:
    """The graph at one rate."""

    probe: Probe
    spent: Mapping[str, float]
    """of `Reading.counts` while it ran, beyond what the idle graph would have spent"""
    memory: Mapping[str, float]
    busy: float
    """share of all cores, other programs included"""

    @property
    def carried(self) -> bool:
        return self.probe.share >= SHARE

    def each(self, name: str, count: int = 1) -> float:
        """Spent for so many requests."""
        return count * self.spent[name] / max(1, len(self.probe.run.of(Outcome.FINISHED)))


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

    async def measure(self, folder: Path, schedule: Schedule) -> None:
        """Raises Unavailable."""
        graph = ScaleGraph(folder, self.size)
        async with AsyncExitStack() as stack:
            with schedule.phase("starting", 60.0):
                self.start = await graph.start(stack)
                users, endpoint = await self._users(graph)
            with schedule.phase("idle", SETTLE + self.seconds):
                await asyncio.sleep(SETTLE)
                before = await graph.read()
                await asyncio.sleep(self.seconds)
                after = await graph.read()
            self.idle, self.memory = after.rates(before), graph.memory()
            for number, rate in enumerate(self.rates):
                with schedule.phase(f"{rate:g} requests/s", self.seconds):
                    made = Probe(rate, self.seconds, SEED + number)
                    self.loads.append(await self._load(graph, endpoint, users, made, schedule))

    async def _users(self, graph: ScaleGraph) -> tuple[PoissonRequests, Endpoint]:
        endpoint = Spread(graph.urls[0], "demo", turn=cycle(graph.urls))
        users = PoissonRequests(await learn_prompts(endpoint, SEED), PROMPT, ANSWER)
        await warm_up(endpoint, users, min(self.rates), WARM_UP, SEED - 1)
        return users, endpoint

    async def _load(
        self, graph: ScaleGraph, endpoint: Endpoint, users: PoissonRequests, made: Probe, schedule: Schedule
    ) -> RatedLoad:
        psutil.cpu_percent()
        before = await graph.read()
        await probe(endpoint, users, made, JUDGE_LATER, schedule.update)
        made.tally = Tally.of(SLO, made.run.exchanges, made.run.ended)
        after, busy = await graph.read(), psutil.cpu_percent() / 100
        took, rates = after.at - before.at, after.rates(before)
        spent = {name: took * (rate - self.idle[name]) for name, rate in rates.items()}
        return RatedLoad(made, spent, graph.memory(), busy)


# ── the report ─────────────────────────────────────────────────────────────────────────────────────────────


def report_of(found: ScaleRun, complete: bool) -> Report:
    size = found.size
    return Report(
        title=f"{size.decode} decode and {size.prefill} prefill workers, {size.frontends} frontends, "
        f"{size.servers} NATS, {size.servers} etcd: {PROMPT} tokens in, {ANSWER} out",
        lead=_lead(found),
        tables=[_rates(found), _parts(found)] if found.loads else [],
        data={
            "size": asdict(size),
            "start": found.start,
            "idle": dict(found.idle),
            "memory": dict(found.memory),
            "loads": [
                {"spent": dict(load.spent), "memory": dict(load.memory), "busy": load.busy}
                | {"foreign": load.probe.foreign, "stall": load.probe.stall, "kept": load.probe.share}
                | load.probe.run.summary()
                for load in found.loads
            ],
        },
        complete=complete,
    )


def _best(found: ScaleRun) -> RatedLoad:
    """At the highest rate that was carried, else at the lowest."""
    return next((load for load in reversed(found.loads) if load.carried), found.loads[0])


def _lead(found: ScaleRun) -> str:
    if not found.loads:
        return ""
    last, best = found.loads[-1], _best(found)
    cores = ", ".join(f"{found.idle[part] + best.each(part, 1000):.2f} of {part}" for part in PARTS)
    what = "carried" if last.carried else f"too much ({last.probe.tally.describe()})"
    here = f"{last.busy:.0%} of this machine's {os.cpu_count()} cores busy, {_others(last):.0%} by other programs"
    return f"{last.probe.rate:g} requests/s were {what}, with {here}. 1,000 requests/s take as many cores: {cores}."


def _others(load: RatedLoad) -> float:
    return load.probe.foreign or 0.0


def _rates(found: ScaleRun) -> Rows:
    columns = [Column("requests/s", "g"), Column("kept, %", ".1f"), Column("TTFT p50", ".0f")]
    columns += [Column("p99", ".0f"), Column("gap p90", ".0f")]
    columns += [Column(f"{part}, s", ".2f") for part in PARTS]
    columns += [Column("messages", ".0f"), Column("busy, %", ".0f"), Column("others, %", ".0f")]
    rows: list[list[Cell]] = []
    for load in found.loads:
        seen = load.probe.run.summary()
        times = [1000 * seen[name] for name in ("TTFT p50", "TTFT p99", "longest gap p90")]
        spent = [load.each(part, 1000) for part in PARTS]
        shares = [100 * load.busy, 100 * _others(load)]
        rows.append(
            [load.probe.rate, 100 * load.probe.share, *times, *spent, load.each("nats messages"), *shares]
        )
    note = (
        f"Kept: {SLO}; times in ms, gaps: the longest of each request. Seconds of CPU for 1,000 requests, beyond those "
        "of the idle graph; NATS messages for each, in and out of all servers. All prompts are prefilled remotely."
    )
    return Rows("Rates", columns, rows, note)


def _parts(found: ScaleRun) -> Rows:
    columns = [Column("part"), Column("idle, % of a core", ".1f"), Column("idle, MiB", ",.0f")]
    columns += [Column("at the last rate", ",.0f"), Column("cores for 1,000 requests/s", ".2f")]
    best, last = _best(found), found.loads[-1]
    rows: list[list[Cell]] = [
        [
            part,
            100 * found.idle[part],
            found.memory[part],
            last.memory[part],
            found.idle[part] + best.each(part, 1000),
        ]
        for part in PARTS
    ]
    note = (
        "All processes of a kind together. A frontend has one core at most; engines are simulated. Idle: "
        f"{found.idle['nats messages']:.0f} NATS messages/s, {found.idle['etcd events']:.0f} events/s of etcd."
    )
    return Rows("Processes", columns, rows, note)
