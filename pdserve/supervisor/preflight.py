"""Checks of state directory, disk space and ports before `serve` starts. `plan` and `doctor` report these
and the plan's checks (`plan/checks.py`)."""

import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from pdserve.config.schema import Config
from pdserve.contract.records import Role
from pdserve.plan.graph import SLOT_VARIABLE
from pdserve.plan.machine import MIB, free_disk
from pdserve.plan.slots import Slot
from pdserve.supervisor import state
from pdserve.supervisor.processes.exits import process_tree
from pdserve.util.errors import ConfigError
from pdserve.util.net import find_port_holder, resolve_host

ETCD_SPACE = 160 * MIB
"""Bytes that etcd needs to start: two WAL files of 64 MB, and a margin."""


def refusals(config: Config, slots: Sequence[Slot], ours: Collection[int] = ()) -> Iterator[tuple[str, str]]:
    """Why `serve` would refuse the graph now: a subject (`state`, `disk`, `ports`) and a sentence. A port is no reason
    if its user is the graph on the state directory, a role of this file that runs without `serve`, or one of `ours`
    (pids)."""
    running, problem = running_graph(config)
    if problem:
        yield "state", problem
    ours = {*running, *standalone_roles(config), *ours}
    yield from _refused_now(config, slots, ours, etcd_runs=bool(running))


def running_graph(config: Config) -> tuple[set[int], str]:
    """The pids of the graph that runs on the state directory, and why `serve` would be refused: another file's graph
    runs there, or the directory cannot be written."""
    graph = state.read(config.state_dir)
    if graph is None:
        folder = next(path for path in (config.state_dir, *config.state_dir.parents) if path.exists())
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return set(), ""
        advice = "set another Graph.state-dir."
        return set(), f"The state directory {config.state_dir} cannot be written: {advice}"
    if graph.config == str(config.path.resolve()):
        return process_tree(graph.pid), ""
    return process_tree(graph.pid), (
        f"Another graph runs on {config.state_dir} (of {graph.config}, pid {graph.pid}): stop it, or give this one a "
        "Graph.state-dir of its own."
    )


@contextmanager
def hold_ports(config: Config, slots: Sequence[Slot]) -> Iterator[None]:
    """Reserve the graph's fixed ports with an abstract Unix socket for each, because the processes listen only seconds
    later. Ports are reserved in order, so that one of two graphs that start together gets all. Raises ConfigError if a
    port is busy or reserved, or the disk is full."""
    if refused := [text for _, text in _refused_now(config, slots)]:
        raise ConfigError(refused)
    with ExitStack() as held:
        for port in sorted(_fixed_ports(config, slots)):
            for claim in port.claims():
                try:
                    held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(f"\0{claim}")
                except OSError:
                    raise ConfigError([port.is_held_by("another graph that starts here")]) from None
        yield


def _refused_now(
    config: Config, slots: Sequence[Slot], ours: Collection[int] = (), etcd_runs: bool = False
) -> Iterator[tuple[str, str]]:
    if config.etcd is None and not etcd_runs and (text := _disk(config)):
        yield "disk", text
    try:
        # a name may have several pids: a forked child has its parent's sockets, too
        claims = defaultdict[str, set[int]](set)
        for each in psutil.net_connections("unix"):
            claims[str(each.laddr).removeprefix("@")].add(each.pid or 0)
        yield from (("ports", text) for text in busy_ports(_fixed_ports(config, slots), ours, claims))
    except ConfigError as error:
        yield from (("ports", text) for text in error.problems)


def _disk(config: Config) -> str:
    """Why the disk is too full for etcd; empty if it is not. Data of earlier servers count as free, because `serve`
    removes them."""
    left = [path for path in (config.state_dir / "servers").rglob("*") if path.is_file()]
    _, free = free_disk(config.state_dir) or (0, ETCD_SPACE)
    room = free + sum(path.stat().st_blocks * 512 for path in left)
    text = f"etcd needs {ETCD_SPACE // MIB} MiB on the disk of {config.state_dir}, where {room // MIB} MiB are free:"
    return f"{text} make room, or set another Graph.state-dir." if room < ETCD_SPACE else ""


class FixedPort(NamedTuple):
    number: int
    host: str
    use: str
    """Its key in the file, and the slot."""

    def is_held_by(self, holder: str) -> str:
        where = f"Port {self.number} on {self.host} ({self.use})"
        return f"{where} is held by {holder}: stop that, or set another."

    def claims(self) -> list[str]:
        """Names of the abstract sockets that reserve the port, one for each address of `host`."""
        addresses = resolve_host(self.host)
        if self.host in ("0.0.0.0", "::"):
            addresses = [self.host, *(each.address for of in psutil.net_if_addrs().values() for each in of)]
        return sorted({f"pdserve-fixed-{self.number}-{address}" for address in addresses})


def _fixed_ports(config: Config, slots: Iterable[Slot]) -> list[FixedPort]:
    web = config.frontend
    ports = [FixedPort(web.port, web.host, "Frontend.port")] if web and web.port else []
    return [*ports, *(port for slot in slots for port in slot_ports(config, slot))]


def slot_ports(config: Config, slot: Slot) -> list[FixedPort]:
    """The fixed ports of a slot. An engine whose `kv` port is in use would never finish its start."""
    ports = {"kv": slot.kv_port, "stream": slot.stream_port, "pages": slot.pages_port}
    use = "Graph.{}-port, {}".format
    return [FixedPort(port, config.host, use(kind, slot.name)) for kind, port in ports.items() if port]


def busy_ports(
    ports: Iterable[FixedPort], ours: Collection[int] = (), claims: Mapping[str, set[int]] = {}
) -> Iterator[str]:
    """A sentence for each port on which a process other than `ours` (pids) listens, or which another graph reserved.
    Raises ConfigError if this user may not listen on a port."""
    for port in sorted(ports):
        pids = (claims.get(claim, set()) for claim in port.claims())
        graphs = (min(found) for found in pids if found and found.isdisjoint(ours))
        holders = (f"another graph (pid {pid or 'unknown'})" for pid in graphs)
        if holder := find_port_holder(port.host, port.number, ours) or next(holders, None):
            yield port.is_held_by(holder)


def standalone_roles(config: Config) -> set[int]:
    """The pids of this file's roles on this host that run without `serve`."""
    found, file = set[int](), config.path.resolve()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = process.cmdline()
            files = {Path(process.cwd(), word.removeprefix("--file=")).resolve() for word in words}
            ours = "doctor" not in words and any("pdserve" in word for word in words) and file in files
            # `serve` sets the variable for its roles
            if ours and not set(words).isdisjoint(Role) and SLOT_VARIABLE not in process.environ():
                found |= process_tree(process.pid)
    return found
