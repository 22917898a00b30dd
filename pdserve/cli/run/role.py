"""`pdserve frontend|decode|prefill|both`: runs one process of the graph."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import File, LogFormat, Simulated, Verbose
from pdserve.contract.records import Role
from pdserve.observe import logs
from pdserve.process.signals import end_while_starting
from pdserve.util import clock


def role(
    context: typer.Context,
    file: File,
    index: Annotated[int, typer.Option(metavar="N", help="which process of this role on this host")] = 0,
    node_rank: Annotated[
        int, typer.Option(metavar="N", help="which host of a worker that spans hosts (nnodes); 0 leads")
    ] = 0,
    simulated: Simulated = False,
    log_format: LogFormat = "text",
    verbose: Verbose = False,
) -> int:
    """Run one process of the graph of FILE, on this or another host. It finds the other processes through the etcd and
    NATS that the file names (Graph: etcd, nats), else those of the graph that runs on the same state directory.
    On SIGTERM or Ctrl-C it finishes its requests and ends with exit code 0; a second one ends it at once. Exit code 2:
    the configuration is wrong. Any other: it failed, hung or was killed, and may work after a restart.

    examples:
      pdserve {command} -f graph.yaml
      pdserve {command} -f graph.yaml --node-rank 1     the second host of a worker with nnodes: 2
      PDSERVE_ETCD=10.0.0.5:2379 PDSERVE_NATS=nats://10.0.0.5:4222 pdserve {command} -f graph.yaml --index 1
    """
    from pdserve.cli.setup.install import need_engine, simulate

    if simulated:
        simulate()
    need_engine()
    name = context.info_name or ""
    clock.skew_role(name)
    level = os.environ.get("PDSERVE_LOG_LEVEL", "INFO")
    vllm_level = "INFO" if verbose else os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    node = f"-node-{node_rank}" * bool(node_rank)
    logs.setup(f"{name}-{index}{node}", level, log_format, vllm_level)
    end_while_starting()

    from pdserve.plan.graph import SLOT_VARIABLE
    from pdserve.supervisor.processes.alone import run_alone

    if SLOT_VARIABLE in os.environ:  # under `serve`
        return _run(Role(name), file, index, node_rank)
    return run_alone(partial(_run, Role(name), file, index, node_rank))


def _run(
    role: Role, file: Path, index: int, node_rank: int, beat: Callable[[bytes], None] | None = None
) -> int:
    from pdserve.cli.find import claim_slot, find_slot
    from pdserve.process import life

    config, slot = find_slot(role, file, index, node_rank)
    with claim_slot(config, slot):
        return life.run(config, slot, beat)
