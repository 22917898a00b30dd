"""Send thousands of requests, most of which are cancelled or fail, and check for leaks.

    python -m pdserve_bench.soak [--real] [--warm-up 2000] [--requests 4000] [--seed 1]
    python -m pdserve_bench.soak --workers 2,16,64 [--requests 600] [--rate 10]
    python -m pdserve_bench.soak --form serve|roles|pods [--minutes 20] [--trace FILE] [--speed 1] [--shrink 16]

Starts a graph (simulated engines, or with --real that of configs/local.yaml), sends a warm-up and measures each
process: KV blocks, sockets, files, asyncio tasks, threads, memory, and the data in NATS and etcd. After the requests,
the graph has 60 s to return to these values. Exit code 1 if something grew beyond its margin (`usage.MARGINS`), or a
request got an unexpected response.

With --workers, measure instead what a request costs in graphs of so many simulated workers (`cost.py`).

With --form, launch a graph in that form, and soak it for some minutes (`rounds.py`). Each round of 20 s replays a part
of a trace, adds a few requests that are meant to end badly, and restarts one process. Exit code 1 if any other request
failed, a response was unexpected, or the idle graph grew beyond the margins.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from pdserve.observe.tables import show, table
from pdserve.registry import connect
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.graphs.launch import REAL, started
from pdserve_bench.graphs.simulated import write
from pdserve_bench.graphs.watch import GraphWatch
from pdserve_bench.measure.trace import read_trace
from pdserve_bench.options import exit_code, program
from pdserve_bench.soak.cost import measure_costs, show_costs, sizes_of
from pdserve_bench.soak.forms import FORMS, SIMULATED
from pdserve_bench.soak.requests import MixedLoad
from pdserve_bench.soak.rounds import soak_rounds
from pdserve_bench.soak.usage import (
    MARGINS,
    UsageSnapshot,
    early_and_late,
    leaks,
    measure_usage,
    nats_keeps,
    parts_of_serve,
)

LENGTHS = {"sim": (8, 1200), "real": (8, 400)}
"""Shortest and longest prompt in tokens: below and above the threshold for remote prefill."""
ALLOCATOR = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc settings: freed memory is returned at once, so that resident memory is memory in use."""
SETTLE = 60.0
CLEAR_WITHIN = 40.0
"""Seconds to wait until the graph holds nothing: longer than a KV lease."""


@dataclass
class SoakReport:
    before: UsageSnapshot
    after: UsageSnapshot
    load: MixedLoad
    seconds: float
    """Seconds from the last request until all values were back, or until the timeout."""

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

        async def look() -> UsageSnapshot:
            stored = {"nats": await nats_keeps(graph), "etcd": len(await registry.read(""))}
            parts = parts_of_serve(graph.pid, await watch.instances(), dict.fromkeys(stored))
            return await measure_usage(parts, stored)

        async def ask(count: int, seed: int) -> tuple[MixedLoad, float]:
            """Return the load, and when its last request ended."""
            load = MixedLoad(lambda: Endpoint(graph.url, graph.model), lengths, seed)
            await load.run(count)
            ended = time.monotonic()
            await watch.leftovers(CLEAR_WITHIN)
            return load, ended

        await watch.move(graph)
        await watch.learn()
        warm_up, _ = await ask(warm, seed)
        before = await look()
        load, ended = await ask(requests, seed + 1)
        while leaks(before, after := await look()) and time.monotonic() < ended + SETTLE:  # noqa: ASYNC110
            await asyncio.sleep(1)
        load.surprises += warm_up.surprises
        return SoakReport(before, after, load, time.monotonic() - ended)


def _cell(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return ""
    return f"{before}" if before == after else f"{before} {after - before:+}"


async def _main(args: argparse.Namespace, folder: Path) -> SoakReport:
    file = REAL if args.real else write(SIMULATED, folder / "sim.yaml")
    lengths = LENGTHS["real" if args.real else "sim"]
    async with started(file, folder, partial(print, file=sys.stderr), thresholds=True) as running:
        return await soak(running.graph, args.warm_up, args.requests or 4000, lengths, args.seed)


def _show(before: UsageSnapshot, after: UsageSnapshot, done: Counter[str]) -> None:
    held = table("process", *MARGINS)
    for name in sorted(before):
        usage, now = before[name], after.get(name)
        held.add_row(name, *(_cell(getattr(usage, what), getattr(now, what, None)) for what in MARGINS))
    show(held)
    print("\n".join(f"{count:6} {what}" for what, count in sorted(done.items())))


def _soak(args: argparse.Namespace, folder: Path) -> list[str]:
    """Run and show a soak; return its problems."""
    if args.form:
        trace = read_trace(args.trace).shrunk(args.shrink) if args.trace else None
        rounds = asyncio.run(soak_rounds(args.form, args.minutes, trace, args.speed, args.seed, folder))
        if args.json:
            args.json.write_bytes(msgspec.json.encode(rounds))
        if rounds.samples:
            _show(*early_and_late(rounds.samples), rounds.done)
        return rounds.problems
    report = asyncio.run(_main(args, folder))
    _show(report.before, report.after, report.load.done)
    if not report.problems:
        print(f"back to the earlier values after {report.seconds:.1f} s")
    return report.problems


def main() -> int:
    parser = program(__doc__)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--workers", metavar="2,16,64")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second, with --workers")
    parser.add_argument("--requests", type=int, help="default: 4000; 600 with --workers")
    parser.add_argument("--warm-up", type=int, default=2000)
    parser.add_argument("--form", choices=list(FORMS))
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="default: random requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the samples of each round")
    parser.add_argument("--speed", type=float, default=1.0, help="replay the trace this many times as fast")
    parser.add_argument("--shrink", type=int, default=16, help="divide the lengths of the trace by this")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as folder:
        if args.workers is not None:
            say = partial(print, file=sys.stderr)
            requests = args.requests or 600
            show_costs(
                asyncio.run(measure_costs(sizes_of(args.workers), requests, args.rate, Path(folder), say))
            )
            return 0
        for name, value in ALLOCATOR.items():
            os.environ.setdefault(name, value)
        problems = _soak(args, Path(folder))
    print("\n".join(problems[:40]) or "no leaks, nothing unexpected")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(exit_code(main))
