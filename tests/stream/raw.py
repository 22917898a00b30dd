"""Raw connections to a stream server, on which a test sends arbitrary bytes."""

import asyncio
import ssl
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from pdserve.security.credentials import Credentials
from pdserve.stream.tcp import GREETING
from tests.tcp import tcp_server


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


class Raw:
    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def greet(self, name: str) -> None:
        self.send(frame(GREETING + b" " + name.encode()))
        assert await self.reader.readexactly(4 + len(GREETING)) == frame(GREETING)

    def stop_reading(self) -> None:
        """Stop reading, like a stopped process."""
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def closed(self, within: float = 20.0) -> bool:
        """Return whether the other side closes the connection in time, whatever it sends before."""
        with suppress(TimeoutError, ConnectionResetError):
            async with asyncio.timeout(within):
                while await self.reader.read(1000):
                    pass
            return True
        return self.reader.at_eof() or self.reader.exception() is not None


@asynccontextmanager
async def raw(address: str, context: ssl.SSLContext | None = None) -> AsyncIterator[Raw]:
    """Connect with this TLS context or, without one, in plain text, whatever the server expects."""
    host, _, port = address.partition("://")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


@dataclass
class Relay:
    address: str
    """of the relay"""
    cut: asyncio.Event
    """when set, no bytes pass any more, and the connections stay open"""
    change: Callable[[bytes], bytes] = bytes
    """applied to the bytes of each read"""


@asynccontextmanager
async def relay(address: str) -> AsyncIterator[Relay]:
    cut = asyncio.Event()

    async def pump(reader: StreamReader, writer: StreamWriter) -> None:
        while not cut.is_set() and (data := await reader.read(1000)):
            if not cut.is_set():
                writer.write(way.change(data))
        await asyncio.Event().wait()

    async def join(reader: StreamReader, writer: StreamWriter) -> None:
        async with raw(address) as far:
            ways = pump(reader, far.writer), pump(far.reader, writer)
            await asyncio.gather(*ways, return_exceptions=True)

    async with tcp_server(join) as port:
        way = Relay(f"{address.partition('://')[0]}://127.0.0.1:{port}", cut)
        yield way


def client_hello(credentials: Credentials) -> bytes:
    """The beginning of a TLS handshake."""
    unsent = ssl.MemoryBIO()
    tls = credentials.client_context().wrap_bio(ssl.MemoryBIO(), unsent)
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return unsent.read()
