"""`pdserve bench systems`."""

import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

import pdserve
from pdserve.config.load import load
from pdserve.errors import ConfigError
from pdserve.plan.machine import Machine
from pdserve.plan.plan import Plan, make_plan
from pdserve_bench.launch import derive
from pdserve_bench.options import Json, Plot, numbers
from pdserve_bench.progress import Schedule, told
from pdserve_bench.report import Report, check_outputs
from pdserve_bench.runs import run_and_show
from pdserve_bench.systems.aggregated import batches, candidates, gpus_of
from pdserve_bench.systems.alternation import alternate
from pdserve_bench.systems.contest import GRAPH, Contest, Contestant, Record, graph_contestants
from pdserve_bench.systems.loads import ClosedLoad
from pdserve_bench.systems.render import make_report
from pdserve_bench.systems.system import GraphSystem, Stage, System

DEFAULT = "configs/local.yaml"
_WARM_UP = {"cpu": 1.5, "gpu": 1.5, "sim": 0.5}
"""seconds of load before each window: longer than real workers of the system before spin after their last message"""
_START_SECONDS = {"cpu": 30.0, "gpu": 90.0, "sim": 12.0}
"""that a start takes, about"""


def systems(
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", metavar="FILE", help=f"the graph (default: {DEFAULT}, the demo model)"),
    ] = None,
    clients: Annotated[
        str, typer.Option(metavar="N,N", help="of the closed loops: a load each (default: 1,8,32)")
    ] = "",
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="of each request, about")] = 1300,
    output_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="of each answer")] = 64,
    rounds: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="each measures everything once (default: 3; --in-turn: 2)"),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", min=0.2, help="a load is measured in a turn")] = 3.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="2 rounds, 1 and 8 clients, one batch size: some 5 minutes")
    ] = False,
    batch: Annotated[
        str,
        typer.Option(
            metavar="N,N", help="the baseline's max-num-batched-tokens to try (default: 256,2048,8192)"
        ),
    ] = "",
    no_screening: Annotated[
        bool, typer.Option("--no-screening", help="the baseline with vLLM's own threads and batch size")
    ] = False,
    in_turn: Annotated[
        bool, typer.Option("--in-turn", help="never two systems at a time, as on GPUs; takes longer")
    ] = False,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="of all engines: float32 makes answers comparable exactly")
    ] = "",
    seed: Annotated[int, typer.Option(metavar="N", help="of the prompts")] = 1,
    json: Json = None,
    plot: Plot = None,
) -> int:
    """One vLLM engine against the graph, on the same hardware, under the same load.
    Starts plain vLLM (the baseline, with all the cores or GPUs that FILE's graph has, at the best of the settings that
    are tried first) and the graph of FILE, which takes part three times: with all prefills local, all remote, and as it
    decides. They are measured in alternating order (ABBA) over several rounds. Prints medians, ratios to the baseline,
    the noise (the baseline against itself) and the CPU seconds of each process per 1,000 output tokens. A ratio with a
    ~ may be noise. On a CPU host the servers stay up side by side; on GPUs each is started in its turn.
    Ctrl-C shows what is there by then, and stops what was started. Exit code 1 where requests failed.

    examples:
      pdserve bench systems                                 the demo model, some 9 minutes
      pdserve bench systems --quick --plot systems          some 5 minutes, and a picture with charts
      pdserve bench systems -f mine.yaml --batch 512,2048,8192 --rounds 5 --json systems.json
      pdserve bench systems --dtype float32 --clients 1     are the answers the same, token for token?
    """
    check_outputs(json, plot)
    plan = _plan(file or _default_file())
    assert plan.config.decode is not None
    kind = "sim" if plan.config.decode.engine == "sim" else "gpu" if gpus_of(plan) else "cpu"
    most = int(str(plan.config.decode.engine_args.get("max-model-len", 1 << 30)))
    if prompt_tokens + output_tokens > most:
        raise ConfigError([f"--prompt-tokens {prompt_tokens}: with the answer over max-model-len {most}."])
    counts = sorted(numbers("--clients", clients) or ([1, 8] if quick else [1, 8, 32]))
    loads = [ClosedLoad(count, prompt_tokens, output_tokens, _WARM_UP[kind], seconds) for count in counts]
    alternating = in_turn or kind == "gpu"
    tried = [] if no_screening else batches(plan, numbers("--batch", batch))
    tried = tried[len(tried) // 2 :][:1] if quick and not batch else tried
    contestants, notes = graph_contestants(plan.config)
    baseline = "aggregated" if kind == "sim" else "aggregated vLLM"
    contestants.insert(0, Contestant(baseline, baseline, "the baseline"))
    turns = alternate(
        [each.name for each in contestants],
        [each.name for each in loads],
        rounds or (2 if quick or alternating else 3),
        grouped=alternating,
    )
    ways = candidates(plan, tried, dtype)
    record = Record(contestants, loads, turns, ways, tried, alternating, notes=notes)
    screening = list(dict.fromkeys((loads[0], loads[-1])))
    logging.basicConfig(level=logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="pdserve-systems-"))
    graph: dict[str, System] = {GRAPH: GraphSystem(GRAPH, derive(plan.config.path, 1, 8000, 5600, dtype))}

    async def work() -> None:
        with Schedule() as schedule:
            stage = Stage(folder, schedule.update)
            contest = Contest(plan, record, stage, schedule, graph, screening, seed, _START_SECONDS[kind])
            contest.announce()
            schedule.say(f"{plan.config.path}: about {told(schedule.seconds_left)}; logs in {folder}")
            await contest.run()

    def report(complete: bool) -> Report | None:
        return make_report(record, plan, complete) if record.measurements or record.screened else None

    code = 1
    try:
        code = run_and_show(work, report, json, plot, lambda: record.outcomes["failed"] > 0)
    finally:
        if code == 1:  # something went wrong
            print(f"kept for a look at it: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return code


def _default_file() -> Path:
    """Return the file of the repository that this runs from, else of the current folder."""
    for folder in (Path(pdserve.__file__).parent.parent, Path.cwd()):
        if (folder / DEFAULT).is_file():
            return folder / DEFAULT
    raise ConfigError([f"There is no {DEFAULT} here: give the graph, with -f FILE."])


def _plan(file: Path) -> Plan:
    """Raises ConfigError with all that keeps the graph from running here."""
    plan = make_plan(load(file, {}), Machine.detect())
    if plan.config.decode is None:
        raise ConfigError([f"{file} has no VllmWorker section: there is nothing to compare."])
    if plan.problems:
        raise ConfigError(list(plan.problems))
    return plan
