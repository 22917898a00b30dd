"""Requests of every shape to every route, and what is left of them in the graph.

    python -m pdserve_bench.fuzz [--requests 10000] [--seed 1] [--real [--vllm]] [--only NUMBER | --nasty NAME]
    python -m pdserve_bench.fuzz --attack [KIND,...] [--seconds 600] [--real]

Starts a graph of its own with simulated engines (with --real those of configs/local.yaml). First come the requests that
were made by hand (`nasties.py`), then schemathesis by the graph's own /openapi.json (a tenth), then valid requests with
some changes each. Beside them a client asks all the time what it knows the answers of. Findings, for each of which a
command is printed that sends it again: a 5xx, an answer that is none (an error in no dialect, a stream without its
end), no answer in time; and whatever is left behind: KV blocks, requests, places, processes that ended, memory,
tracebacks. With --vllm each 5xx is sent to vLLM's own server too: what that answers with a 5xx as well is not counted.
Request NUMBER of a seed is always the same: `--only NUMBER` sends it alone and shows the answer. With --attack clients
take all that they can get (`attack.py`) instead. Exit code 1 where anything was found.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pdserve.config.load import load
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.fuzz import attack, schema
from pdserve_bench.fuzz.bodies import make
from pdserve_bench.fuzz.fuzzer import Fuzzer, FuzzFinding, FuzzReport
from pdserve_bench.fuzz.nasties import nasties
from pdserve_bench.launch import plain_vllm, started
from pdserve_bench.options import program
from pdserve_bench.simulated import simulated, write

REAL = Path("configs/local.yaml")
FINDINGS = Path("fuzz-findings")
"""a folder for the bodies that no command line takes"""
SIMULATED = simulated(
    {"step-seconds": 0.002, "prefill-rate": 50000},
    decode={"max-num-seqs": 32},
    common={"max-model-len": 1024, "num-gpu-blocks-override": 4096},
)
VLLM_ARGUMENTS = "--max-model-len 4096 --enforce-eager --served-model-name demo"
OPERATIONS = 20
"""of the description, about: schemathesis is told how many requests each may get"""
NASTY_AT_ONCE = 4
SHOWN = 60


async def fuzz(fuzzer: Fuzzer, model: str, url: str, args: argparse.Namespace, folder: Path) -> None:
    async with fuzzer.watching():
        first = nasties(model)
        await fuzzer.run(first, NASTY_AT_ONCE)
        say(f"{len(first)} requests made by hand: {len(fuzzer.report.findings)} findings")
        examples = args.requests // 10 // OPERATIONS
        sent, said = await schema.run(url, folder, examples, args.seed) if examples else (0, "")
        fuzzer.report.statuses["by schemathesis"] += sent
        if said.count("\n- ST") > said.count("list index out of range"):  # simulated engines have no logprobs
            fuzzer.report.findings.append(FuzzFinding(said))
        say(f"{sent} requests by schemathesis: {'findings' if said else 'none'}")
        rest = max(0, args.requests - fuzzer.report.sent)
        await fuzzer.run(make(args.seed, number, model) for number in range(rest))


async def _main(args: argparse.Namespace, folder: Path) -> tuple[FuzzReport, GraphRecord | None]:
    sim = attack.SIMULATED if args.attack is not None else SIMULATED
    file = REAL if args.real else write(sim, folder / "sim.yaml")
    if args.attack is not None:
        kinds = args.attack.split(",") if args.attack else [*attack.KINDS]
        return await attack.attacked(file, folder, kinds, args.seconds, say), None
    async with started(file, folder, say, thresholds=True) as running:
        graph = running.graph
        fuzzer = Fuzzer(graph, running.state_dir / "logs", say)
        named = {request.name: request for request in nasties(graph.model)}
        if args.only is not None or args.nasty:
            request = named[args.nasty] if args.nasty else make(args.seed, args.only, graph.model)
            print(request.curl(graph.url, FINDINGS))
            print((await fuzzer.send(request)).decode(errors="replace"))
        else:
            await fuzz(fuzzer, graph.model, graph.url, args, folder)
    if args.vllm and any(finding.status >= 500 for finding in fuzzer.report.findings):
        model = Path(load(file, {}).model)
        async with plain_vllm(model, VLLM_ARGUMENTS.split(), folder, say) as (url, _):
            theirs = await fuzzer.forgive(url)
        say(f"{theirs} of the answers with 5xx are vLLM's too")
    return fuzzer.report, graph


def show(report: FuzzReport, graph: GraphRecord | None, seed: int) -> None:
    print("\n".join(f"{count:6} {status}" for status, count in sorted(report.statuses.items())))
    for finding in report.findings[:SHOWN]:
        print(finding.what)
        if graph and (request := finding.request):
            number = request.name.removeprefix("body ")
            again = f"--seed {seed} --only {number}" if number.isdecimal() else f"--nasty '{request.name}'"
            print(f"    {request.name}, again: {again}\n    {request.curl(graph.url, FINDINGS)}")
    told = f"{len(report.findings)} findings" if report.findings else "nothing found, and nothing is left"
    print(f"{report.sent} requests in {report.seconds:.0f} s: {told}")
    print(f"beside them {report.canaries} right answers, {report.longest_pause:.2f} s between tokens at most")
    print(f"the frontend's loop was held for {report.longest_hold:.2f} s of CPU time at most")


say: Callable[[str], None] = partial(print, file=sys.stderr, flush=True)


def main() -> int:
    parser = program(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER")
    parser.add_argument("--nasty", metavar="NAME", help="one of those that were made by hand")
    parser.add_argument(
        "--attack", nargs="?", const="", metavar="KIND,...", help=f"clients: {', '.join(attack.KINDS)}"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of the attack")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the graph and its logs, to be kept")
    parser.add_argument("--real", action="store_true", help="engines that are not simulated")
    parser.add_argument("--vllm", action="store_true", help="send each 5xx to vLLM's own server too")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pdserve-fuzz-") as folder:
        if args.keep:
            args.keep.mkdir(parents=True)
        report, graph = asyncio.run(_main(args, args.keep or Path(folder)))
    show(report, graph, args.seed)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
