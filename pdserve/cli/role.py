"""`pdserve frontend|decode|prefill`: one process of the graph, alone."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import File, LogFormat, Verbose
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.graph import from_environment
from pdserve.observe import logs
from pdserve.plan.machine import Machine
from pdserve.plan.plan import make_plan
from pdserve.plan.slots import Slot
from pdserve.process import life
from pdserve.records import Role
from pdserve.supervisor import state
from pdserve.supervisor.checks import busy_kv_port


def role(
    context: typer.Context,
    file: File,
    index: Annotated[int, typer.Option(metavar="N", help="which of its kind on this host")] = 0,
    log_format: LogFormat = "text",
    verbose: Verbose = False,
) -> int:
    """Run one process of the graph of FILE, on this or another host. It finds the others through etcd and NATS:
    those that the file names (Graph: etcd, nats), else those of the graph that runs on the same state directory.
    SIGTERM or Ctrl-C lets it finish what it has and end with exit code 0; the second one ends it at once.

    examples:
      pdserve {command} -f configs/disagg.yaml
      PDSERVE_ETCD=10.0.0.5:2379 PDSERVE_NATS=nats://10.0.0.5:4222 pdserve {command} -f configs/disagg.yaml --index 1
    """
    name = Role(context.info_name or "")
    level = os.environ.get("PDSERVE_LOG_LEVEL", "INFO")
    vllm_level = "INFO" if verbose else os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    logs.setup(f"{name.value}-{index}", level, log_format, vllm_level)
    life.prepare(name.value)
    return life.run(*_place(name, file, index))


def _place(role: Role, file: Path, index: int) -> tuple[Config, Slot]:
    """The configuration with addresses, and the slot: the supervisor's, or those of the file, planned for this process
    alone. Raises ConfigError."""
    config, slot = from_environment(os.environ) or _planned(role, file, index)
    if problem := busy_kv_port(config, slot):
        raise ConfigError([problem])
    return config, slot


def _planned(role: Role, file: Path, index: int) -> tuple[Config, Slot]:
    config = load(file)
    plan = make_plan(config, Machine.detect(), roles={role}, index=index)
    if plan.problems or not plan.slots:
        raise ConfigError([*plan.problems] or [f"{file} has no {role.value} number {index}."])
    return _with_servers(plan.config), plan.slots[0]


def _with_servers(config: Config) -> Config:
    if config.nats and config.etcd:
        return config
    graph = state.read(config.state_dir)
    if graph is None:
        missing = " and ".join(name for name in ("nats", "etcd") if getattr(config, name) is None)
        raise ConfigError(
            [
                f"{config.path} names no {missing}, and no graph runs on {config.state_dir}: set them in "
                "Graph, or PDSERVE_NATS and PDSERVE_ETCD, or use `pdserve serve`, which starts both itself."
            ]
        )
    return replace(config, nats=config.nats or graph.nats, etcd=config.etcd or graph.etcd)
