"""How true calibrated simulated engines are: the same load on a real engine and on its simulation.

    python -m pdserve_bench.compare.fidelity [--rates 0.5 1] [--seconds 20] [--json FILE]

Starts a graph of two real engines of the demo model (one prefills, one decodes), calibrates as `pdserve compare` does,
and sends Poisson loads, all prefilled locally and then all remotely, and all of it once more, which shows how much of a
difference is the machine's noise. Then the same arrivals go to the same graph with simulated engines. Takes some seven
minutes; the machine should do nothing else.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from pdserve.errors import ConfigError, Unavailable
from pdserve_bench.compare.calibrate import SECONDS, EngineLimits, learn_speed
from pdserve_bench.endpoint import learn_prompts
from pdserve_bench.goodput.requests import PoissonRequests
from pdserve_bench.options import program
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Column, Report, Rows, check_outputs
from pdserve_bench.runs import INTERRUPTED, LoadRun, run_until_stopped
from pdserve_bench.simulated import simulated
from pdserve_bench.systems.system import ALL_LOCAL, ALL_REMOTE, GraphSystem, RunningSystem

FIGURES = ("TTFT p50", "TTFT p90", "ITL p50", "ITL p99", "longest gap p90")
WAYS = {"local": ALL_LOCAL, "remote": ALL_REMOTE}
LIMITS = EngineLimits()
COMMON = {
    "enforce-eager": True,
    "max-num-seqs": LIMITS.max_num_seqs,
    "max-num-batched-tokens": LIMITS.max_batched_tokens,
    "num-gpu-blocks-override": 8192,
}
_SETTLE = 2.0
_COLUMNS = (
    Column("prefill"),
    Column("rate, 1/s", "g"),
    Column("figure"),
    Column("measured, ms", ".1f"),
    Column("again / measured", ".2f"),
    Column("predicted / measured", ".2f"),
)
Figures = dict[tuple[str, float], dict[str, float]]
"""prefill and rate -> figures in seconds"""


async def measure(folder: Path, options: argparse.Namespace, schedule: Schedule, report: Report) -> None:
    """Adds to the report."""
    for name, seconds in (
        ("real engines start", 60.0),
        ("simulated engines start", 25.0),
        ("calibration", SECONDS),
    ):
        schedule.announce(name, seconds)
    loads = ("measured", "again", "predicted")
    for name in loads:
        schedule.announce(name, (options.seconds + _SETTLE) * len(options.rates) * len(WAYS))
    vllm = {"engine": "vllm"}
    async with AsyncExitStack() as stack:
        with schedule.phase("real engines start"):
            graph = GraphSystem("real", simulated(decode=vllm, prefill=vllm, common=COMMON))
            real = await stack.enter_async_context(graph.start(folder, schedule.say))
        schedule.cancel("calibration")
        speed = await learn_speed(real, schedule, LIMITS, remote=True)
        report.notes.append(f"A real engine: {speed.describe()}.")
        report.data["speeds"], report.data["points"] = speed.speeds(), speed.errors()
        found = [await _loads(real, options, schedule, name) for name in loads[:2]]
    async with AsyncExitStack() as stack:
        with schedule.phase("simulated engines start"):
            graph = GraphSystem("simulated", simulated(speed.speeds(), common=COMMON))
            sims = await stack.enter_async_context(graph.start(folder, schedule.say))
        _tell(report, found[0], found[1], await _loads(sims, options, schedule, loads[2]))


async def _loads(found: RunningSystem, options: argparse.Namespace, schedule: Schedule, name: str) -> Figures:
    """The same arrivals each time, and other prompts than before, which no prefix cache has."""
    figures: Figures = {}
    prompts = await learn_prompts(found.endpoint, len(name))
    with schedule.phase(name):
        for way, settings in WAYS.items():
            await found.apply(settings)
            for rate in options.rates:
                await asyncio.sleep(_SETTLE)
                run, users = LoadRun(), PoissonRequests(prompts)
                await users.at(rate, options.seconds, len(figures)).run(found.endpoint, run)
                figures[way, rate] = run.summary()
    return figures


def _tell(report: Report, measured: Figures, again: Figures, predicted: Figures) -> None:
    rows: list[list[str | float]] = []
    errors: dict[str, list[tuple[float, float]]] = {"medians": [], "tails": []}
    for (way, rate), real in measured.items():
        runs = (real, again[way, rate], predicted[way, rate])
        finished = "{:g}, again {:g}, simulated {:g}".format(*(each["finished"] for each in runs))
        report.notes.append(f"{way} prefill, {rate:g} a second: finished {finished}.")
        for name in FIGURES:
            second, guess = (each[name] / real[name] for each in runs[1:])
            errors["medians" if name.endswith("p50") else "tails"].append((abs(guess - 1), abs(second - 1)))
            rows.append([way, rate, name, 1e3 * real[name], second, guess])
    report.tables.append(Rows("Single requests of the default shape", _COLUMNS, rows))
    told = [
        "{} by {:.0%} (a second measurement: {:.0%})".format(
            kind, *(statistics.median(values) for values in zip(*pairs, strict=True))
        )
        for kind, pairs in errors.items()
    ]
    report.lead = f"Predictions are off, in the median: {', '.join(told)}."


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0], help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report("How true simulated engines are")
    try:
        check_outputs(options.json, None)
        with tempfile.TemporaryDirectory(prefix="pdserve-fidelity-") as folder, Schedule() as schedule:
            report.complete = run_until_stopped(lambda: measure(Path(folder), options, schedule, report))
    except (ConfigError, Unavailable) as error:
        sys.exit(f"fidelity: {error}")
    report.show()
    report.write(options.json, None)
    if not report.complete:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
