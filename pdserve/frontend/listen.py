"""The listening socket, which all frontend processes of this machine share."""

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil

from pdserve.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Bound with SO_REUSEPORT: the kernel spreads connections over the processes that listen, which this
    socket does not yet: a frontend that still loads must not get any. Raises ConfigError, naming who holds
    the port, where it is not one of our siblings: with SO_REUSEPORT a stranger would otherwise get a part of
    our requests."""
    if stranger := _stranger(port):
        raise ConfigError([f"Frontend.port: {port} is in use by {stranger}. Stop it or choose another port."])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError([f"Frontend: cannot listen on {host}:{port}: {error.strerror}."]) from error
    return sock


def accept_all(listening: Iterable[socket.socket]) -> Iterator[socket.socket]:
    """The connections that wait in the kernel to be accepted, non-blocking ones."""
    for sock in listening:
        with suppress(OSError):  # BlockingIOError: there are no more
            while True:
                connection, _ = sock.accept()
                connection.setblocking(False)
                yield connection


def _stranger(port: int) -> str:
    """Who listens there and was not started by our own parent; empty for nobody."""
    if port == 0:
        return ""
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    pids = {one.pid for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}
    names = [_describe(pid) for pid in pids if not _is_sibling(pid)]
    return ", ".join(sorted(names))


def _is_sibling(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        return pid == os.getpid() or psutil.Process(pid).ppid() == os.getppid()
    except psutil.Error:
        return False


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})"
    except psutil.Error:
        return f"process {pid}"
