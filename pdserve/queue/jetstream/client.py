"""nats-py's client for one TCP connection: how it is opened, with TLS if the graph has credentials, and ended."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client

from pdserve.util.errors import ConfigError, QueueUnavailable, error_text
from pdserve.util.net import split_servers, strip_passwords
from pdserve.util.program import pdserve_command

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 2
PASSING = (nats.errors.Error, OSError, TimeoutError)
"""what nats-py raises when the server is away or goes away"""
_COPY = f"every process of the graph and its NATS need the same one, as `{pdserve_command('credentials')}` makes it."

T = TypeVar("T")


async def cancellable(call: Awaitable[T]) -> T:
    """Await a call of nats-py, and raise CancelledError if the task was cancelled meanwhile: nats-py sometimes swallows
    a cancellation, and so does `wait_for` before Python 3.12."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        return await call
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


class GraphClient(Client):
    """Speaks TLS if and only if it has a context for it. nats-py itself obeys the server's first line, which comes in
    plain text: an impostor on the server's port could have all that follows sent in plain text, too."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self.url = strip_passwords(url)
        """for messages"""
        self.server = url
        self.tls = tls

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """nats-py calls this before it sends anything. Raises ConfigError."""
        if initial_connection and self.tls is not None:
            if not info.get("tls_required") and not info.get("tls_available"):
                raise ConfigError(
                    [f"NATS at {self.url} has no TLS, but Security.credentials is set: {_COPY}"]
                )
            self._server_info["tls_required"] = True
        elif initial_connection and info.get("tls_required"):
            raise ConfigError([f"NATS at {self.url} asks for TLS: set Security.credentials; {_COPY}"])
        await super()._process_info(info, initial_connection)

    async def _process_pong(self) -> None:
        """Take an answer to a ping that was given up: nats-py would stop reading, for good and in silence."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


async def open_client(client: GraphClient, on_closed: Callable[[], Awaitable[None]] | None = None) -> None:
    """Connect, without nats-py's own pings and reconnections. Raises what nats-py does, and ConfigError if the server
    is not of this graph."""
    try:
        await client.connect(
            split_servers(client.server),
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


def require_cluster(client: GraphClient) -> None:
    """Raises ConfigError where the server stands alone: what is published there does not reach the others."""
    if not client._server_info.get("cluster"):
        text = "belongs to no cluster, but Graph.nats names several servers: name one, or make them a cluster"
        raise ConfigError([f"NATS at {client.url} {text} (deploy/docker-compose.cluster.yml)."])


async def discard(client: GraphClient) -> None:
    """Close without sending what is pending. nats-py's close() would wait for ever for a server that hangs to take it,
    and swallow cancellations meanwhile; and what was reported as failed must not be sent."""
    client._pending.clear()
    client._pending_data_size = 0
    transport = client._transport
    writer = getattr(transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
        if client.tls is not None and writer is getattr(transport, "_bare_io_writer", None):
            # an unfinished TLS handshake may have taken the socket: nats-py would wait for ever to hear of its end
            client._transport = None
    with suppress(*PASSING):
        await client.close()


async def _on_error(error: Exception) -> None:
    """nats-py also reports here what a message handler raised."""
    if isinstance(error, PASSING):
        logger.debug("nats: %s", error)
    else:
        logger.error("a message of NATS could not be handled", exc_info=error)


@asynccontextmanager
async def short_connection(url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[GraphClient]:
    """A client for a few operations. Raises what `open_client` does."""
    client = GraphClient(url, tls)
    try:
        await open_client(client)
        yield client
    finally:
        await discard(client)


@contextmanager
def available(url: str) -> Iterator[None]:
    """Raise QueueUnavailable in place of what nats-py raises when the server is away."""
    try:
        yield
    except PASSING as error:
        raise QueueUnavailable(f"NATS at {strip_passwords(url)}: {error_text(error)}") from error
