"""Send hostile requests to every route of a graph and check the responses and what is left behind.

    python -m pdserve_bench.fuzz [--requests 2000] [--seed 1] [--real]
    python -m pdserve_bench.fuzz --attack [KIND,...] [--seconds 600] [--real]

Starts a graph with simulated engines (with --real that of configs/local.yaml), and sends it the handwritten requests
(`corpus.py`): as they are, as streams, and from clients that disconnect. Then schemathesis generates about --requests
requests from the graph's /openapi.json. A canary client with known outputs runs beside all of them. Findings are a
wrong status, a malformed response or a timeout, each with a curl command that repeats the request; a wrong or late
output of the canary; and leftovers: KV blocks, requests, slots, processes that ended, memory, tracebacks. With
--attack, greedy clients (`attack.py`) run instead. Exit code 1 if there are findings.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pdserve.supervisor.state import GraphRecord
from pdserve_bench.fuzz import attack, schema
from pdserve_bench.fuzz.corpus import hostile_requests, streamed, unfinished
from pdserve_bench.fuzz.fuzzer import Fuzzer, FuzzFinding, FuzzReport
from pdserve_bench.graphs.launch import REAL, started
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.options import exit_code, program

FINDINGS = Path("fuzz-findings")
"""Folder for bodies that cannot be typed on a command line."""
SIMULATED = simulated(
    {"step-seconds": 0.002, "prefill-rate": 50000},
    decode={"max-num-seqs": 32},
    common={"max-model-len": 1024, "num-gpu-blocks-override": 4096},
)
NASTY_AT_ONCE = 4
SHOWN = 60


async def fuzz(fuzzer: Fuzzer, requests: int, seed: int, folder: Path) -> None:
    graph, report = fuzzer.graph, fuzzer.report
    async with fuzzer.watching():
        by_hand = hostile_requests(graph.model)
        await fuzzer.run(by_hand, NASTY_AT_ONCE)
        await fuzzer.run(streamed(by_hand), NASTY_AT_ONCE)
        await fuzzer.run(unfinished(by_hand, seed))
        say(f"{report.sent} handwritten requests: {len(report.findings)} findings")
        sent, failures = await schema.run(graph.url, folder, requests, seed)
        report.statuses["by schemathesis"] += sent
        report.findings += [FuzzFinding(failures)] if failures else []
        say(f"{sent} requests by schemathesis: {'findings' if failures else 'no findings'}")


async def _main(args: argparse.Namespace, folder: Path) -> tuple[FuzzReport, GraphRecord | None]:
    sim = attack.SIMULATED if args.attack is not None else SIMULATED
    file = REAL if args.real else write(sim, folder / "sim.yaml")
    if args.attack is not None:
        kinds = args.attack.split(",") if args.attack else [*attack.KINDS]
        return await attack.attacked(file, folder, kinds, args.seconds, say), None
    async with started(file, folder, say, dtype="float32", thresholds=True) as running:
        graph = running.graph
        fuzzer = Fuzzer(graph, running.state_dir / "logs", say)
        await fuzz(fuzzer, args.requests, args.seed, folder)
    return fuzzer.report, graph


def show(report: FuzzReport, graph: GraphRecord | None) -> None:
    print("\n".join(f"{count:6} {status}" for status, count in sorted(report.statuses.items())))
    for finding in report.findings[:SHOWN]:
        print(finding.what)
        if graph and (request := finding.request):
            print(f"    {request.name}\n    {request.curl(graph.url, FINDINGS)}")
    result = f"{len(report.findings)} findings" if report.findings else "no findings"
    print(f"{report.sent} requests in {report.seconds:.0f} s: {result}")
    print(f"canary: {report.canaries} outputs, at most {report.longest_pause:.2f} s between tokens")
    print(f"the frontend's event loop was blocked for at most {report.longest_hold:.2f} s of CPU time")


say: Callable[[str], None] = partial(print, file=sys.stderr, flush=True)


def main() -> int:
    parser = program(__doc__)
    parser.add_argument(
        "--requests", type=int, default=2000, help="approximate number of requests by schemathesis"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--attack",
        nargs="?",
        const="",
        metavar="KIND,...",
        help=f"kinds of clients: {', '.join(attack.KINDS)}",
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="duration of the attack")
    parser.add_argument("--real", action="store_true", help="use real engines")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pdserve-fuzz-") as folder:
        report, graph = asyncio.run(_main(args, Path(folder)))
    show(report, graph)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
