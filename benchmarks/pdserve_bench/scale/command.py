"""`pdserve bench scale`."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from pdserve_bench.options import Json
from pdserve_bench.report import check_outputs
from pdserve_bench.runs import run_and_show
from pdserve_bench.scale.graph import GraphSize
from pdserve_bench.scale.measure import ScaleRun, report_of


def scale(
    decode: Annotated[int, typer.Option(metavar="N", min=1, help="simulated decode workers")] = 32,
    prefill: Annotated[int, typer.Option(metavar="N", min=1, help="simulated prefill workers")] = 64,
    frontends: Annotated[int, typer.Option(metavar="N", min=1, help="real ones")] = 4,
    servers: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=3, help="NATS and etcd, so many each; several have certificates"
        ),
    ] = 3,
    rate: Annotated[float, typer.Option(metavar="R", min=0.1, help="requests per second")] = 5.0,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="of load, and of the idle graph before")
    ] = 20.0,
    json: Json = None,
) -> int:
    """What each kind of process costs in a graph of many: CPU for 1,000 requests (1,300 tokens in, 64 out, prefilled
    remotely) and of the idle graph, memory, messages. Workers are simulated, many in a process; frontends, NATS and
    etcd are real. Where this machine is too small for the rate, the answer says so: ask for a lower one.

    Needs no GPU and no running graph: it starts what it measures in a temporary folder, and stops it. Some 2 minutes
    and 6 GB; 1,000 workers take 4 GB.

    examples:
      pdserve bench scale
      pdserve bench scale --decode 500 --prefill 500 --frontends 1 --servers 1 --rate 10 --json scale.json
    """
    check_outputs(json)
    found = ScaleRun(GraphSize(decode, prefill, frontends, servers), rate, seconds)

    async def work() -> None:
        with tempfile.TemporaryDirectory(prefix="pdserve-scale-") as folder:
            await found.measure(Path(folder))

    return run_and_show(work, lambda _: report_of(found) if found.each else None, json)
