"""Finds the running graph that a command is for, and the slot of a role that runs alone."""

import hashlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.contract.records import Instance, Role
from pdserve.plan.graph import from_environment
from pdserve.plan.machine import Machine
from pdserve.plan.plan import make_plan
from pdserve.plan.slots import Slot
from pdserve.registry import connect
from pdserve.registry.view import RegistryView, Snapshot
from pdserve.security.credentials import Credentials
from pdserve.supervisor import state
from pdserve.supervisor.preflight import busy_ports, slot_ports
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import ConfigError, RegistryUnavailable, Unavailable
from pdserve.util.program import pdserve_command

logger = logging.getLogger(__name__)

_NOTHING = Snapshot([], [], {}, {})


class NoGraph(Unavailable):
    """No running graph was found. The text says where pdserve looked for one."""


@dataclass(frozen=True)
class GraphAddress:
    etcd: str
    namespace: str
    url: str = ""
    """of its frontend; empty: unknown"""
    credentials: Credentials | None = None
    state_dir: Path | None = None
    """of its supervisor on this machine; None: unknown"""


@dataclass(frozen=True)
class GraphView:
    """The graph's registry: from etcd or, if etcd did not answer at first, as `serve` last saw it."""

    snapshot: Callable[[], Snapshot]
    connected: Callable[[], bool]
    refusal: Callable[[], str]
    """why etcd refuses this command (`Registry.refusal`)"""

    def instances(self, role: Role) -> list[Instance]:
        return [instance for instance in self.snapshot().instances if instance.role.includes(role)]


def find_graph(
    file: Path | None, etcd: str | None, namespace: str | None, credentials: Path | None = None
) -> GraphAddress:
    """Find a graph by --etcd, else by the file, else by PDSERVE_ETCD, else on the default state directory. Raises
    NoGraph, ConfigError."""
    if file and not etcd:
        config = load(file)
        if config.etcd is None:
            return _graph_on(config.state_dir, file)
        return GraphAddress(
            config.etcd,
            config.namespace,
            credentials=Credentials.load(credentials or config.security.credentials),
            state_dir=config.state_dir,
        )
    if address := etcd or os.environ.get("PDSERVE_ETCD"):
        return GraphAddress(address, namespace or Config.namespace, credentials=Credentials.load(credentials))
    return _graph_on(Path(os.environ.get("PDSERVE_STATE_DIR") or Config.state_dir).expanduser())


@asynccontextmanager
async def view_of(graph: GraphAddress) -> AsyncIterator[GraphView]:
    """Open a view of the graph. Raises NoGraph if etcd does not answer and the graph's supervisor is not here."""
    async with AsyncExitStack() as stack:
        registry = connect(graph.etcd, graph.namespace, graph.credentials)
        try:
            await stack.enter_async_context(registry)
            view = await stack.enter_async_context(RegistryView(registry))
            opened = GraphView(view.snapshot, lambda: registry.connected, lambda: registry.refusal)
        except RegistryUnavailable as error:
            if _last_snapshot(graph) is None:
                needs = "" if graph.credentials else ", or it needs --credentials"
                down = "its etcd is down or hangs (start it again; nothing else needs a restart)"
                advice = "" if registry.refusal else f": no graph runs there, or {down}{needs}"
                raise NoGraph(f"{error}{advice}.") from None
            opened = GraphView(
                lambda: _last_snapshot(graph) or _NOTHING, lambda: False, lambda: registry.refusal
            )
        yield opened


def running_here(graph: GraphAddress) -> GraphRecord | None:
    """Return the record of the graph's supervisor if it runs on this machine."""
    found = state.read(graph.state_dir) if graph.state_dir else None
    same = found is not None and (found.etcd, found.namespace) == (graph.etcd, graph.namespace)
    return found if same else None


def _last_snapshot(graph: GraphAddress) -> Snapshot | None:
    return state.read_snapshot(graph.state_dir) if graph.state_dir and running_here(graph) else None


def _graph_on(state_dir: Path, file: Path | None = None) -> GraphAddress:
    """Return the graph that `serve` runs on this state directory. `file`: a given file that names no etcd."""
    graph = state.read(state_dir)
    if graph is None:
        serve = pdserve_command(f"serve -f {file or 'FILE'}")
        start = f"start one with `{serve}`"
        if file is None:
            which = "say which one with -f FILE or --etcd HOST:PORT"
            raise NoGraph(f"no graph runs on {state_dir}: {start}, or {which}.")
        which = (
            "name the etcd of a running graph: Graph.etcd, --etcd, or PDSERVE_ETCD (under systemd: "
            "`set -a; . /etc/pdserve/env`)"
        )
        raise NoGraph(f"{file} names no etcd, and no graph runs on {state_dir}: {start}, or {which}.")
    return GraphAddress(graph.etcd, graph.namespace, graph.url, graph.load_credentials(), state_dir)


def find_slot(role: Role, file: Path, index: int, node: int = 0) -> tuple[Config, Slot]:
    """Return the configuration, with the addresses of NATS and etcd, and the slot: from the supervisor, or else planned
    from the file for this process alone. Raises ConfigError."""
    return from_environment(os.environ) or _planned(role, file, index, node)


@contextmanager
def claim_slot(config: Config, slot: Slot) -> Iterator[None]:
    """Claim the slot on this host with an abstract Unix socket, which ends with the process. Two processes of one slot
    and model would share a name in logs, metrics and `status`. Raises ConfigError if another process has the slot or
    one of its ports."""
    model = "" if slot.role is Role.FRONTEND else config.served_model_name  # a frontend serves all models
    name = f"{config.namespace} {config.etcd} {config.host} {model} {slot.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        try:
            held.bind(f"\0pdserve-slot-{hashlib.blake2s(name.encode()).hexdigest()}")
        except OSError:
            text = f"{slot.name} of {model or 'this graph'} already runs on this host"
            raise ConfigError([f"{text}: stop it, or choose another --index."]) from None
        if problems := list(busy_ports(slot_ports(config, slot))):
            raise ConfigError(problems)
        yield


def _planned(role: Role, file: Path, index: int, node: int) -> tuple[Config, Slot]:
    config = load(file)
    plan = make_plan(config, Machine.detect(), roles={role}, index=index, node=node)
    if plan.problems or not plan.slots:
        what = f"{role.value} number {index}" + f" that has node rank {node} (nnodes)" * bool(node)
        raise ConfigError([*plan.problems] or [f"{file} has no {what}."])
    for note in plan.notes:
        logger.info("%s", note)
    return _with_servers(plan.config), plan.slots[0]


def _with_servers(config: Config) -> Config:
    if config.nats and config.etcd:
        return config
    graph = state.read(config.state_dir)
    if graph is None:
        missing = " and ".join(name for name in ("nats", "etcd") if getattr(config, name) is None)
        raise ConfigError(
            [
                f"{config.path} names no {missing}, and no graph runs on {config.state_dir}: set them "
                f"in Graph, or PDSERVE_NATS and PDSERVE_ETCD, or use `{pdserve_command('serve')}`, "
                "which starts both itself."
            ]
        )
    return graph.serving(config)
