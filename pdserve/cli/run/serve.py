"""`pdserve serve`."""

from dataclasses import replace
from typing import Annotated

import typer

from pdserve.cli.options import DemoFile, LogFormat, Simulated, Verbose
from pdserve.demo import FILE


def serve(
    file: DemoFile = FILE,
    log_format: LogFormat = "text",
    verbose: Verbose = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="instead of Frontend.port of FILE")
    ] = None,
    simulated: Simulated = False,
    yes: Annotated[bool, typer.Option("--yes", help="install a missing engine without asking")] = False,
) -> int:
    """Run the whole graph of FILE on this machine until Ctrl-C: frontends, decode workers, prefill workers, and NATS
    and etcd unless the file names servers. Problems of the file or the machine are reported before anything starts
    (exit code 2). A process that crashes is restarted; `pdserve status` and /health show it. If its starts fail before
    any process of its role was ready, everything stops with the cause (exit code 1, or 2 for a wrong configuration).

    examples:
      pdserve serve                           the bundled demo model, on the CPU or on two GPUs
      pdserve serve --port 8001               if port 8000 is in use
      pdserve serve -f graph.yaml             your own graph: `pdserve init graph.yaml` writes it
      pdserve serve -f graph.yaml --simulated    its topology, limits, metrics and alerts without GPUs and weights
      pdserve serve --log-format json 2> pdserve.jsonl
    """
    from pdserve.cli.setup.install import need_engine, simulate
    from pdserve.config.load import load
    from pdserve.plan.machine import Machine
    from pdserve.plan.plan import make_plan
    from pdserve.supervisor.serve import serve as run_graph

    if simulated:
        simulate()
    config = load(file)
    if port and config.frontend:
        config = replace(config, frontend=replace(config.frontend, port=port))
    need_engine(yes)
    return run_graph(make_plan(config, Machine.detect()), log_format, verbose)
