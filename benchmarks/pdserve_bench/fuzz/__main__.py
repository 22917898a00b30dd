"""Bodies of every shape to every route that takes one, and what is left of them in the graph.

    python -m pdserve_bench.fuzz [--requests 10000] [--seed 1] [--only NUMBER] [--real]

Starts a graph of its own with simulated engines (with --real those of configs/local.yaml). A body is a valid one with
some changes: values of other types, integers over 64 bits wherever a number may stand, NaN, lone surrogates, deep
nesting, long strings, half a body, bytes that are no JSON; some clients leave at a random moment. Body NUMBER of a seed
is always the same: `--only NUMBER` sends it alone and shows the answer. Exit code 1 where an answer was a 5xx (but
`ALLOWED`) or none, where `/health` is not ok, where anything is still in flight or a KV block held afterwards, or where
the workers do not run as many requests at once as they did before.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from httptools import HttpParserError

from pdserve.observe.pages import read_loads
from pdserve.records import Role
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.client import Exchange, HttpConnection, LoadClient
from pdserve_bench.fuzz.bodies import FuzzBody, make
from pdserve_bench.launch import started
from pdserve_bench.load import side_by_side
from pdserve_bench.simulated import simulated, write
from pdserve_bench.watch import GraphWatch, busy

REAL = Path("configs/local.yaml")
SIMULATED = simulated(
    {"step-seconds": 0.002, "prefill-rate": 50000},
    decode={"max-num-seqs": 32},
    common={"max-model-len": 1024, "num-gpu-blocks-override": 4096},
)
ALLOWED: Mapping[int, str] = {}
"""5xx statuses that a body may get, each with the reason"""
EXCUSED: Mapping[bytes, str] = {b"list index out of range": "simulated engines have no logprobs"}
"""what an error in a stream may say, each with the reason"""
CONCURRENCY = 32
TIMEOUT = 60.0
SETTLE = 15.0
BURST_OUTPUT = 200
"""tokens: long enough that as many as there are places overlap"""


@dataclass
class FuzzReport:
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Fuzzer:
    def __init__(self, graph: GraphRecord, seed: int) -> None:
        self._graph, self._seed = graph, seed
        self.report = FuzzReport()

    async def run(self, numbers: Sequence[int], concurrency: int = CONCURRENCY) -> FuzzReport:
        """Send these bodies, and look what they left."""
        began = time.monotonic()
        async with GraphWatch() as watch:
            await watch.move(self._graph)
            await watch.learn()
            places = sum(worker.max_num_seqs for worker in await watch.instances(Role.DECODE))
            bodies = (make(self._seed, number, self._graph.model) for number in numbers)
            await side_by_side(bodies, self.send, concurrency)
            await self._look_after(watch, places)
        self.report.seconds = time.monotonic() - began
        return self.report

    async def send(self, body: FuzzBody) -> bytes:
        """The answer, as far as it was read."""
        answer = b""
        try:
            async with asyncio.timeout(TIMEOUT if body.leaves is None else body.leaves):
                connection = await HttpConnection.open(self._graph.url, body.raw, path=body.path)
                try:
                    status = await connection.status()
                    answer = await connection.rest(despite_reset=True)
                finally:
                    connection.abort()
        except TimeoutError:
            if body.leaves is None:
                self._problem(f"no end within {TIMEOUT:g} s", body)
            self.report.statuses["left"] += 1
        except (OSError, EOFError, HttpParserError) as error:
            self._problem(f"no answer: {error!r}", body)
        else:
            self.report.statuses[str(status)] += 1
            if status >= 500 and status not in ALLOWED:
                self._problem(f"status {status}: {answer[-600:]!r}", body)
            elif status == 200 and _error_code(answer) >= 500 and not any(map(answer.__contains__, EXCUSED)):
                self._problem(f"in the stream: {answer[-600:]!r}", body)
        return answer

    def _problem(self, what: str, body: FuzzBody) -> None:
        self.report.problems.append(
            f"{what}\n    {body}\n    again: --seed {self._seed} --only {body.number}"
        )

    async def _look_after(self, watch: GraphWatch, places: int) -> None:
        left = await watch.leftovers(SETTLE)
        if left.blocks:
            self.report.problems.append(f"KV blocks are held: {dict(left.blocks)}")
        if left.queued:
            self.report.problems.append(f"{left.queued} prefill requests are still queued")
        for instance, load in (await read_loads(await watch.instances())).items():
            if busy(load):
                self.report.problems.append(f"{instance}: {load}")
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            if (answer := await http.get(f"{self._graph.url}/health")).status_code != 200:
                self.report.problems.append(f"/health: {answer.status_code} {answer.text}")
        await self._burst(places)

    async def _burst(self, places: int) -> None:
        """As many requests as the workers run at once, all of which have to be in the middle at the same moment: a
        place that is still taken makes one of them wait for another's end."""
        body = {"model": self._graph.model, "max_tokens": BURST_OUTPUT, "ignore_eos": True, "stream": True}
        burst = [Exchange({**body, "prompt": [300 + n], "return_token_ids": True}) for n in range(places)]
        client = LoadClient(self._graph.url)
        await asyncio.gather(*(client.ask(exchange, TIMEOUT) for exchange in burst))
        self.report.problems += [f"burst: {exchange.error}" for exchange in burst if exchange.error]
        first_end = min(exchange.ended for exchange in burst)
        late = sum(not exchange.arrivals or exchange.arrivals[0] > first_end for exchange in burst)
        if late:
            self.report.problems.append(f"burst: {late} of {places} requests began when another had ended")


def _error_code(answer: bytes) -> int:
    """Of an error event in a stream; 0 where there is none."""
    for line in answer.splitlines():
        if line.startswith(b"data: {") and b'"error"' in line:
            with suppress(ValueError, LookupError, TypeError, AttributeError):
                return int(json.loads(line[6:])["error"]["code"])
    return 0


async def _main(args: argparse.Namespace, folder: Path) -> FuzzReport:
    file = REAL if args.real else write(SIMULATED, folder / "sim.yaml")
    async with started(file, folder, partial(print, file=sys.stderr)) as running:
        fuzzer = Fuzzer(running.graph, args.seed)
        if args.only is None:
            return await fuzzer.run(range(args.first, args.first + args.requests), args.concurrency)
        body = make(args.seed, args.only, running.graph.model)
        print(body)
        print((await fuzzer.send(body)).decode(errors="replace"))
        return fuzzer.report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="the first body (0)")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the graph and its logs, to be kept")
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pdserve-fuzz-") as folder:
        if args.keep:
            args.keep.mkdir(parents=True)
        report = asyncio.run(_main(args, args.keep or Path(folder)))
    print("\n".join(f"{count:6} {status}" for status, count in sorted(report.statuses.items())))
    for problem in report.problems[:40]:
        print(problem)
    told = (
        f"{len(report.problems)} problems" if report.problems else "nothing is left, and every place is free"
    )
    print(f"{sum(report.statuses.values())} bodies in {report.seconds:.0f} s: {told}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
