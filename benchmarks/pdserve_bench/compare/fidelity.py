"""How true calibrated simulated engines are: the same load on a real engine and on its simulation.

    python -m pdserve_bench.compare.fidelity [--rates 1 2.5] [--seconds 20] [--json FILE]

Starts a graph of two real engines of the demo model (one prefills, one decodes; a CPU thread each on a machine with two
cores), calibrates, and sends Poisson loads, all prefilled locally and then all remotely, and all of it once more, which
shows how much of a difference is the machine's noise. Then the same loads, with the same arrivals, go to the same graph
with simulated engines. Takes some seven minutes; the machine should do nothing else.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError, Unavailable
from pdserve_bench.compare.calibrate import EngineLimits, calibrate, remote_cost
from pdserve_bench.endpoint import learn_prompts
from pdserve_bench.goodput.requests import PoissonRequests
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Column, Report, Rows, check_outputs
from pdserve_bench.runs import INTERRUPTED, LoadRun, run_until_stopped
from pdserve_bench.simulated import simulated
from pdserve_bench.systems.system import ALL_LOCAL, ALL_REMOTE, GraphSystem, RunningSystem

FIGURES = ("TTFT p50", "TTFT p90", "ITL p50", "ITL p99", "longest gap p90")
WAYS = {"local": ALL_LOCAL, "remote": ALL_REMOTE}
PROMPT, ANSWER = 380, 64
LIMITS = EngineLimits(max_model_len=4096, max_num_seqs=32, max_batched_tokens=2048)
_KV_BYTES = 2048
"""per token of the demo model: keys and values of 4 layers with 2 heads of 64 numbers of 2 bytes"""
_SETTLE = 2.0

Figures = dict[tuple[str, float], dict[str, float]]
"""prefill and rate -> figures in seconds"""


@dataclass(frozen=True)
class PoissonLoad:
    rates: Sequence[float]
    seconds: float


def system(name: str, engine: dict[str, Any], speed: dict[str, Any] | None = None) -> GraphSystem:
    common = {
        "enforce-eager": True,
        "max-num-seqs": LIMITS.max_num_seqs,
        "max-num-batched-tokens": LIMITS.max_batched_tokens,
        "num-gpu-blocks-override": 8192,
    }
    return GraphSystem(name, simulated(speed, decode=engine, prefill=engine, common=common))


@asynccontextmanager
async def running(
    folder: Path, name: str, schedule: Schedule, engine: dict[str, Any], speed: dict[str, float] | None = None
) -> AsyncIterator[RunningSystem]:
    (folder / name).mkdir()
    async with AsyncExitStack() as stack:
        with schedule.phase(f"{name} engines start"):
            found = await stack.enter_async_context(
                system(name, engine, speed).start(folder / name, schedule.say)
            )
        yield found


async def measure(folder: Path, load: PoissonLoad, schedule: Schedule, report: Report) -> None:
    """Adds to the report as it goes."""
    _announce(schedule, load)
    async with running(folder, "real", schedule, {"engine": "vllm"}) as real:
        await real.apply(ALL_LOCAL)
        speed = await calibrate(real.endpoint, schedule, LIMITS)
        report.notes.append(f"A real engine: {speed.describe()}.")
        cost = await remote_cost(real, speed, schedule, LIMITS)
        measured = await _loads(real, load, schedule, "real engines")
        again = await _loads(real, load, schedule, "real engines again")
    free = speed.with_transfer(cost, cost).speeds()
    async with running(folder, "idle", schedule, {}, free) as idle:
        floor = await remote_cost(idle, speed, schedule, LIMITS)
    speed = speed.with_transfer(cost, floor, _KV_BYTES)
    report.notes += [f"Real: {cost.describe()}.", f"Simulated, transfers free: {floor.describe()}."]
    report.data["speeds"], report.data["points"] = speed.speeds(), speed.errors()
    async with running(folder, "simulated", schedule, {}, speed.speeds()) as sims:
        predicted = await _loads(sims, load, schedule, "simulated engines")
    _tell(measured, again, predicted, report)


def _announce(schedule: Schedule, load: PoissonLoad) -> None:
    for name, seconds in (("real", 60.0), ("idle", 25.0), ("simulated", 25.0)):
        schedule.announce(f"{name} engines start", seconds)
    for name in ("real engines", "real engines again", "simulated engines"):
        for way in WAYS:
            for rate in load.rates:
                schedule.announce(_phase(name, way, rate), load.seconds + _SETTLE)


def _phase(name: str, way: str, rate: float) -> str:
    return f"{name}, {way} prefill, {rate:g} a second"


async def _loads(found: RunningSystem, load: PoissonLoad, schedule: Schedule, name: str) -> Figures:
    """The same arrivals each time, and other prompts than before, which no prefix cache has."""
    figures: Figures = {}
    for way, settings in WAYS.items():
        await found.apply(settings)
        for rate in load.rates:
            seed = len(figures)
            run, prompts = LoadRun(), await learn_prompts(found.endpoint, 1 + seed + 100 * len(name))
            requests = PoissonRequests(prompts, PROMPT, ANSWER)
            with schedule.phase(_phase(name, way, rate)):
                await asyncio.sleep(_SETTLE)
                await requests.at(rate, load.seconds, seed).run(found.endpoint, run)
            figures[way, rate] = run.summary()
    return figures


def _tell(measured: Figures, again: Figures, predicted: Figures, report: Report) -> None:
    rows: list[list[str | float]] = []
    errors: dict[str, list[float]] = {"medians": [], "tails": []}
    noise: dict[str, list[float]] = {"medians": [], "tails": []}
    for (way, rate), real in measured.items():
        for name in FIGURES:
            second, guess = again[way, rate][name], predicted[way, rate][name]
            kind = "medians" if name.endswith("p50") else "tails"
            errors[kind].append(abs(guess / real[name] - 1))
            noise[kind].append(abs(second / real[name] - 1))
            rows.append([way, rate, name, 1e3 * real[name], second / real[name], guess / real[name]])
        counts = (real["finished"], again[way, rate]["finished"], predicted[way, rate]["finished"])
        report.notes.append(
            f"{way} prefill, {rate:g} a second: finished {counts[0]:g}, again {counts[1]:g}, simulated {counts[2]:g}."
        )
    columns = (
        Column("prefill"),
        Column("rate, 1/s", "g"),
        Column("figure"),
        Column("measured, ms", ".1f"),
        Column("again / measured", ".2f"),
        Column("predicted / measured", ".2f"),
    )
    report.tables.append(Rows(f"Prompts of {PROMPT} tokens, answers of {ANSWER}", columns, rows))
    parts = (
        f"{kind} by {100 * statistics.median(errors[kind]):.0f} % "
        f"(a second measurement: {100 * statistics.median(noise[kind]):.0f} %)"
        for kind in errors
    )
    report.lead = f"Predictions are off, in the median: {', '.join(parts)}."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.5], help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report("How true simulated engines are")
    try:
        check_outputs(args.json, None)
        with tempfile.TemporaryDirectory(prefix="pdserve-fidelity-") as folder, Schedule() as schedule:
            load = PoissonLoad(args.rates, args.seconds)
            report.complete = run_until_stopped(lambda: measure(Path(folder), load, schedule, report))
    except (ConfigError, Unavailable) as error:
        sys.exit(f"fidelity: {error}")
    report.show()
    report.write(args.json, None)
    if not report.complete:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
