"""The frontend's sockets: the listening one, which all frontend processes of this machine share, and the clients'
connections, each with an end where nothing moves.

uvicorn waits for ever for a request's head, and for ever for a client that does not read its answer. The first keeps a
socket, the second a place at a worker too: its stream is generated on and on, into buffers that are never emptied.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import psutil
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pdserve.errors import ConfigError
from pdserve.frontend.deltas import ChunkWriter
from pdserve.observe.metrics import CONNECTIONS_CLOSED

logger = logging.getLogger(__name__)

LINGER = 0.5
"""seconds that a server which drains leaves a connection open on which a first or next request may be on its way"""
SWEEP = 1.0
"""seconds between two looks at all connections"""
UNREAD = "pdserve.unread"
"""the extension of the ASGI scope by which a request is told whether its client reads"""
CHUNKS = "pdserve.chunks"
"""the extension by which parts of a response's body are written past its `send`: a `ChunkWriter`"""
UNSENT = 16 << 10
"""bytes of an answer that the kernel takes beyond what the client's window admits: what is not read shows soon"""
_BYTES_ACKED = slice(120, 128)
"""of Linux's struct tcp_info"""
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


# the listening socket


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
    """Accept the connections that wait in the kernel; yields them non-blocking."""
    for sock in listening:
        with suppress(OSError):  # BlockingIOError: there are no more
            while True:
                connection, _ = sock.accept()
                connection.setblocking(False)
                yield connection


def _other_listeners(port: int) -> str:
    """The processes that listen there and were not started by our own parent; empty for none."""
    if port == 0:
        return ""
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    listening = {conn.pid for conn in found if conn.status == psutil.CONN_LISTEN and conn.laddr.port == port}
    return ", ".join(sorted(_describe(pid) for pid in listening if not _is_sibling(pid)))


def _is_sibling(pid: int | None) -> bool:
    try:
        return pid is not None and (pid == os.getpid() or psutil.Process(pid).ppid() == os.getppid())
    except psutil.Error:
        return False


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})"
    except psutil.Error:
        return f"process {pid}"


# the clients' connections


class ClientConnection(HttpToolsProtocol):
    """uvicorn's HTTP protocol on one socket."""

    def __init__(self, owner: "ClientConnections", *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._owner = owner
        self._head_since: float | None = None
        """monotonic; while a request's head is waited for"""
        self._taken = -1
        """bytes, at the last look; -1 where nothing waited to be sent"""
        self._unread = 0.0
        self._looked = 0.0
        self._last = False
        """the next request is the last one"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._owner.open.add(self)
        self._head_since = time.monotonic()
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        if self._owner.draining:
            self.shutdown()
        self._owner.on_open()

    def shutdown(self) -> None:
        """Drain. uvicorn would close a connection on which no request is at work, and reset the one that
        the client is just sending."""
        if not self._idle():
            super().shutdown()
            return
        self._last = True
        asyncio.get_running_loop().call_later(LINGER, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._idle():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.open.discard(self)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._owner.open.discard(self)  # another protocol goes on with the transport
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        if self._head_since is None and self._idle():  # also what comes of the body of a refused request
            self._head_since = time.monotonic()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._head_since = None
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope["extensions"] = {CHUNKS: _Chunks(self.cycle)}  # type: ignore[dict-item]
        if self._last and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._idle():  # answered before it had come; uvicorn has stopped its own timer
            self._head_since = time.monotonic()

    def head_seconds(self, now: float) -> float:
        """How long the next request's head has been waited for."""
        return now - self._head_since if self._head_since is not None and self._idle() else 0.0

    def unread_seconds(self, now: float) -> float:
        """How long the client has taken nothing of what waits to be sent to it. To be called regularly."""
        since, self._looked = now - self._looked, now
        taken = self._bytes_taken() if self.transport.get_write_buffer_size() else -1
        if taken < 0 or taken != self._taken:
            self._unread = 0.0
        else:  # a time in which this process itself stood still is not the client's fault
            self._unread += min(since, 2 * self._owner.interval)
        self._taken = taken
        return self._unread

    def tell_request(self, unread: bool) -> None:
        """Tell the request whether its client has stopped to read: it may give its places to others meanwhile."""
        extensions: dict[str, Any] = {} if self._idle() else dict(self.cycle.scope.get("extensions") or {})
        if UNREAD in extensions:
            extensions[UNREAD](unread)

    def refuse_head(self) -> None:
        self.transport.write(_TIMEOUT)
        self.transport.close()

    def abort(self) -> None:
        """End the request everywhere, as when its client disconnects."""
        self.transport.abort()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _bytes_taken(self) -> int:
        """That the client's kernel has acknowledged: it does so as far as the client reads, give or take its buffer."""
        sock = self.transport.get_extra_info("socket")
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            return 0
        return int.from_bytes(info[_BYTES_ACKED], "little")


class _Chunks(ChunkWriter):
    """Past uvicorn's `send`: what it does for a part of a chunked body, without a message and a coroutine."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def ready(self) -> bool:
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write(self, part: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(part), part))


class ClientConnections:
    """uvicorn's `http`: makes a protocol for each connection. `watch` must run."""

    def __init__(self, header_timeout: float, write_timeout: float, pause_after: float = 2.0) -> None:
        self._pause_after = pause_after
        """seconds after which a client counts as not reading"""
        self._header_timeout = header_timeout
        self._write_timeout = write_timeout
        self.interval = min(SWEEP, header_timeout / 4, write_timeout / 4, pause_after / 2)
        """seconds between two looks at all connections"""
        self.open: set[ClientConnection] = set()
        self.on_open: Callable[[], None] = lambda: None
        """called with each new connection"""
        self.draining = False
        """set when the server stops: what is accepted now has one request"""

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> ClientConnection:
        return ClientConnection(self, config, server_state, app_state, _loop)

    async def watch(self) -> None:
        """Look at all connections again and again, until cancelled."""
        while True:
            await asyncio.sleep(self.interval)
            self._sweep(time.monotonic())

    def _sweep(self, now: float) -> None:
        for connection in list(self.open):
            client = connection.client[0] if connection.client else "a client"
            unread = connection.unread_seconds(now)
            connection.tell_request(unread > self._pause_after)
            if unread > self._write_timeout:
                logger.warning("%s has read nothing for %g s: its request ends", client, self._write_timeout)
                CONNECTIONS_CLOSED.labels("unread").inc()
                connection.abort()
            elif connection.head_seconds(now) > self._header_timeout:
                logger.info("%s has sent no whole request head for %g s", client, self._header_timeout)
                CONNECTIONS_CLOSED.labels("head").inc()
                connection.refuse_head()
