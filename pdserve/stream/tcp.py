"""The streams on TCP: a listening socket in the decode worker and a connection from each frontend
(docs/decisions/0021-streams-over-tcp.md), with mutual TLS if the graph has credentials.

Frames (`framing`) contain msgpack. The first frame each way is a greeting: `pdserve-stream/1 <name>`, answered by
`pdserve-stream/1`; any other greeting closes the connection. Without TLS the frontend appends ` crc32`. A worker
that supports checksums appends it too, and all later frames have checksums.
"""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec

from pdserve.contract.messages import (
    ToDecode,
    ToFrontend,
    decode_to_decode,
    decode_to_frontend,
    encode,
    encode_to_decode,
    safe_decoder,
)
from pdserve.runtime.tasks import Lifetime, TaskOwner, isolate_errors
from pdserve.security.credentials import Credentials
from pdserve.stream.framing import MAX_MESSAGE, FramedConnection, beats, bounded
from pdserve.stream.tls import Tls
from pdserve.util.errors import PeerGone, ProtocolError
from pdserve.util.lru import LruDict

logger = logging.getLogger(__name__)
T = TypeVar("T")

GREETING = b"pdserve-stream/1"
"""Protocol and version."""
CHECKED = b" crc32"
"""Suffix of a greeting: frames have checksums."""
WORKER_SILENCE = 4.0
"""Seconds without a byte after which a worker counts as gone."""
FRONTEND_SILENCE = 8.0
"""Seconds without a byte after which a frontend counts as gone. It may be silent while it loads a tokenizer."""
CONNECT_TIMEOUT = 3.0
"""Seconds for the connection, TLS and the worker's greeting."""
GREETING_TIMEOUT = 5.0
"""Seconds for TLS and the greeting of a new connection, after which it is closed."""

MAX_GREETING = 1 << 10
MAX_UNGREETED = 256
"""Maximum of connections without a greeting; a further one closes the oldest."""
MAX_UNREAD = 10_000, 64 << 20
"""Unread messages, and their bytes. From either number on, reading pauses."""
_BATCH = 64
"""Messages that are read in a row before other tasks run."""
_MAX_ADDRESSES = 1000
_KINDS = frozenset(kind.__name__ for kind in get_args(ToFrontend))


class UnreadMessages(Generic[T]):
    """Received messages that are not read yet. When there are too many, reading from their connections pauses, so that
    TCP holds the senders back."""

    def __init__(self) -> None:
        self._messages: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._paused: set[FramedConnection] = set()
        self._changed = asyncio.Event()
        self._closed = False
        self._take: Callable[[T], None] | None = None

    def put(self, message: T, size: int = 0, connection: FramedConnection | None = None) -> None:
        """Add a message of `size` bytes that came on `connection`."""
        if self._take is not None and not self._messages:
            self._take(message)
            return
        self._messages.append((message, size))
        self._bytes += size
        self._changed.set()
        if connection is not None and not self._has_room(1):
            self._paused.add(connection)
            connection.pause_reading()

    def close(self) -> None:
        """Let `read` end after the present messages."""
        self._closed = True
        self._changed.set()

    async def read(self) -> AsyncIterator[T]:
        count = 0
        while self._messages or not self._closed:
            self._changed.clear()
            if not self._messages:
                await self._changed.wait()
                continue
            count += 1
            if count % _BATCH == 0:
                await asyncio.sleep(0)
            message, size = self._messages.popleft()
            self._bytes -= size
            if self._paused and self._has_room(0.5):
                for connection in self._paused:
                    connection.resume_reading()
                self._paused.clear()
            yield message

    async def deliver(self, take: Callable[[T], None]) -> None:
        """Pass to `take` the unread messages, and from then on each message as soon as it is put."""
        self._take = take
        try:
            async for message in self.read():
                take(message)
        finally:
            self._take = None

    def _has_room(self, share: float) -> bool:
        messages, size = MAX_UNREAD
        return len(self._messages) < share * messages and self._bytes < share * size


