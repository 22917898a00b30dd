"""A load that shifts, against workers of fixed roles and workers of `role: both`, on as many engines.

    python -m pdserve_bench.shift [--seconds 15] [--turns 2] [--policy threshold] [--json FILE]
    python -m pdserve_bench.shift --real        two real engines on the CPU, the demo model, a load for those

Long prompts with short answers come first, then half of each, then short prompts with long answers: Poisson, at rates
that two workers can carry if each does what there is to do. Simulated engines have the speed of `SPEED` and hardly need
the CPU: all systems get the load at the same time, so that what else the machine does disturbs all. Real engines get it
in turn.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pdserve_bench.client import Exchange, LoadClient, completion
from pdserve_bench.launch import RunningGraph, started
from pdserve_bench.load import open_loop
from pdserve_bench.options import program
from pdserve_bench.report import Column, Report, Rows
from pdserve_bench.samples import percentile
from pdserve_bench.simulated import COMMON, simulated, write
from pdserve_bench.slo import Slo

SPEED = {"step-seconds": 0.01, "sequence-seconds": 0.001, "prefill-rate": 4000, "transfer-seconds": 0.004}
CHUNK = 256
"""tokens in a step: a prompt holds up a stream for some 75 ms at a time"""
PATIENCE = 120.0
SLO = Slo(1.0, 0.15)
COLUMNS = (
    Column("load"),
    Column("system"),
    Column("requests", "d"),
    Column("in SLO, %", ".0f"),
    Column("tokens/s", ".0f"),
    Column("TTFT p50, ms", ".0f"),
    Column("TTFT p99, ms", ".0f"),
    Column("ITL p50, ms", ".0f"),
    Column("ITL p99, ms", ".0f"),
    Column("remote, %", ".0f"),
)


@dataclass(frozen=True)
class ShiftedLoad:
    name: str
    rate: float
    """requests per second"""
    kinds: tuple[tuple[int, int], ...]
    """tokens of prompt and answer; each request is one of these"""


LONG, SHORT = (1500, 16), (48, 200)
LOADS = (
    ShiftedLoad("long prompts, short answers", 4.0, (LONG,)),
    ShiftedLoad("half and half", 4.0, (LONG, SHORT)),
    ShiftedLoad("short prompts, long answers", 6.0, (SHORT,)),
)
REAL_LOADS = (
    ShiftedLoad("long prompts, short answers", 10.0, (LONG,)),
    ShiftedLoad("half and half", 5.0, (LONG, SHORT)),
    ShiftedLoad("short prompts, long answers", 3.0, (SHORT,)),
)


def systems(real: bool, policy: str) -> dict[str, dict[str, Any]]:
    """Sections of a file for each, all with two engines."""
    shape = {"max-num-batched-tokens": CHUNK, "max-num-seqs": 64}
    shared = {**COMMON, **({} if real else shape)}
    split = simulated(None if real else SPEED, common=shared)
    if real:
        for section in ("VllmWorker", "PrefillWorker"):
            split[section] |= {"engine": "vllm"}
    if policy == "adaptive":
        del split["VllmWorker"]["max-local-prefill-length"]
    split["VllmWorker"]["policy"] = policy
    two = {**split["VllmWorker"], "ServiceArgs": {"workers": 2}}
    rest = {name: split[name] for name in ("Common", "Frontend")}
    return {
        "1 prefill + 1 decode": split,
        "2 both": {**rest, "VllmWorker": {**two, "role": "both"}},
        "2 aggregated": {**rest, "VllmWorker": {**two, "remote-prefill": False}},
    }


def requests(model: str, phase: ShiftedLoad, seed: int) -> Iterator[Exchange]:
    dice = random.Random(seed)
    while True:
        prompt, answer = dice.choice(phase.kinds)
        yield Exchange(completion(model, [dice.randrange(20, 600) for _ in range(prompt)], answer))


async def load(
    running: RunningGraph, phase: ShiftedLoad, seconds: float, seed: int
) -> tuple[list[Exchange], float]:
    """The same requests at the same times for every system; and seconds until the last was answered."""
    begin = time.monotonic()
    client = LoadClient(running.graph.url)
    arrivals = requests(running.graph.model, phase, seed)
    done = await open_loop(
        arrivals, lambda exchange: client.ask(exchange, PATIENCE), phase.rate, seconds, seed
    )
    return done, time.monotonic() - begin


def row(phase: ShiftedLoad, system: str, done: list[Exchange], seconds: float) -> list[Any]:
    ttfts = [exchange.ttft for exchange in done if exchange.ttft is not None]
    gaps = [gap for exchange in done for gap in exchange.gaps]
    tokens = sum(exchange.output_tokens for exchange in done)
    remote = sum(exchange.prefill == "remote" for exchange in done)
    return [
        phase.name,
        system,
        len(done),
        100 * SLO.attainment(done),
        tokens / seconds,
        *(1000 * percentile(ttfts, share) for share in (0.5, 0.99)),
        *(1000 * percentile(gaps, share) for share in (0.5, 0.99)),
        100 * remote / max(1, len(done)),
    ]


async def measure(folder: Path, seconds: float, turns: int, real: bool, policy: str) -> Report:
    rows: dict[tuple[str, str], tuple[list[Exchange], float]] = {}
    phases = REAL_LOADS if real else LOADS
    async with AsyncExitStack() as stack:
        running: dict[str, RunningGraph] = {}
        for number, (name, sections) in enumerate(systems(real, policy).items()):
            place = folder / str(number)
            place.mkdir()
            file = write(sections, place / "file.yaml")
            running[name] = await stack.enter_async_context(
                started(file, place, partial(print, file=sys.stderr))
            )
        for turn in range(turns):
            for together in [[name] for name in running] if real else [list(running)]:
                for phase in phases:
                    loads = (load(running[name], phase, seconds, seed=turn) for name in together)
                    for name, (done, took) in zip(together, await asyncio.gather(*loads), strict=True):
                        before, spent = rows.get((phase.name, name), ([], 0.0))
                        rows[phase.name, name] = (before + done, spent + took)
    found = [row(phase, name, *rows[phase.name, name]) for phase in phases for name in running]
    table = Rows(f"{seconds:g} s of each load, {turns} turns; SLO: {SLO}", COLUMNS, found)
    return Report(title="A load that shifts, on two engines", tables=[table])


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--real", action="store_true", help="real engines")
    parser.add_argument("--policy", choices=("threshold", "adaptive"), default="adaptive")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-shift-") as folder:
        report = asyncio.run(measure(Path(folder), args.seconds, args.turns, args.real, args.policy))
    report.show()
    report.write(args.json, None)


if __name__ == "__main__":
    main()
