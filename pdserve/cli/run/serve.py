"""`pdserve serve`."""

from dataclasses import replace
from typing import Annotated

import typer

from pdserve.cli.options import DemoFile, LogFormat, Verbose
from pdserve.demo import FILE


def serve(
    file: DemoFile = FILE,
    log_format: LogFormat = "text",
    verbose: Verbose = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="instead of Frontend.port of FILE")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="install the engine if there is none, unasked")] = False,
) -> int:
    """Run the whole graph of FILE on this machine until Ctrl-C: a NATS and an etcd where the file names none,
    frontends, decode workers and prefill workers. What cannot work is said before anything starts (exit code 2).
    A process that crashes is started again, for ever, and `pdserve status` and /health say which; only where no process
    of its kind was ever ready, everything is stopped with the cause (exit code 1, or 2 for a wrong configuration).

    examples:
      pdserve serve                           the bundled demo model, on the CPU or on two GPUs
      pdserve serve --port 8001               where something else has port 8000
      pdserve serve -f graph.yaml             one of your own: `pdserve init graph.yaml` writes it
      pdserve serve --log-format json 2> pdserve.jsonl
    """
    from pdserve.cli.setup.install import need_engine
    from pdserve.config.load import load
    from pdserve.plan.machine import Machine
    from pdserve.plan.plan import make_plan
    from pdserve.supervisor.serve import serve as run_graph

    config = load(file)
    if port and config.frontend:
        config = replace(config, frontend=replace(config.frontend, port=port))
    need_engine(yes)
    return run_graph(make_plan(config, Machine.detect()), log_format, verbose)
