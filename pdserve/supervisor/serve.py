"""`pdserve serve`: the whole graph on this machine, from the first check to the last process gone."""

import asyncio
import logging
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from pdserve.config.schema import Config
from pdserve.errors import ConfigError, RegistryUnavailable
from pdserve.graph import (
    CONFIG_VARIABLE,
    SLOT_VARIABLE,
    ProcessSpec,
    encode_config,
    encode_slot,
    process_spec,
)
from pdserve.messages import Instance
from pdserve.plan.plan import Plan
from pdserve.plan.slots import Slot
from pdserve.process.lifecycle import STOPPERS
from pdserve.registry import connect
from pdserve.registry.view import View
from pdserve.supervisor import state
from pdserve.supervisor.backoff import Policy
from pdserve.supervisor.banner import banner, curl, url_of
from pdserve.supervisor.checks import busy_ports
from pdserve.supervisor.exits import adopt_orphans
from pdserve.supervisor.foreground import own_foreground
from pdserve.supervisor.guardian import Guardian
from pdserve.supervisor.health import until_healthy
from pdserve.supervisor.keeper import GaveUp
from pdserve.supervisor.output import Output
from pdserve.supervisor.rollcall import RollCall
from pdserve.supervisor.servers import keep, needed_servers
from pdserve.supervisor.supervision import Supervision
from pdserve.tasks import forever

log = logging.getLogger(__name__)

AFTER_DRAIN = 10.0
"""seconds that a role gets to end beyond its drain timeout"""


def serve(plan: Plan, fmt: str = "text", verbose: bool = False) -> int:
    """Run the graph until it is told to stop; the exit code. Raises ConfigError before any role was
    started."""
    config = plan.config
    if plan.problems:
        raise ConfigError([*plan.problems])
    with own_foreground(), _output(config, fmt, verbose) as output, state.only_one(config.state_dir) as lock:
        if busy := busy_ports(config, plan.slots):
            raise ConfigError(busy)
        _allow_many_files()
        adopt_orphans()
        for note in plan.notes:
            log.info("%s", note)
        try:
            asyncio.run(_serve(config, plan.slots, output, Policy(), lock))
        except GaveUp as cause:
            log.error("%s", cause)
            return cause.exit_code
        except asyncio.CancelledError:
            log.info("stopped before anything was ready")
            return 0
        log.info("stopped, nothing is left running")
    return 0


async def _serve(config: Config, slots: Sequence[Slot], output: Output, policy: Policy, lock: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    patience = config.drain_timeout + AFTER_DRAIN
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(_Signals(task.cancel))
        guardian = stack.enter_context(Guardian(patience, lock))
        servers = await stack.enter_async_context(needed_servers(config, guardian))
        graph = _describe(config, {server.name: server.url for server in servers})
        roll = await _roll(stack, graph, config)
        state.write(config.state_dir, graph)
        sockets = stack.enter_context(state.socket_folder(config.state_dir))
        jobs = [_job(slot, config, graph, sockets) for slot in slots]
        supervision = Supervision(jobs, roll, output, guardian, policy)
        signals.act = supervision.stop

        def show_ready(instances: Sequence[Instance], seconds: float) -> None:
            if output.json:
                log.info("Ready after %.0f s: %s at %s", seconds, graph.model, graph.url)
            output.print(banner(config, instances, seconds, output.log_dir))
            if config.frontend:
                output.plain(f"Try it:\n{curl(config)}\n")

        healthy = _healthy(config, graph)
        beside = [
            forever(guardian.keep, "guardian"),
            *(forever(partial(keep, server, policy), server.name) for server in servers),
        ]
        await supervision.run(healthy, show_ready, beside, patience)


async def _healthy(config: Config, graph: state.GraphRecord) -> AsyncIterator[str]:
    """Yields what the frontends still lack; nothing where there are none."""
    if config.frontend:
        async for missing in until_healthy(graph.url, config.frontend.processes):
            yield missing


async def _roll(stack: AsyncExitStack, graph: state.GraphRecord, config: Config) -> RollCall:
    try:
        registry = await stack.enter_async_context(connect(graph.etcd, graph.namespace))
        view = await stack.enter_async_context(View(registry))
    except RegistryUnavailable as error:
        raise ConfigError([f"etcd is needed: {error}. Start it, or leave Graph.etcd out."]) from None
    return RollCall(registry, view, config.host, config.drain_timeout)


def _describe(config: Config, embedded: Mapping[str, str]) -> state.GraphRecord:
    return state.GraphRecord(
        pid=os.getpid(),
        config=str(config.path.resolve()),
        model=config.served_model_name,
        namespace=config.namespace,
        etcd=config.etcd or embedded["etcd"],
        nats=config.nats or embedded["nats"],
        url=url_of(config),
    )


def _job(slot: Slot, config: Config, graph: state.GraphRecord, sockets: Path) -> ProcessSpec:
    env = {
        "PDSERVE_ETCD": graph.etcd,
        "PDSERVE_NATS": graph.nats,
        SLOT_VARIABLE: encode_slot(slot),
        CONFIG_VARIABLE: encode_config(replace(config, nats=graph.nats, etcd=graph.etcd)),
        # One record per line, tracebacks included; the supervisor shows them as the user wants them.
        "PDSERVE_LOG_FORMAT": "json",
        "PDSERVE_LOG_LEVEL": os.environ.get("PDSERVE_LOG_LEVEL", "INFO"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "VLLM_RPC_BASE_PATH": str(sockets),
        "PYTHONUNBUFFERED": "1",
    }
    return process_spec(slot, config.path, env)


@contextmanager
def _output(config: Config, fmt: str, verbose: bool) -> Iterator[Output]:
    """All logging of this process goes to the output."""
    output = Output(config.state_dir / "logs", fmt, verbose)
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers[:] = [output.handler()]
    logging.getLogger("pdserve").setLevel(logging.INFO)
    try:
        yield output
    finally:
        root.handlers[:], root.level = before
        output.close()


class _Signals:
    """What `STOPPERS` do; from the first server's start to the last one's end."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __enter__(self) -> Self:
        for number in STOPPERS:
            asyncio.get_running_loop().add_signal_handler(number, lambda: self.act())
        return self

    def __exit__(self, *_: object) -> None:
        for number in STOPPERS:
            asyncio.get_running_loop().remove_signal_handler(number)


def _allow_many_files() -> None:
    """Streams are sockets: take what the system gives. Inherited by all roles."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
