"""`pdserve bench scale`."""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from pdserve.errors import ConfigError, PdserveError
from pdserve_bench.options import Json, numbers
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Column, Report, Rows, check_outputs
from pdserve_bench.runs import run_and_show
from pdserve_bench.scale.choice import choice_seconds
from pdserve_bench.scale.graph import ScaleGraph

PAIRS = 10_000
"""of a decode and a prefill worker, beyond which none warms up: on hosts of their own they have the CPU for it, and
here a thousand share one"""


@dataclass
class ScaleTurn:
    """One size; per second, and CPU as a share of one core, where nothing else is said."""

    workers: int
    start: float = 0.0
    """seconds until all are registered and connected, and know each other"""
    idle: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    """MiB"""
    choice: list[float] = field(default_factory=list)


def scale(
    workers: Annotated[
        str, typer.Option(metavar="N,..", help="simulated workers, half of them decode")
    ] = "10,100,1000",
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="of each window, idle and busy")
    ] = 10.0,
    json: Json = None,
) -> int:
    """What each process costs in graphs of many workers: simulated ones, many in a process, with an etcd, a
    nats-server and a frontend that are real. CPU and messages while nothing runs, and while up to 100 streams do;
    memory; the time to choose a worker.

    Needs no GPU and no running graph: it starts what it measures in a temporary folder, and stops it. Some 3 minutes;
    1,000 workers take 4 GB of memory. Ctrl-C shows what is there by then.

    examples:
      pdserve bench scale
      pdserve bench scale --workers 10,100 --seconds 5 --json scale.json
    """
    check_outputs(json, None)
    sizes = numbers("--workers", workers, least=2)
    if not sizes:
        raise ConfigError(["--workers: give numbers of 2 and more, as in 10,100,1000."])
    turns: list[ScaleTurn] = []
    failures: list[str] = []
    return run_and_show(
        lambda: _measure(sizes, seconds, turns, failures),
        lambda complete: make_report(turns, complete and not failures, failures),
        json,
        None,
        lambda: bool(failures),
    )


async def _measure(sizes: list[int], seconds: float, turns: list[ScaleTurn], failures: list[str]) -> None:
    phases = {size: f"{size:,} workers" for size in sizes}
    with Schedule({phases[size]: 35 + size / 12 + 2 * seconds for size in sizes}) as schedule:
        for size, phase in phases.items():
            with schedule.phase(phase), tempfile.TemporaryDirectory(prefix="pdserve-scale-") as folder:
                turns.append(ScaleTurn(size))
                try:
                    await _turn(turns[-1], Path(folder), seconds, schedule)
                except* (PdserveError, OSError) as errors:
                    failures.append(f"{phase}: {errors.exceptions[0]}")
                    schedule.say(failures[-1])


async def _turn(turn: ScaleTurn, folder: Path, seconds: float, schedule: Schedule) -> None:
    turn.choice = choice_seconds(turn.workers // 2)
    graph = ScaleGraph(folder, turn.workers)
    async with AsyncExitStack() as stack:
        schedule.update("starting")
        await graph.start(stack, warm_ups=(turn.workers // 2) ** 2 <= PAIRS)
        turn.start = graph.start_seconds
        schedule.update("idle")
        await asyncio.sleep(3.0)  # what was begun by the start
        turn.idle = await _window(graph, seconds)
        turn.memory = graph.memory()
        schedule.update("streams")
        async with graph.streams():
            turn.busy = await _window(graph, seconds)


async def _window(graph: ScaleGraph, seconds: float) -> dict[str, float]:
    before = await graph.read()
    await asyncio.sleep(seconds)
    after = await graph.read()
    took = after.at - before.at
    return {name: (count - before.counts[name]) / took for name, count in after.counts.items()}


# ── the report ─────────────────────────────────────────────────────────────────────────────────────────────


def make_report(turns: list[ScaleTurn], complete: bool, failures: list[str]) -> Report:
    return Report(
        title="Many workers",
        lead=_lead(turns),
        tables=[_processes(turns), _others(turns)],
        notes=failures,
        data={"turns": [asdict(turn) for turn in turns]},
        complete=complete,
    )


def _lead(turns: list[ScaleTurn]) -> str:
    measured = [turn for turn in turns if turn.choice]
    if not measured:
        return ""
    most = max(measured, key=lambda turn: turn.workers)
    return f"With {most.workers:,} workers a frontend chooses one in {1e6 * most.choice[0]:.0f} us."


_WORKERS = Column("workers", ",")


def _processes(turns: list[ScaleTurn]) -> Rows:
    columns = [_WORKERS]
    for name in ("frontend", "worker", "etcd", "nats"):
        columns += [Column(f"{name} idle, % of a core", ".2f"), Column("busy, %", ".2f")]
    columns += [Column("frontend, MiB", ",.0f"), Column("worker, MiB", ".1f")]
    rows = []
    for turn in turns:
        cells: list[int | str | float | None] = [turn.workers]
        for name, share in (("frontend", 1), ("workers", turn.workers), ("etcd", 1), ("nats", 1)):
            for window in (turn.idle, turn.busy):
                cells.append(100 * window[name] / share if window else None)
        memory = turn.memory
        cells += [memory.get("frontend"), memory["workers"] / turn.workers if memory else None]
        rows.append(cells)
    note = (
        "CPU of each process; of a worker its share, since many are in one process. Busy: up to 100 streams."
    )
    return Rows("CPU and memory", columns, rows, note)


def _others(turns: list[ScaleTurn]) -> Rows:
    names = ("etcd puts", "etcd events", "nats messages")
    columns = [_WORKERS]
    for name in names:
        columns += [Column(f"{name}/s idle", ",.0f"), Column("busy", ",.0f")]
    columns += [Column("choice p50, us", ",.0f"), Column("p99, us", ",.0f"), Column("start, s", ".0f")]
    rows = []
    for turn in turns:
        messages = [window.get(name) for name in names for window in (turn.idle, turn.busy)]
        choice: list[float | None] = [1e6 * seconds for seconds in turn.choice] or [None, None]
        rows.append([turn.workers, *messages, *choice, turn.start or None])
    note = (
        "Events: what etcd sends to those that watch, all together. NATS: in and out. Choice: admission and routing "
        "(least-loaded) of a request. Start: all workers, 16 at a time in each of two processes."
    )
    return Rows("Messages and times", columns, rows, note)