class TcpStreamServer(Lifetime):
    """The decode worker's end, at `host`, an address of this machine that frontends can reach. With credentials it
    accepts only frontends of the same graph, over TLS."""

    address: str
    """where frontends connect to; set on entering"""

    def __init__(
        self,
        host: str,
        credentials: Credentials | None = None,
        silence: float = FRONTEND_SILENCE,
        port: int = 0,
    ) -> None:
        """`port` 0: a free one."""
        self._host = host
        self._port = port
        self._credentials = credentials
        self._silence = silence
        self._ungreeted: dict[FramedConnection, None] = {}
        self._frontends: dict[str, FramedConnection] = {}
        self._unread: UnreadMessages[tuple[str, ToDecode | None]] = UnreadMessages()
        self._refused: LruDict[int] = LruDict(_MAX_ADDRESSES)
        """address -> number of its connections that were not from a frontend"""

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        context = self._credentials.server_context() if self._credentials else None

        def connection() -> FramedConnection:
            return FramedConnection(self, MAX_GREETING, Tls(context, server=True) if context else None)

        server = await loop.create_server(connection, str(addresses[0][4][0]), self._port)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"{_scheme(self._credentials)}://{host}:{server.sockets[0].getsockname()[1]}"
        self._leaving = False
        try:
            async with TaskOwner() as tasks:
                tasks.forever(self._keep_beating, "stream heartbeats")
                yield
        finally:
            server.close()
            self._leaving = True
            connections = [*self._frontends.values(), *self._ungreeted]
            self._ungreeted.clear()
            await asyncio.gather(*(connection.close() for connection in connections))

    def received(self) -> AsyncIterator[tuple[str, ToDecode | None]]:
        return self._unread.read()

    async def send(self, frontend: str, message: ToFrontend) -> None:
        """Send. Waits up to a second for a slow reader, which then counts as gone. Raises PeerGone if the frontend is
        not connected."""
        connection, body = self._frontends.get(frontend), bounded(message, encode(message))
        if connection is None or not await connection.send(body):
            raise PeerGone(frontend)

    async def _keep_beating(self) -> None:
        async for froze in beats():
            for connection in list(self._frontends.values()):
                with isolate_errors("stream heartbeats") as one:
                    connection.beat(self._silence, froze=froze)
                if one.error is not None:
                    connection.cut(f"failed: {one.error}")
            for connection in list(self._ungreeted):
                if not froze and time.monotonic() - connection.opened > GREETING_TIMEOUT:
                    connection.cut(f"did not greet within {GREETING_TIMEOUT:g} s")

    # ConnectionOwner

    def connection_opened(self, connection: FramedConnection) -> None:
        if self._leaving:
            connection.cut("came during shutdown")
            return
        if len(self._ungreeted) >= MAX_UNGREETED:
            next(iter(self._ungreeted)).cut("was closed for a newer one")
        self._ungreeted[connection] = None

    def frame_received(self, connection: FramedConnection, body: memoryview) -> None:
        if not connection.name:
            self._welcome(connection, bytes(body))
            return
        try:
            message = decode_to_decode(body)
        except ProtocolError as error:
            if not connection.unreadable:
                logger.warning("skipped a message of frontend %s (logged once): %s", connection.name, error)
            connection.unreadable += 1
            return
        self._unread.put((connection.name, message), len(body), connection)

    def connection_ended(self, connection: FramedConnection) -> None:
        if connection in self._ungreeted:
            del self._ungreeted[connection]
            self._log_refused(connection)
        elif self._frontends.get(connection.name) is connection:
            del self._frontends[connection.name]
            logger.info("connection of frontend %s %s", connection.name, connection.ended)
            self._unread.put((connection.name, None))

    def _welcome(self, connection: FramedConnection, greeting: bytes) -> None:
        word, _, encoded = greeting.removesuffix(CHECKED).partition(b" ")
        name = encoded.decode(errors="replace")
        if word != GREETING or not name or not (name.isascii() and name.isprintable()):
            connection.cut(f"greeted with {greeting[:40]!r}, not with {GREETING.decode()} and a name")
            return
        if earlier := self._frontends.get(name):
            earlier.cut("was replaced by a new one")
        del self._ungreeted[connection]
        connection.name, connection.max_frame, connection.answers = name, MAX_MESSAGE, True
        self._frontends[name] = connection
        if greeting.endswith(CHECKED):
            connection.write(GREETING + CHECKED)
            connection.check()
        else:
            connection.write(GREETING)
        logger.info("frontend %s connected", name)

    def _log_refused(self, connection: FramedConnection) -> None:
        """Log a connection that is not of a frontend. Only an address's first is a warning: port scanners make many."""
        count = self._refused[connection.host] = self._refused.get(connection.host, 0) + 1
        logger.log(
            logging.DEBUG if count > 1 else logging.WARNING,
            "connection %d from %s, not of a frontend, %s (logged once for each address)",
            count,
            connection.host,
            connection.ended,
        )


