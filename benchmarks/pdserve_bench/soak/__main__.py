"""Thousands of requests, most of which are cancelled or fail, and what is left of them.

    python -m pdserve_bench.soak [--real] [--warm-up 2000] [--requests 4000] [--seed 1]

Starts a graph of its own (simulated engines, or with --real those of configs/local.yaml), sends a warm-up and notes
what each process holds: KV blocks, sockets, files, asyncio tasks, threads, memory, and what NATS and etcd keep. Then
come the requests, and the graph gets 60 s to be back where it was. Exit code 1 where something grew by more than its
margin (`usage.MARGINS`), or an answer was none that its request may get.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdserve.registry import connect
from pdserve.registry.base import Registry
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.launch import started
from pdserve_bench.options import program
from pdserve_bench.simulated import simulated, write
from pdserve_bench.soak.requests import MixedLoad
from pdserve_bench.soak.usage import MARGINS, Picture, leaks, nats_keeps, picture
from pdserve_bench.watch import GraphWatch

REAL = Path("configs/local.yaml")
SIMULATED = simulated(
    {"step-seconds": 0.005, "prefill-rate": 20000}, common={"num-gpu-blocks-override": 1024}
)
LENGTHS = {"sim": (8, 1200), "real": (8, 400)}
"""tokens of prompts, below and above the threshold for remote prefill"""
ALLOCATOR = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc's: what is freed is given back at once, so that resident memory is what is held"""
SETTLE = 60.0
LEASE = 40.0


@dataclass
class SoakReport:
    before: Picture
    after: Picture
    load: MixedLoad
    seconds: float
    """until everything was back, or the patience over"""

    @property
    def problems(self) -> list[str]:
        return [*leaks(self.before, self.after), *self.load.surprises]


async def soak(
    graph: GraphRecord, warm: int, requests: int, lengths: tuple[int, int], seed: int
) -> SoakReport:
    async with (
        connect(graph.etcd, graph.namespace, graph.load_credentials()) as registry,
        GraphWatch() as watch,
    ):
        await watch.move(graph)
        await watch.learn()
        warm_up = MixedLoad(graph.url, graph.model, lengths, seed)
        await warm_up.run(warm)
        await watch.leftovers(LEASE)
        before = await _look(graph, watch, registry)
        load = MixedLoad(graph.url, graph.model, lengths, seed + 1)
        await load.run(requests)
        ended = time.monotonic()
        await watch.leftovers(LEASE)
        after = await _look(graph, watch, registry)
        while leaks(before, after) and time.monotonic() < ended + SETTLE:
            await asyncio.sleep(1)
            after = await _look(graph, watch, registry)
        load.surprises += warm_up.surprises
        return SoakReport(before, after, load, time.monotonic() - ended)


async def _look(graph: GraphRecord, watch: GraphWatch, registry: Registry) -> Picture:
    stored = {"nats": await nats_keeps(graph), "etcd": len(await registry.read(""))}
    return await picture(graph.pid, await watch.instances(), stored)


def show(report: SoakReport) -> None:
    table = Table("process", *MARGINS)
    for name, before in report.before.items():
        after = report.after.get(name)
        table.add_row(name, *(_cell(getattr(before, what), getattr(after, what, None)) for what in MARGINS))
    console = Console()
    console.print(table)
    console.print("\n".join(f"{count:6} {what}" for what, count in sorted(report.load.done.items())))
    console.print(f"back where it was after {report.seconds:.1f} s" if not report.problems else "")
    for problem in report.problems[:40]:
        console.print(problem, style="red", markup=False)


def _cell(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return ""
    return f"{before}" if before == after else f"{before} {after - before:+}"


async def _main(args: argparse.Namespace, folder: Path) -> SoakReport:
    file = REAL if args.real else write(SIMULATED, folder / "sim.yaml")
    lengths = LENGTHS["real" if args.real else "sim"]
    async with started(file, folder, partial(print, file=sys.stderr), thresholds=True) as running:
        return await soak(running.graph, args.warm_up, args.requests, lengths, args.seed)


def main() -> int:
    parser = program(__doc__)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--warm-up", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    for name, value in ALLOCATOR.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as folder:
        report = asyncio.run(_main(args, Path(folder)))
    show(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
