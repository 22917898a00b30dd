"""Clients' connections: limits what a client may send before it is authenticated, and ends idle and blocked
connections.

uvicorn waits for ever for a request's head, and for a client that does not read its response. Such a client would
occupy a socket, memory and an engine's slot.
"""

import asyncio
import fcntl
import logging
import socket
import termios
import time
from functools import partial
from typing import Any

import httptools
import msgspec
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pdserve.frontend.edge.deltas import CycleChunks
from pdserve.frontend.edge.response import HttpError, error_body, send_unchunked
from pdserve.observe.metrics import CONNECTIONS_CLOSED
from pdserve.runtime.tasks import isolate_errors

logger = logging.getLogger(__name__)
_uvicorn = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn.setLevel(logging.ERROR)  # it warns of each invalid request, so any client could fill the log

LINGER = 0.5
"""Seconds to wait before closing a connection: a request may be on its way, or an error not yet read."""
FIRST_REQUEST_WITHIN = 3.0
"""Seconds after which a draining server closes a connection on which no request has come."""
SWEEP = 1.0
"""Seconds between two checks of all connections, at most."""
UNREAD = "pdserve.unread"
"""ASGI scope extension: function that is told whether the client has stopped reading."""
CHUNKS = "pdserve.chunks"
"""ASGI scope extension: `ChunkWriter` that writes parts of a body without `send`."""
UNSENT = 16 << 10
"""Maximum of a response's unsent bytes in the kernel. It is small, so that an unread response is soon noticed."""
BUFFERED = 64 << 10
"""High-water mark of a TLS connection's write buffer, in bytes. For plain TCP, it is uvloop's default."""
MAX_HEAD = 64 << 10
"""Maximum of bytes in a request's head."""
MAX_FIELDS = 128
"""Maximum of header fields in a request."""
MAX_PIPELINED = 16
"""Maximum of requests on a connection that wait for earlier responses."""
RESET_WITHIN = 0.02
"""Seconds to wait for the TCP reset of a nearby client. `watch` finds later resets."""
_TCP_CLOSE = 7
_TOO_LARGE = (431, f"the request's head is larger than {MAX_HEAD} bytes")
_BYTES_ACKED = slice(120, 128)
_BYTES_NOT_SENT = slice(144, 148)
"""Fields of Linux's struct tcp_info."""


