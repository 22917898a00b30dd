"""`pdserve serve`: run the whole graph on this machine, from the first check to the end of its last process."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

from pdserve.config.api_keys import KEYS_VARIABLE
from pdserve.config.schema import Config
from pdserve.contract.records import Instance, Role
from pdserve.plan.graph import process_spec, to_environment
from pdserve.plan.plan import Plan
from pdserve.plan.slots import Slot, start_commands
from pdserve.process.signals import STOPPERS, Stops
from pdserve.registry import connect, keys
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import TaskOwner
from pdserve.security.credentials import Credentials, expiry_warning
from pdserve.supervisor import state
from pdserve.supervisor.output import ProcessOutput
from pdserve.supervisor.preflight import hold_ports
from pdserve.supervisor.processes.alone import SOCKETS_VARIABLE, allow_many_files
from pdserve.supervisor.processes.exits import Guardian, adopt_orphans
from pdserve.supervisor.processes.guardian import start_time
from pdserve.supervisor.processes.readiness import RegisteredInstances, until_frontends_ready
from pdserve.supervisor.processes.restarts import CannotStart, RestartPolicy
from pdserve.supervisor.roles import RoleSupervisor
from pdserve.supervisor.servers.embedded import embedded_servers
from pdserve.supervisor.servers.kept_keys import KeptKeys
from pdserve.supervisor.summary import summary
from pdserve.util.errors import ConfigError, RegistryUnavailable
from pdserve.util.program import pdserve_command

logger = logging.getLogger(__name__)

AFTER_DRAIN = 10.0
"""Seconds that a role may take to end after its drain timeout."""


def serve(plan: Plan, fmt: str = "text", verbose: bool = False) -> int:
    """Run the graph until it is stopped; return the exit code. Raises ConfigError only while no role was started."""
    config = plan.config
    if plan.problems:
        raise ConfigError([*plan.problems])
    if config.spans_hosts:
        advice = start_commands(config)
        raise ConfigError([f"{config.path}: workers span hosts (nnodes), but serve runs on one: {advice}"])
    with (
        ProcessOutput(config.state_dir / "logs", fmt, verbose).capture_logging() as output,
        state.locked(config.state_dir, config.drain_timeout + AFTER_DRAIN) as folder,
        hold_ports(config, plan.slots),
    ):
        allow_many_files()
        adopt_orphans()
        for note in filter(None, (*plan.notes, plan.unknown)):
            logger.info("%s", note)
        try:
            asyncio.run(_serve(config, plan.slots, output, folder))
        except CannotStart as cause:
            logger.error("%s", cause)
            return cause.exit_code
        except asyncio.CancelledError:
            logger.info("stopped before anything was ready")
            return 0
        logger.info("stopped, nothing is left running")
    return 0


async def _serve(
    config: Config, slots: Sequence[Slot], output: ProcessOutput, folder: state.StateFolder
) -> None:
    """Start the servers, then the roles. After a stop signal, or if a role cannot be started, stop the roles, leave
    the registry, and stop the servers and the guardian."""
    task = asyncio.current_task()
    assert task is not None
    _on_stop_signals(task.cancel)
    patience, policy = config.drain_timeout + AFTER_DRAIN, RestartPolicy()
    async with AsyncExitStack() as stack:
        guardian = stack.enter_context(Guardian(patience, folder.lock, folder.run))
        tasks = await stack.enter_async_context(TaskOwner())
        tasks.forever(guardian.keep_running, "guardian")
        tasks.forever(folder.keep_restored, "state directory")
        credentials = _credentials(config, folder)
        kept = KeptKeys(folder, config, credentials)
        servers = embedded_servers(config, folder, guardian, policy, credentials, kept)
        urls = await stack.enter_async_context(servers)
        graph = _record(config, urls, credentials)
        registered = await _registered_instances(stack, graph, config, credentials)
        folder.record(graph)
        tasks.forever(partial(folder.keep_snapshot, registered.view), "registry snapshot")
        if config.etcd is None:
            tasks.forever(partial(kept.follow, registered.registry), "kept keys")
        specs = [process_spec(slot, config.path, _environment(slot, config, graph)) for slot in slots]
        roles = RoleSupervisor(specs, registered, output, guardian, policy, patience)
        _on_stop_signals(roles.stop)

        def show_ready(instances: Sequence[Instance], seconds: float) -> None:
            if output.json:
                logger.info("Ready after %.0f s: %s at %s", seconds, graph.model, graph.url)
            output.print(summary(config, instances, seconds, output.log_dir, registered.view.settings()))

        frontends = config.frontend.processes if config.frontend else 0
        await roles.run(until_frontends_ready(graph.url, frontends), show_ready)


def _credentials(config: Config, folder: state.StateFolder) -> Credentials | None:
    """The credentials that the file names; new ones if it names neither credentials nor servers. The state directory's
    lock ensures that no process still uses an earlier run's credentials."""
    if config.security.credentials is None and config.nats is None and config.etcd is None:
        return folder.fresh_credentials()
    credentials = Credentials.load(config.security.credentials)
    if credentials and (text := expiry_warning(credentials.certificate)):
        logger.warning(
            "%s %s: make new credentials with %s", credentials.folder, text, pdserve_command("credentials")
        )
    return credentials


async def _registered_instances(
    stack: AsyncExitStack, graph: state.GraphRecord, config: Config, credentials: Credentials | None
) -> RegisteredInstances:
    try:
        registry = await stack.enter_async_context(connect(graph.etcd, graph.namespace, credentials))
        followed = (keys.INSTANCES, keys.SLOTS, keys.CARDS, keys.SETTINGS)
        view = await stack.enter_async_context(RegistryView(registry, *followed))
    except RegistryUnavailable as error:
        raise ConfigError(
            [f"etcd is needed: {error}. Start it, or remove Graph.etcd: `serve` then starts its own."]
        ) from None
    return RegisteredInstances(registry, view, config.host, config.drain_timeout, config.served_model_name)


def _record(
    config: Config, embedded: Mapping[str, str], credentials: Credentials | None
) -> state.GraphRecord:
    return state.GraphRecord(
        pid=os.getpid(),
        config=str(config.path.resolve()),
        model=config.served_model_name,
        namespace=config.namespace,
        etcd=config.etcd or embedded["etcd"],
        nats=config.nats or embedded["nats"],
        url=config.url,
        credentials=str(credentials.folder) if credentials else "",
        began=start_time(os.getpid()),
    )


def _environment(slot: Slot, config: Config, graph: state.GraphRecord) -> dict[str, str]:
    return {
        **to_environment(graph.serving(config), slot),
        # The supervisor reads JSON records, and shows them in the format that the user wants.
        "PDSERVE_LOG_FORMAT": "json",
        "PDSERVE_LOG_LEVEL": os.environ.get("PDSERVE_LOG_LEVEL", "INFO"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        SOCKETS_VARIABLE: str(config.state_dir),  # each process gets a folder of its own there
        "PYTHONUNBUFFERED": "1",
        **({} if slot.role is Role.FRONTEND else {KEYS_VARIABLE: ""}),  # not for workers
    }


def _on_stop_signals(act: Callable[[], object]) -> None:
    """Call `act`, instead of the `act` of an earlier call, at each stop that signals ask for (`Stops`)."""
    stops = Stops()

    def stop(number: signal.Signals) -> None:
        if stops.adds(number):
            act()

    for number in STOPPERS:
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
