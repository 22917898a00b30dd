"""nats-py's client for one TCP connection: how it is opened, with TLS where the graph has credentials, and ended."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client

from pdserve.errors import ConfigError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 2
PASSING = (nats.errors.Error, OSError, TimeoutError)
"""what nats-py raises where the server is away, or goes away"""
_COPY = "every process of the graph and its NATS need the same one, as `pdserve credentials` makes it."

T = TypeVar("T")


async def cancellable(call: Awaitable[T]) -> T:
    """Await something of nats-py, which at times swallows a cancellation (its own doing, and wait_for's
    before Python 3.12): a task that was cancelled meanwhile stops here nevertheless."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        return await call
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


class GraphClient(Client):
    """Speaks TLS where it has a context for it, and only there. nats-py itself does what the server's first line says,
    which comes in plain text: whatever took the server's port could so have all that follows in plain text, too."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self.url = url
        self.tls = tls

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Called before anything is sent. Raises ConfigError."""
        if initial_connection and self.tls is not None:
            if not info.get("tls_required") and not info.get("tls_available"):
                raise ConfigError(
                    [f"NATS at {self.url} has no TLS, but Security.credentials is set: {_COPY}"]
                )
            self._server_info["tls_required"] = True
        elif initial_connection and info.get("tls_required"):
            raise ConfigError([f"NATS at {self.url} asks for TLS: set Security.credentials; {_COPY}"])
        await super()._process_info(info, initial_connection)


async def open_client(client: GraphClient, on_closed: Callable[[], Awaitable[None]] | None = None) -> None:
    """For one TCP connection: without pings and reconnections of its own. Raises what nats-py does, and ConfigError
    where the server is not of this graph."""
    try:
        await client.connect(
            [server.strip() for server in client.url.split(",")],
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=CONNECT_TIMEOUT,
            ping_interval=24 * 3600,
            flush_timeout=1,
            tls=client.tls,
            error_cb=_on_error,
            closed_cb=on_closed,
        )
    except ssl.SSLCertVerificationError as error:
        text = f"NATS at {client.url} is not of this graph's credentials ({error.verify_message}): {_COPY}"
        raise ConfigError([text]) from error


async def discard(client: GraphClient) -> None:
    """Close it without sending what it still has: nats-py's close() would wait for ever for a server that
    hangs to take that, and swallows cancellations meanwhile; and what was reported as failed must not be
    sent."""
    client._pending.clear()
    client._pending_data_size = 0
    transport = client._transport
    writer = getattr(transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
        if client.tls is not None and writer is getattr(transport, "_bare_io_writer", None):
            # no handshake came to its end, but it may have taken the socket: nats-py would wait for ever to hear of
            # its end
            client._transport = None
    with suppress(*PASSING):
        await client.close()


async def _on_error(error: Exception) -> None:
    """Also told what a handler raised."""
    if isinstance(error, PASSING):
        log.debug("nats: %s", error)
    else:
        log.error("a message of NATS could not be handled", exc_info=error)


@asynccontextmanager
async def short_connection(url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    """For a few operations. Raises what `open_client` does."""
    client = GraphClient(url, tls)
    try:
        await open_client(client)
        yield client
    finally:
        await discard(client)


async def publish_once(
    url: str, subject: str, payloads: Iterable[bytes], tls: ssl.SSLContext | None = None
) -> None:
    """On a connection of its own, whatever the payloads are. Raises what `open_client` does."""
    async with short_connection(url, tls) as client:
        for payload in payloads:
            await client.publish(subject, payload)
        await client.flush()