class ClientConnection(HttpToolsProtocol):
    """uvicorn's HTTP protocol on one socket."""

    def __init__(self, owner: "ClientConnections", *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _uvicorn
        self.url = b""
        self._cycles: list[RequestResponseCycle] = []
        """the cycles of the request that is being answered and of those queued behind it"""
        self._owner = owner
        self._head_since: float | None = None
        """monotonic start of the wait for a request's head; None if not waiting"""
        self._fields = -1
        """header fields of the head so far; -1 if no head has begun"""
        self._moved = False
        self._unmoved = 0
        """bytes received since the parser last reported anything"""
        self._refusal = (400, "this is no valid HTTP request")
        self._refused = False
        """whether further data is ignored"""
        self._taken = -1
        """bytes acknowledged at the last check; -1 if none waited to be sent"""
        self._unread = 0.0
        """seconds in which no waiting byte was acknowledged"""
        self._looked = 0.0
        self._closing_since = 0.0
        """monotonic time when a check first found it closing with nothing left to send; else 0"""
        self._last = False
        """whether it is drained: it closes after the current or next request"""
        self._half_closed = False
        """whether the client has closed its sending side"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._owner.open.add(self)
        self._head_since = time.monotonic()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:  # None: the client has left
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        if self.scheme == "https":
            transport.set_write_buffer_limits(BUFFERED)
        if self._owner.draining:
            self.shutdown()

    def shutdown(self) -> None:
        """Drain. An idle connection is closed later, because closing at once would reset a request that the client is
        just sending."""
        self._last = True
        if self._idle():
            self.loop.call_later(LINGER if self.cycle else FIRST_REQUEST_WITHIN, self._close_if_idle)
        elif not self.cycle.response_started:
            super().shutdown()

    def _close_if_idle(self) -> None:
        sock = None if self.transport.is_closing() else self.transport.get_extra_info("socket")
        if sock is None or not self._idle():
            return
        # a request may have come: a late event loop calls its timers before it reads
        unread = any(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)))
        if self._last and (unread or self._fields >= 0):
            self.loop.call_later(LINGER, self._close_if_idle)
        else:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to respond before closing: the client may have closed only its sending side. A client that
        closed the whole connection looks the same until bytes are sent. So this sends an interim response, to which a
        closed socket replies with a reset. Over TLS, uvloop does not support this."""
        begun = next((cycle for cycle in self._cycles if not cycle.response_complete), None)
        if begun is None or begun.response_started or self.cycle.more_body:
            return False
        if self.scheme == "https" or begun.scope["http_version"] == "1.0":
            return False
        self._half_closed = True
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        asyncio.get_running_loop().call_later(RESET_WITHIN, self.end_if_reset)
        return True

    def end_if_reset(self) -> None:
        """Abort a half-closed connection that the client has reset. No read would report the reset."""
        there = self._half_closed and not self.transport.is_closing()
        sock = self.transport.get_extra_info("socket") if there else None
        if sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed:
            self._close_if_idle()
        elif self._last:
            self.loop.call_later(LINGER, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.leave(self)
        super().connection_lost(exc)

    # a request's head

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        # the next head begins, or the rest of a refused request's body comes
        if self._head_since is None and self._idle():
            self._head_since = time.monotonic()
        self._moved = False
        self._unset_keepalive_if_required()
        self._parse(data)
        self._unmoved = 0 if self._moved else self._unmoved + len(data)
        if self._unmoved > MAX_HEAD and not self._refused:  # the parser reports only whole header fields
            self._refusal = _TOO_LARGE
            self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _without_upgrade(self, rest: bytes) -> None:
        """Parse a head again without its offer of another protocol. Java's `HttpClient` offers h2c in each request but
        accepts HTTP/1.1. The parser would take such a head for a whole message, and its body for the next one."""
        lines = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                value = b"close" if b"close" in value.lower() else b"keep-alive"
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._fields, self._moved = 0, True
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(f"{MAX_PIPELINED} requests wait for earlier responses")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._fields < 0:  # a trailer, which uvicorn would add to the checked headers
            return
        self._fields += 1
        if self._fields > MAX_FIELDS:
            self._refuse_head(431, f"the request has more than {MAX_FIELDS} header fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_since, self._fields, self._moved = None, -1, True
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD:
            self._refuse_head(*_TOO_LARGE)
        hosts, version = sum(name == b"host" for name, _ in self.headers), self.parser.get_http_version()
        if hosts > 1 or (not hosts and version == "1.1") or version == "0.9":
            self._refuse_head(400, "a request must be HTTP/1.0 or 1.1 and have one Host header")
        if self.parser.get_method() == b"CONNECT":
            self._refuse_head(400, "this is no proxy")
        if self.parser.should_upgrade():  # see `_without_upgrade`
            return
        super().on_headers_complete()
        self._cycles = [*(each for each in self._cycles if not each.response_complete), self.cycle]
        self.scope["extensions"] = {CHUNKS: CycleChunks(self.cycle)}  # type: ignore[dict-item]
        if version == "1.0":
            self.cycle.send = partial(send_unchunked, self.cycle, self.cycle.send)  # type: ignore[method-assign]
        if self._last:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if self._idle():  # the request was answered before its body was complete, and uvicorn's timer is off
            self._head_since = time.monotonic()

    def _refuse_head(self, status: int, message: str) -> None:
        """Raise out of the parser, so that `_parse` calls `send_400_response`."""
        self._refusal = (status, message)
        raise ValueError(message)

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid data. Invalid data in a body ends the connection; else earlier requests are still answered."""
        self._refused = True
        CONNECTIONS_CLOSED.labels("refused").inc()
        if self._idle():
            self.refuse(*self._refusal)
        elif not self.cycle.more_body:
            self.cycle.keep_alive = False
        elif self.cycle.response_started or self.pipeline:
            self.transport.close()
        else:
            self.refuse(*self._refusal)
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def refuse(self, status: int, message: str) -> None:
        """Send an error; close `LINGER` seconds later, so that the client can read it."""
        self._refused, self._head_since = True, None
        body = msgspec.json.encode(error_body(self.url.decode("latin-1"), HttpError(status, message)))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        asyncio.get_running_loop().call_later(LINGER, self.transport.close)

    # timeouts

    def head_seconds(self, now: float) -> float:
        """Return for how many seconds the next request's head has been awaited; 0 if none is."""
        return now - self._head_since if self._head_since is not None and self._idle() else 0.0

    def unread_seconds(self, now: float) -> float:
        """Return how many seconds bytes have waited without the client reading any. Call regularly."""
        since, self._looked = now - self._looked, now
        taken, waiting = self._bytes_taken()
        if not waiting or taken != self._taken:
            self._unread = 0.0
        else:  # time in which this process froze is not the client's fault
            self._unread += min(since, 2 * self._owner.interval)
        self._taken = taken
        return self._unread

    def closing_seconds(self, now: float) -> float:
        """Return the seconds since a check first found the connection closing with nothing left to send. Call
        regularly, after `unread_seconds`."""
        if not self.transport.is_closing() or self._taken >= 0:
            self._closing_since = 0.0
        else:
            self._closing_since = self._closing_since or now
        return now - self._closing_since if self._closing_since else 0.0

    def report_unread(self, unread: bool) -> None:
        """Tell the requests whether the client has stopped reading, so that their sequences may be preempted."""
        for cycle in self._cycles:
            extensions: dict[str, Any] = dict(cycle.scope.get("extensions") or {})
            if UNREAD in extensions and not cycle.response_complete:
                extensions[UNREAD](unread)

    def abort(self) -> None:
        """Close at once. The requests end as if the client had disconnected."""
        self.transport.abort()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _bytes_taken(self) -> tuple[int, bool]:
        """Return the bytes that the client's kernel has acknowledged (-1 if none wait to be sent), and whether any
        wait. With TLS, a part of uvloop's buffer is invisible, but is empty unless the kernel has unsent bytes."""
        waiting = self.transport.get_write_buffer_size() > 0
        if not waiting and self.scheme == "http":
            return -1, False
        sock = self.transport.get_extra_info("socket")
        if sock is None:  # the TCP connection has ended, and `connection_lost` will be called
            return -1, False
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            return 0, waiting
        waiting = waiting or any(info[_BYTES_NOT_SENT])
        return (int.from_bytes(info[_BYTES_ACKED], "little"), True) if waiting else (-1, False)


class ClientConnections:
    """uvicorn's `http` option: makes a protocol for each connection. `watch` must run."""

    def __init__(
        self, header_timeout: float, write_timeout: float, pause_after: float = 2.0, *, most: int = 1 << 20
    ) -> None:
        self.header_timeout = header_timeout
        self.open: set[ClientConnection] = set()
        self.draining = False
        """the server stops: each new connection may send one request"""
        self._pause_after = pause_after
        """seconds after which a client counts as not reading"""
        self._write_timeout = write_timeout
        self.interval = min(SWEEP, header_timeout / 4, write_timeout / 4, pause_after / 2)
        """seconds between two checks of all connections"""
        self._most = most
        self._entered: set[ClientConnection] = set()
        """counted connections: `open` ones and those not yet set up"""

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> ClientConnection:
        return ClientConnection(self, config, server_state, app_state, _loop)

    def enter(self, connection: ClientConnection) -> bool:
        """Count the connection until `leave`; return False if there are too many already."""
        if len(self._entered) >= self._most:
            CONNECTIONS_CLOSED.labels("limit").inc()
            return False
        self._entered.add(connection)
        return True

    def leave(self, connection: ClientConnection) -> None:
        """Stop counting the connection; may be called twice."""
        self.open.discard(connection)
        self._entered.discard(connection)

    async def watch(self) -> None:
        """Check all connections every `interval` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self.interval)
            self._sweep(time.monotonic())

    def _sweep(self, now: float) -> None:
        """Check each connection; abort it if its check raises an error."""
        for connection in list(self.open):
            with isolate_errors("client connections") as one:
                self._look(connection, now)
            if one.error is not None:
                self.leave(connection)
                with isolate_errors("client connections"):
                    connection.abort()

    def _look(self, connection: ClientConnection, now: float) -> None:
        client = connection.client[0] if connection.client else "a client"
        connection.end_if_reset()
        unread = connection.unread_seconds(now)
        connection.report_unread(unread > self._pause_after)
        if unread > self._write_timeout:
            logger.warning("%s has read nothing for %g s; aborting its request", client, self._write_timeout)
            CONNECTIONS_CLOSED.labels("unread").inc()
            connection.abort()
        elif connection.closing_seconds(now) > LINGER:
            connection.abort()
        elif connection.head_seconds(now) > self.header_timeout:
            logger.info(
                "%s sent no complete request head within %g s; closing the connection",
                client,
                self.header_timeout,
            )
            CONNECTIONS_CLOSED.labels("head").inc()
            connection.refuse(408, f"no whole request head came within {self.header_timeout:g} s")
