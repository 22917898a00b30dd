"""TCP servers within a test, and TLS contexts of clients outside of the graph."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from pdserve.security.credentials import Credentials

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tcp_server(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Yield a port of 127.0.0.1 on which `serve` gets each connection. Leaving the block ends all connections. (In
    Python 3.11, a connection of a cancelled handler stays open, and a later test gets the warning.)"""
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


def without_certificate(_: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def of_another_graph(others: Credentials) -> ssl.SSLContext:
    context = without_certificate(others)
    context.load_cert_chain(others.certificate, others.key)
    return context
