"""All listening sockets of a graph, and their purposes.

Tests list the allowed sockets. A new one needs a line in docs/security.md.
"""

import json
import socket
from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from pdserve.config.load import load
from tests.serving import Serve

Listeners = Counter[tuple[str, str]]
"""(process, purpose) -> how many; the purpose of an unknown port is `TCP` or `UDP`"""


def listeners(serve: Serve) -> Listeners:
    """The listening sockets of all processes of a graph on this host. Asserts that none listens beyond the loopback
    device, and that other users can reach no socket file."""
    known = _known_ports(serve)
    found: Listeners = Counter()
    supervisor = psutil.Process(serve.process.pid)
    for process in (supervisor, *supervisor.children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                assert ip_address(connection.laddr.ip.removeprefix("::ffff:")).is_loopback, connection
                kind = "TCP" if connection.type == socket.SOCK_STREAM else "UDP"
                found[_role(process), known.get(connection.laddr.port, kind)] += 1
    for path in _socket_files():
        if str(serve.folder) in str(path):
            assert path.parent.stat().st_mode & 0o077 == 0, path
    return found


def _role(process: psutil.Process) -> str:
    """The role or program, such as `decode` or `nats-server`."""
    command: list[str] = process.cmdline()
    if "pdserve" in command:
        return command[command.index("pdserve") + 1]
    return command[0].split()[0].rpartition("/")[2]


def _known_ports(serve: Serve) -> dict[int, str]:
    """Ports with known purposes, from file, state and `status`."""
    state = json.loads(serve.pdserve("status", "--json").stdout)
    record = json.loads((Path(serve.env["PDSERVE_STATE_DIR"]) / "graph.json").read_text())
    config = load(serve.file, serve.env)
    workers = [worker for worker in (config.decode, config.prefill) if worker is not None]
    ports = range(config.kv_port, config.kv_port + sum(worker.count for worker in workers))
    known = {serve.port: "HTTP"} | dict.fromkeys(ports, "KV side channel")
    for name in ("nats", "etcd"):
        url = record[name] if "://" in record[name] else f"//{record[name]}"
        known[urlsplit(url).port or 0] = "clients"
    for instance in state["instances"]:
        known[urlsplit(instance["metrics"]).port or 0] = "pages"
        if instance["role"] != "frontend" and instance["address"]:
            known[urlsplit(instance["address"]).port or 0] = urlsplit(instance["address"]).scheme
    return known


def _socket_files() -> Iterator[Path]:
    """The files of all Unix sockets of this host that listen."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(None, 7)
        if fields[3] == "00010000" and len(fields) > 7 and not fields[7].startswith("@"):
            yield Path(fields[7])
