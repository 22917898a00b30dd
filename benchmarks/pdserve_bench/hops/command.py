"""`pdserve bench hops`."""

import tempfile
from contextlib import aclosing
from dataclasses import replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from pdserve.errors import PdserveError
from pdserve_bench.hops.turns import HopOptions
from pdserve_bench.options import Json, Plot
from pdserve_bench.progress import say
from pdserve_bench.report import Report, check_outputs
from pdserve_bench.runs import run_and_show


class BenchedHop(StrEnum):
    """Modules of this folder, in the order in which they are measured."""

    FRONTEND = "frontend"
    STREAM = "stream"


def hops(
    only: Annotated[BenchedHop | None, typer.Option(help="this hop only")] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="of load for each figure in each round")
    ] = HopOptions.seconds,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="of each figure; the tables have medians")
    ] = HopOptions.rounds,
    seed: Annotated[int, typer.Option(metavar="N", help="of the prompts")] = HopOptions.seed,
    json: Json = None,
    plot: Plot = None,
) -> int:
    """What pdserve's own parts cost for each token, alone, against the simplest thing that does the same work:

      frontend  CPU for each streamed token at 1, 32, 128 and 1,000 streams, on a simulated engine that costs
                nothing; against vLLM's own API server on an equal one
      stream    CPU for each message from decode worker to frontend; against bare TCP with as many bytes

    Needs no GPU and no running graph: it starts what it measures in a temporary folder, and stops it. Each figure is
    measured in every round, its baseline right before or after it. All of it takes some 3 minutes. Ctrl-C
    shows what is there by then. NATS, NIXL and UCX have benchmarks of their own: nats bench, nixlbench, ucx_perftest.

    examples:
      pdserve bench hops                                 everything
      pdserve bench hops --only stream                   a quarter of a minute
      pdserve bench hops --only frontend --seconds 10 --rounds 5
    """
    check_outputs(json, plot)
    found: dict[str, Report] = {}
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pdserve-hops-") as folder:
        options = HopOptions(Path(folder), seconds, rounds, seed)
        return run_and_show(
            lambda: _measure([only] if only else list(BenchedHop), options, found, failures),
            lambda complete: make_report(found, complete, failures),
            json,
            plot,
            lambda: bool(failures),
        )


def make_report(found: dict[str, Report], complete: bool, failures: list[str]) -> Report:
    sections = found.values()
    return Report(
        title="Each hop alone",
        lead=" ".join(section.lead for section in sections),
        tables=[table for section in sections for table in section.tables],
        charts=[chart for section in sections for chart in section.charts],
        notes=[*(note for section in sections for note in section.notes), *failures],
        data={name: section.data for name, section in found.items()},
        complete=complete and not failures,
    )


async def _measure(
    chosen: list[BenchedHop], options: HopOptions, found: dict[str, Report], failures: list[str]
) -> None:
    """A hop that cannot be measured here is reported, and the other is measured nevertheless. Each round's section
    replaces the one before, so that a run that is broken off shows what it has."""
    for name in chosen:
        folder = options.folder / name
        folder.mkdir()
        measure = import_module(f"pdserve_bench.hops.{name}").measure
        try:
            async with aclosing(measure(replace(options, folder=folder))) as sections:
                async for section in sections:
                    found[name] = section
        except PdserveError as error:
            failures.append(f"{name}: not measured to its end: {error}")
            say(failures[-1])
