"""What `serve` asks of this moment before it starts anything, beside the plan's checks (`plan/checks.py`): ports and
state directory."""

import os
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil

from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.plan.slots import Slot
from pdserve.ports import addresses_of, port_holder
from pdserve.supervisor import state
from pdserve.supervisor.exits import family


def running_graph(config: Config) -> tuple[set[int], str]:
    """The processes of the graph that runs on the state directory, and a sentence where it is the graph of another
    file, or the directory cannot be used: `serve` would be refused."""
    graph = state.read(config.state_dir)
    if graph is None:
        folder = next(path for path in (config.state_dir, *config.state_dir.parents) if path.exists())
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return set(), ""
        return set(), f"The state directory {config.state_dir} cannot be written (Graph: state-dir)."
    if graph.config == str(config.path.resolve()):
        return family(graph.pid), ""
    return family(graph.pid), (
        f"Another graph runs on {config.state_dir} (of {graph.config}, pid {graph.pid}): stop it, or give this one a "
        "folder of its own (Graph: state-dir)."
    )


@contextmanager
def held_ports(config: Config, slots: Sequence[Slot]) -> Iterator[None]:
    """Hold the graph's fixed ports against other graphs of this machine, by an abstract Unix socket named after each:
    its processes listen on them seconds later, the frontends with SO_REUSEPORT. Raises ConfigError where a port is
    busy or held. Of graphs that start at the same moment one gets all it needs, since each takes the lowest first."""
    if busy := busy_ports(config, slots):
        raise ConfigError(busy)
    ports = {
        (port, config.host) for slot in slots for port in (slot.kv_port, slot.stream_port, slot.pages_port)
    }
    if config.frontend:
        ports.add((config.frontend.port, config.frontend.host))
    with ExitStack() as held:
        for port, address in sorted(
            {(port, each) for port, host in ports if port for each in _listened(host)}
        ):
            try:
                held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(
                    f"\0pdserve-fixed-{port}-{address}"
                )
            except OSError:
                raise ConfigError(
                    [f"Port {port} on {address} belongs to another graph here: set another."]
                ) from None
        yield


def _listened(host: str) -> list[str]:
    """The addresses that a server on `host` listens on."""
    if host in ("0.0.0.0", "::"):
        return [host, *(each.address for of in psutil.net_if_addrs().values() for each in of)]
    return addresses_of(host)


def busy_ports(config: Config, slots: Iterable[Slot], ours: Collection[int] = ()) -> list[str]:
    """A sentence for each port that the graph needs and another process holds, which is none of `ours` (pids). Raises
    ConfigError where this user cannot listen on one."""
    problems = []
    if config.frontend and (holder := port_holder(config.frontend.host, config.frontend.port, ours)):
        problems.append(
            f"Port {config.frontend.port} on {config.frontend.host} is held by {holder}: stop that, or set "
            "another port in Frontend."
        )
    for slot in slots:
        problems += busy_slot_ports(config, slot, ours)
    return problems


def busy_slot_ports(config: Config, slot: Slot, ours: Collection[int] = ()) -> list[str]:
    """A sentence for each fixed port of the slot that is taken, most likely by an orphan: without the port of its side
    channel an engine would hang at start for ever."""
    ports = (
        (slot.kv_port, f"where {slot.name} hands out its KV", "kv-port"),
        (slot.stream_port, f"where {slot.name} takes requests", "stream-port"),
        (slot.pages_port, f"for the pages of {slot.name}", "pages-port"),
    )
    return [
        f"Port {port} on {config.host}, {use}, is held by {holder}: stop that, or set another {key} in Graph."
        for port, use, key in ports
        if port and (holder := port_holder(config.host, port, ours))
    ]
