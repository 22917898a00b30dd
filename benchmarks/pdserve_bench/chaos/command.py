"""The command `pdserve chaos`."""

import logging
import shutil
import tempfile
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pdserve.observe.tables import show
from pdserve.util.errors import ConfigError
from pdserve_bench.chaos.catalog import ALONE_FAULTS, CLUSTER_FAULTS, FAULTS, HOST_FAULTS, choose
from pdserve_bench.chaos.processes.members import on_clusters
from pdserve_bench.chaos.processes.pause import HOST_PAUSE, stoppable
from pdserve_bench.chaos.run import chaos as run_chaos
from pdserve_bench.chaos.run import of_one_engine
from pdserve_bench.chaos.scene import Options
from pdserve_bench.chaos.scorecard import Row, as_json, line, passed, scorecard, verdict
from pdserve_bench.graphs.launch import CUTTABLE, RunningGraph, started
from pdserve_bench.graphs.without_serve import started_without_serve
from pdserve_bench.hosts.graph import graph_on_hosts
from pdserve_bench.measure.runs import INTERRUPTED, run_until_stopped
from pdserve_bench.progress import say as _say

CARD = "scorecard.json"
"""The scorecard's file in the folder that is kept after a failure. With `--json`, the named file is written instead."""


def chaos(
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="the graph's file")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="list the faults and exit")] = False,
    hosts: Annotated[
        bool,
        typer.Option("--hosts", help="each process on its own simulated host, and faults between hosts"),
    ] = False,
    without_serve: Annotated[
        bool, typer.Option("--alone", help="each role without `serve`, as systemd runs it")
    ] = False,
    one_engine: Annotated[
        bool, typer.Option("--one-engine", help="compare with the outputs of one engine, run first")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="NAMES", help="only these faults, as decode-kill,etcd,drain")
    ] = "",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="minimum of processes per role")] = 2,
    clusters: Annotated[
        bool, typer.Option("--clusters", help="clusters of three NATS and three etcd, and their faults")
    ] = False,
    seconds: Annotated[float, typer.Option(metavar="S", help="minimal seconds of load per fault")] = 15.0,
    hold: Annotated[float, typer.Option(metavar="S", help="seconds that a hang or cut lasts")] = 12.0,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="clients")] = 8,
    patience: Annotated[
        float, typer.Option(metavar="S", help="seconds until a request counts as hung")
    ] = 60.0,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="dtype of real engines: float32 compares exactly")
    ] = "",
    seed: Annotated[int, typer.Option(metavar="N", help="seed of the prompts")] = 1,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="also write the scorecard as JSON")
    ] = None,
) -> int:
    """Inject faults into a graph under load, one after the other: {prefill, decode, nats, etcd, frontend} x {kill,
    hang, cut}, loss of the data of NATS and etcd, all workers of a role at once, a rolling restart and others.
    Starts the graph of FILE in a temporary folder, with its own ports, NATS and etcd, and stops it at the end.
    Every output is compared, token for token, with that of the undisturbed graph.
    Exit code 1 if a request was dropped, hung or got a wrong output, if KV blocks stayed held, or if the graph did not
    recover. Ctrl-C shows the result so far.
    --hosts: each process, and NATS with etcd, on a simulated host (needs root or `unshare -Ur`); links are cut, lossy,
    slow or limited, and hosts vanish, return elsewhere, or have wrong clocks. --clusters: three NATS and three etcd,
    whose leaders are killed, hung and cut, whose majority is lost, and which are all restarted. --alone: each role
    without `serve`, restarted when it ends.

    examples:
      pdserve chaos -f graph.yaml --dtype float32       every fault, on real engines (exact only in float32)
      pdserve chaos -f graph.yaml --only decode,etcd-kill --seconds 30
      pdserve chaos -f graph.yaml --hosts --one-engine --dtype float32
      pdserve chaos -f graph.yaml --clusters --only nats-stream,etcd-majority
      pdserve chaos --list [--hosts | --clusters | --alone]
    """
    faults = FAULTS
    for asked, known in ((hosts, HOST_FAULTS), (clusters, CLUSTER_FAULTS), (without_serve, ALONE_FAULTS)):
        faults = known if asked else faults
    if show_list:
        print("\n".join(f"{fault.name:18} {fault.description}" for fault in choose(only, faults)))
        return 0
    if file is None:
        raise ConfigError(["Give the graph to break: -f FILE."])
    if hosts + clusters + without_serve > 1:
        raise ConfigError(["Give one of --hosts, --clusters and --alone."])
    options = Options(choose(only, faults), seconds, hold, concurrency, patience, seed=seed)
    logging.basicConfig(level=logging.ERROR)  # hide warnings, because lost connections are expected
    folder = Path(tempfile.mkdtemp(prefix="pdserve-chaos-"))
    graph: AbstractAsyncContextManager[RunningGraph]
    if hosts:
        graph = graph_on_hosts(file, folder, _say, workers, dtype)
    else:
        _say(f"starting the graph of {file}; its logs: {folder}/state/logs")
        names = {fault.name for fault in options.faults}
        start = on_clusters if clusters else started_without_serve if without_serve else started
        graph = start(
            file,
            folder,
            _say,
            workers=workers,
            dtype=dtype,
            own_model="mixed-weights" in names,
            own_disk="disk-full" in names,
            thresholds=True,
            variables=CUTTABLE
            | (stoppable(folder / "clocks") if HOST_PAUSE in options.faults and only else {}),
            adds=[fault.adds for fault in options.faults if only],
        )
    if one_engine:
        (folder / "one").mkdir()
    rows: list[Row] = []
    complete = good = False

    async def work() -> None:
        pool = await of_one_engine(file, folder / "one", dtype, options, _say) if one_engine else ()
        async with graph as running, run_chaos(running, replace(options, pool=pool), _say) as exercise:
            async for row in exercise.rows():
                rows.append(row)
                _say(line(row))

    try:
        complete = run_until_stopped(work)
        good = complete and passed(rows)
    finally:  # show what is known even after an error
        _show(rows, complete, json or folder / CARD)
        if good or not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _say(f"kept for inspection: {folder}")
    return INTERRUPTED if not complete else 0 if good else 1


def _show(rows: list[Row], complete: bool, file: Path) -> None:
    if rows:
        show(scorecard(rows))
        print(verdict(rows, complete))
        file.write_text(as_json(rows, complete))
