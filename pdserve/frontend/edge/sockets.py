"""Bind and accept on the port that all frontends of this machine share (SO_REUSEPORT)."""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil

from pdserve.util.errors import ConfigError

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
SYN, ACK = 0x02, 0x10
"""Flags of TCP packets."""
_SO_ATTACH_FILTER = 26


def bind(host: str, port: int) -> socket.socket:
    """Bind with SO_REUSEPORT, so that the kernel spreads connections over the frontends. Do not listen yet, because a
    frontend must get no connection while it loads. Raises ConfigError if another program listens on the port: it would
    get a part of the requests."""
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
    """Yield all connections that wait in the kernel, non-blocking. Raises OSError if file descriptors or memory are
    exhausted."""
    for sock in listening:
        try:
            while True:
                connection, _ = sock.accept()
                connection.setblocking(False)
                yield connection
        except OSError as error:  # BlockingIOError (no connection waits), or the client has left
            if error.errno in _EXHAUSTED:
                raise


def ignore_new_clients(sock: socket.socket) -> None:
    """Let the kernel drop new connections to a listening socket, but complete those whose handshake has begun. A client
    whose SYN is dropped repeats it after a second; if this socket is closed by then, another frontend gets it."""
    with suppress(OSError):  # gVisor's kernel cannot do this
        drop_packets(sock, SYN)


def drop_packets(sock: socket.socket, flags: int) -> None:
    """Drop packets to a TCP socket if the SYN and ACK bits of their flags equal `flags`. Sets a classic BPF program."""
    program = struct.pack(
        "=" + 5 * "HBBI",
        *(0x30, 0, 0, 13),  # load the byte of the TCP header that has the flags
        *(0x54, 0, 0, SYN | ACK),  # keep only these flags
        *(0x15, 0, 1, flags),  # if they are not `flags`, skip the next line
        *(0x06, 0, 0, 0),  # drop the packet
        *(0x06, 0, 0, 0xFFFFFFFF),  # pass the packet
    )
    place = ctypes.create_string_buffer(program)
    option = struct.pack("HP", len(program) // 8, ctypes.addressof(place))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _other_listeners(port: int) -> str:
    """Name the processes that listen on the port and were not started by the starter of this one; empty for none."""
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
    """Return the pid of the process that started process `pid`: its parent, or its grandparent if the parent has the
    same command line, because it only watches a role."""
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