class TcpStreamClient(Lifetime):
    """A frontend's connection to the worker at `address`. A new connection replaces an earlier one of the same `name`.
    Entering connects, and raises PeerGone if no worker of the same graph answers within a few seconds. Both sides must
    have credentials, or neither."""

    def __init__(
        self, address: str, name: str, credentials: Credentials | None = None, silence: float = WORKER_SILENCE
    ) -> None:
        self._address = address
        self._name = name
        self._credentials = credentials
        self._silence = silence
        self._connection: FramedConnection
        self._greeted: asyncio.Event
        self._unread: UnreadMessages[ToFrontend]

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        tls = Tls(self._credentials.client, server=False) if self._credentials else None
        self._connection = FramedConnection(self, MAX_GREETING, tls)
        self._greeted, self._unread = asyncio.Event(), UnreadMessages()
        try:
            await self._connect()
            async with TaskOwner() as tasks:
                tasks.forever(self._keep_beating, "stream heartbeats")
                yield
        finally:
            await self._connection.close()

    async def _connect(self) -> None:
        try:
            host, port = _endpoint(self._address, _scheme(self._credentials))
            async with asyncio.timeout(CONNECT_TIMEOUT):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: self._connection, host, port)
                await self._greeted.wait()
        except (OSError, ValueError) as error:
            logger.info("cannot connect to the worker at %s: %s", self._address, error)
            raise PeerGone(self._address) from error
        if self._connection.ended:
            raise PeerGone(self._address)

    async def send(self, message: ToDecode) -> None:
        """Send. Raises PeerGone if the connection is lost; `received` then raises it, too."""
        body = bounded(message, encode_to_decode(message))
        if not await self._connection.send(body):
            raise PeerGone(self._address)

    async def received(self) -> AsyncIterator[ToFrontend]:
        """Yield messages in order of arrival. Raises PeerGone when the worker is gone."""
        async for message in self._unread.read():
            yield message
        raise PeerGone(self._address)

    async def deliver(self, take: Callable[[ToFrontend], None]) -> None:
        """Like `received`, but pass each message to `take` as it arrives. `take` must neither block nor raise."""
        await self._unread.deliver(take)
        raise PeerGone(self._address)

    @property
    def round_trip(self) -> float | None:
        """Seconds from the last heartbeat to its answer, measured every second; grows while an answer is overdue. None:
        not measured yet."""
        return self._connection.round_trip

    @property
    def heard(self) -> float:
        """Monotonic time of the last received bytes."""
        return self._connection.heard

    async def _keep_beating(self) -> None:
        async for froze in beats():
            self._connection.beat(self._silence, froze=froze)

    # ConnectionOwner

    def connection_opened(self, connection: FramedConnection) -> None:
        checked = CHECKED if self._credentials is None else b""
        connection.write(b"%s %s%s" % (GREETING, self._name.encode(), checked))

    def frame_received(self, connection: FramedConnection, body: memoryview) -> None:
        if not self._greeted.is_set():
            self._welcomed(connection, bytes(body))
            return
        try:
            message = decode_to_frontend(body)
        except ProtocolError as error:
            if kind := newer_kind(body):
                if not connection.unreadable:
                    logger.info(
                        "skipped a message %s of the newer worker at %s (logged once)", kind, self._address
                    )
                connection.unreadable += 1
                return
            # the message may have held tokens, so this connection's requests must continue at another worker
            connection.cut(f"carried an undecodable message: {error}")
            return
        self._unread.put(message, len(body), connection)

    def connection_ended(self, connection: FramedConnection) -> None:
        """End the stream; messages received before can still be read."""
        logger.info("connection to the worker at %s %s", self._address, connection.ended)
        self._greeted.set()
        self._unread.close()

    def _welcomed(self, connection: FramedConnection, greeting: bytes) -> None:
        """Check the worker's greeting. On a local port without a listener, TCP may connect a client to itself, so that
        it reads its own greeting."""
        if greeting == GREETING + CHECKED:
            connection.check()
        elif greeting != GREETING:
            connection.cut(f"was answered with {greeting[:40]!r}, not with {GREETING.decode()}")
            return
        connection.max_frame = MAX_MESSAGE
        self._greeted.set()


class AnyMessage(msgspec.Struct, frozen=True):
    type: str


_decode_any = safe_decoder(msgspec.msgpack.Decoder(AnyMessage).decode)


def newer_kind(message: memoryview) -> str:
    """Return the type of a worker's message if this build does not know it; else an empty text."""
    try:
        kind = _decode_any(message).type
    except ProtocolError:
        return ""
    return "" if kind in _KINDS else kind


def _scheme(credentials: Credentials | None) -> str:
    return "tcp" if credentials is None else "tls"


def _endpoint(address: str, scheme: str) -> tuple[str, int]:
    """Return host and port. Raises ValueError if the address is malformed or has another scheme, because either all
    processes of a graph use TLS or none."""
    parts = urlsplit(address)
    if parts.scheme != scheme or not parts.hostname or not parts.port:
        raise ValueError(f"{address!r} is not {scheme}://host:port, as all of this graph must be")
    return parts.hostname, parts.port
