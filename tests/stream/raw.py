"""Connections to a stream server whose bytes the test chooses."""

import asyncio
import ssl
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pdserve.stream.tcp import GREETING


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


class Raw:
    """What the other end of the connection would be, byte by byte."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def greet(self, name: str) -> None:
        self.send(frame(GREETING + b" " + name.encode()))
        assert await self.reader.readexactly(4 + len(GREETING)) == frame(GREETING)

    async def closed(self, within: float = 2.0) -> bool:
        """Whether the other side closes it in time, whatever it sends before."""
        with suppress(TimeoutError, ConnectionResetError):
            async with asyncio.timeout(within):
                while await self.reader.read(1000):
                    pass
            return True
        return self.reader.at_eof() or self.reader.exception() is not None


@asynccontextmanager
async def raw(address: str, context: ssl.SSLContext | None = None) -> AsyncIterator[Raw]:
    """Plain, whatever the server speaks, or with asyncio's own TLS."""
    host, _, port = address.partition("://")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()
