"""The frontend's listening socket, which all frontend processes of this machine share, and what is accepted on it."""

import errno
import os
import socket
from collections.abc import Iterable, Iterator

import psutil

from pdserve.util.errors import ConfigError

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def bind(host: str, port: int) -> socket.socket:
    """Bind with SO_REUSEPORT: the kernel spreads connections over the processes that listen, which this socket does
    not yet: a frontend that still loads must not get any. Raises ConfigError, naming what holds the port, where it is
    not one of our siblings: with SO_REUSEPORT another program would otherwise get a part of our requests."""
    if others := _other_listeners(port):
        raise ConfigError([f"Frontend.port: {port} is in use by {others}. Stop it or choose another port."])
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
    """Accept the connections that wait in the kernel; yields them non-blocking. Raises OSError where this process or
    machine can have no more of them now."""
    for sock in listening:
        try:
            while True:
                connection, _ = sock.accept()
                connection.setblocking(False)
                yield connection
        except OSError as error:  # BlockingIOError: there are no more; or a connection that is gone already
            if error.errno in _EXHAUSTED:
                raise


def _other_listeners(port: int) -> str:
    """Name the processes that listen there and were not started as we were, by the same process; empty for none."""
    if port == 0:
        return ""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    listening = {
        conn.pid for conn in connections if conn.status == psutil.CONN_LISTEN and conn.laddr.port == port
    }
    return ", ".join(sorted(_describe(pid) for pid in listening if not _is_sibling(pid)))


def _is_sibling(pid: int | None) -> bool:
    try:
        return pid is not None and (pid == os.getpid() or _starter(pid) == _starter(os.getpid()))
    except psutil.Error:
        return False


def _starter(pid: int) -> int:
    """The parent; of a role that runs alone, the parent of the small process above it, which has its command line."""
    process = psutil.Process(pid)
    above = process.parent()
    alone = above is not None and above.cmdline() == process.cmdline()
    return int(above.ppid() if alone else process.ppid())


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})"
    except psutil.Error:
        return f"process {pid}"
