"""Send thousands of requests, most of which are cancelled or fail, and check for leaks.

    python -m pdserve_bench.soak [--real] [--warm-up 2000] [--requests 4000] [--seed 1]
    python -m pdserve_bench.soak --workers 2,16,64 [--requests 1000] [--rate 10]

Starts a graph (simulated engines, or with --real that of configs/local.yaml), sends a warm-up and measures each
process: KV blocks, sockets, files, asyncio tasks, threads, memory, and the data in NATS and etcd. After the requests,
the graph has 60 s to return to these values. Exit code 1 if something grew beyond its margin (`usage.MARGINS`), or a
request got an unexpected response.

With --workers, measure instead what a request costs in graphs of so many simulated workers (`cost.py`).
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

from pdserve.observe.tables import show, table
from pdserve.registry import connect
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.graphs.launch import REAL, started
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.graphs.watch import GraphWatch
from pdserve_bench.options import program
from pdserve_bench.soak.cost import measure_costs, show_costs, sizes_of
from pdserve_bench.soak.requests import MixedLoad
from pdserve_bench.soak.usage import MARGINS, UsageSnapshot, leaks, measure_usage, nats_keeps

SIMULATED = simulated(
    {"step-seconds": 0.005, "prefill-rate": 20000}, common={"num-gpu-blocks-override": 1024}
)
LENGTHS = {"sim": (8, 1200), "real": (8, 400)}
"""Prompt lengths in tokens, below and above the threshold for remote prefill."""
ALLOCATOR = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc settings: freed memory is returned at once, so that resident memory is memory in use."""
SETTLE = 60.0
LEASE = 40.0


@dataclass
class SoakReport:
    before: UsageSnapshot
    after: UsageSnapshot
    load: MixedLoad
    seconds: float
    """Seconds until everything was back, or the timeout."""

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
            return await measure_usage(graph.pid, await watch.instances(), stored)

        async def ask(count: int, seed: int) -> tuple[MixedLoad, float]:
            """Return the load, and when its last request ended."""
            load = MixedLoad(graph.url, graph.model, lengths, seed)
            await load.run(count)
            ended = time.monotonic()
            await watch.leftovers(LEASE)
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


def main() -> int:
    parser = program(__doc__)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--workers", type=sizes_of, metavar="2,16,64")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second, with --workers")
    parser.add_argument("--requests", type=int, help="default: 4000; 1000 with --workers")
    parser.add_argument("--warm-up", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    if args.workers:
        with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as folder:
            say = partial(print, file=sys.stderr)
            requests = args.requests or 1000
            show_costs(asyncio.run(measure_costs(args.workers, requests, args.rate, Path(folder), say)))
        return 0
    for name, value in ALLOCATOR.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as folder:
        report = asyncio.run(_main(args, Path(folder)))
    held = table("process", *MARGINS)
    for name, before in report.before.items():
        after = report.after.get(name)
        held.add_row(name, *(_cell(getattr(before, what), getattr(after, what, None)) for what in MARGINS))
    show(held)
    print("\n".join(f"{count:6} {what}" for what, count in sorted(report.load.done.items())))
    print(
        "\n".join(report.problems[:40])
        or f"no leaks; back to the earlier values after {report.seconds:.1f} s"
    )
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
