"""`pdserve frontend|decode|prefill`: one process of the graph, alone."""

import logging
import os
import signal
import threading
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated

import psutil
import typer
import uvloop

from pdserve import clock
from pdserve.cli.options import File, LogFormat, Verbose
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.errors import ConfigError, EngineDead, PdserveError, leaves
from pdserve.graph import CONFIG_VARIABLE, GRAPH, SLOT_VARIABLE, decode_config, decode_slot
from pdserve.messages import Role
from pdserve.observe import logs
from pdserve.plan.machine import Machine
from pdserve.plan.plan import make_plan
from pdserve.plan.slots import Slot
from pdserve.process.lifecycle import STOPPERS
from pdserve.supervisor import state
from pdserve.supervisor.checks import busy_kv_port

log = logging.getLogger(__name__)

END_WITHIN = 1.0
"""seconds from the end of a role's work to the end of its process"""

Index = Annotated[int, typer.Option(metavar="N", help="which of its kind on this host")]


def role(
    context: typer.Context,
    file: File,
    index: Index = 0,
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
    return run(Role(context.info_name or ""), file, index, log_format, verbose)


def run(role: Role, file: Path, index: int, log_format: str, verbose: bool) -> int:
    clock.skew_role(role.value)
    level = os.environ.get("PDSERVE_LOG_LEVEL", "INFO")
    vllm_level = "INFO" if verbose else os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    logs.setup(f"{role.value}-{index}", level, log_format, vllm_level)
    for number in STOPPERS:
        signal.signal(number, _stop_early)
    config, slot = _place(role, file, index)
    os.environ.update(slot.env)  # before vLLM is imported
    try:
        _live(config, slot)
    except Exception as error:
        return failed(slot.name, error)
    return 0


def failed(name: str, error: Exception) -> int:
    """Say why the role ended, in a sentence where it is one of our own errors; the exit code. A wrong configuration is
    told apart however late it was found: the supervisor does not try it again."""
    found = leaves(error)
    if problems := [each for leaf in found if isinstance(leaf, ConfigError) for each in leaf.problems]:
        for problem in problems:
            log.error("%s", problem)
        return 2
    if dead := next((each for each in found if isinstance(each, EngineDead)), None):
        log.error("the engine is gone, and this worker with it: %s", dead)
    elif all(isinstance(each, PdserveError) for each in found):
        log.error("%s failed: %s", name, "; ".join(map(str, found)))
    else:
        log.error("%s failed", name, exc_info=error)
    return 1


def _stop_early(number: int, _frame: object) -> None:
    """Until the role has handlers of its own: vLLM's import takes many seconds. Nothing is there yet that would have
    to be left in order."""
    log.info("told to stop while starting (%s)", signal.Signals(number).name)
    os._exit(0)


def _live(config: Config, slot: Slot) -> None:
    module, _, main = GRAPH[slot.role].main.partition(":")
    work = getattr(import_module(module), main)
    uvloop.run(_to_the_end(work(config, slot)))


async def _to_the_end(work: Awaitable[None]) -> None:
    """Nothing is left to do then, but a thread may still import or start vLLM, and Python would wait for it."""
    await work
    timer = threading.Timer(END_WITHIN, _end)
    timer.daemon = True
    timer.start()


def _end() -> None:
    """Multiprocessing's resource tracker cleans up behind the others, and ends by itself."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not any("resource_tracker" in part for part in process.cmdline()):
                process.kill()
    os._exit(0)


def _place(role: Role, file: Path, index: int) -> tuple[Config, Slot]:
    """The configuration with addresses, and the slot: the supervisor's, or those of the file, planned for this process
    alone. Raises ConfigError."""
    if CONFIG_VARIABLE in os.environ and SLOT_VARIABLE in os.environ:
        config, slot = decode_config(os.environ[CONFIG_VARIABLE]), decode_slot(os.environ[SLOT_VARIABLE])
    else:
        config, slot = _planned(role, file, index)
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
