"""Servers of a test's own."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tcp_server(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A port of 127.0.0.1 on which `serve` gets each connection. Leaving ends all: of handlers that are cancelled with
    their loop, asyncio's own server leaves them open (Python 3.11), for the garbage collector to find in a test of
    another file."""
    serving: dict[asyncio.Future[None], asyncio.StreamWriter] = {}

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving[asyncio.ensure_future(serve(reader, writer))] = writer

    server = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for writer in serving.values():
            writer.transport.abort()
