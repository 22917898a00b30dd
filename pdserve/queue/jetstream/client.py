"""Opens and closes nats-py clients, each for one TCP connection, with TLS if the graph has credentials."""

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
"""Errors that nats-py raises while the server is away or when it goes away."""
_COPY = f"all processes of the graph and NATS need the same folder, from `{pdserve_command('credentials')}`."

T = TypeVar("T")


async def cancellable(call: Awaitable[T]) -> T:
    """Await a call of nats-py. Raises CancelledError if the task was cancelled; nats-py alone may swallow that."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        return await call
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


class GraphClient(Client):
    """Uses TLS if and only if it has an SSL context. nats-py alone lets the server's first, unencrypted line decide, so
    an impostor on the server's port could switch TLS off."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self.url = strip_passwords(url)
        """for logs and errors"""
        self.server = url
        self.tls = tls

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Check the server's TLS; nats-py calls this before it sends anything. Raises ConfigError."""
        if initial_connection and self.tls is not None:
            if not info.get("tls_required") and not info.get("tls_available"):
                raise ConfigError(
                    [f"NATS at {self.url} has no TLS, but Security.credentials is set: {_COPY}"]
                )
            self._server_info["tls_required"] = True
        elif initial_connection and info.get("tls_required"):
            raise ConfigError([f"NATS at {self.url} requires TLS: set Security.credentials; {_COPY}"])
        await super()._process_info(info, initial_connection)

    async def _process_pong(self) -> None:
        """Accept the pong of a ping that timed out. nats-py alone would silently stop reading for ever."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


async def open_client(client: GraphClient, on_closed: Callable[[], Awaitable[None]] | None = None) -> None:
    """Connect, without nats-py's own pings and reconnections. Raises nats-py's errors, and ConfigError if the server
    does not belong to this graph."""
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
    """Raise ConfigError if the server is in no cluster, because its messages would not reach the other servers."""
    if not client._server_info.get("cluster"):
        text = "belongs to no cluster, but Graph.nats names several servers: name one, or make them a cluster"
        raise ConfigError([f"NATS at {client.url} {text} (deploy/docker-compose.cluster.yml)."])


async def discard(client: GraphClient) -> None:
    """Close without sending pending data, because data that was reported as failed must not be sent. nats-py's own
    close() would wait for ever for a server that hangs, and swallow cancellations."""
    client._pending.clear()
    client._pending_data_size = 0
    transport = client._transport
    writer = getattr(transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
        if client.tls is not None and writer is getattr(transport, "_bare_io_writer", None):
            # after an unfinished TLS handshake nats-py would wait for ever for the socket's end
            client._transport = None
    with suppress(*PASSING):
        await client.close()


async def _on_error(error: Exception) -> None:
    if isinstance(error, PASSING):
        logger.debug("nats: %s", error)
    else:
        logger.error("nats: error in a message handler; continuing", exc_info=error)


@asynccontextmanager
async def short_connection(url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[GraphClient]:
    """Yield a client for a few operations. Raises the errors of `open_client`."""
    client = GraphClient(url, tls)
    try:
        await open_client(client)
        yield client
    finally:
        await discard(client)


@contextmanager
def available(url: str) -> Iterator[None]:
    """Raise QueueUnavailable instead of the errors in PASSING."""
    try:
        yield
    except PASSING as error:
        raise QueueUnavailable(f"NATS at {strip_passwords(url)}: {error_text(error, 'no answer')}") from error
