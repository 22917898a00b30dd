"""The queue seam (see `base`). It is on NATS JetStream; tests have one in memory."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from pdserve.queue.base import PrefillQueue
from pdserve.security.credentials import Credentials


def connect(
    nats: str,
    namespace: str,
    model: str,
    credentials: Credentials | None = None,
    meanwhile: str = "",
    replicas: int | None = None,
) -> PrefillQueue:
    """Return the queue of one model, to enter. `nats` is a URL, or several of a cluster separated by commas. With
    credentials all connections use TLS, and servers without it or of another graph are refused. `meanwhile` says in the
    log what an outage means for this process. `replicas` is `Graph.queue-replicas`."""
    from pdserve.queue.jetstream.queue import JetStreamQueue

    return JetStreamQueue(
        nats, namespace, model, credentials=credentials, meanwhile=meanwhile, replicas=replicas
    )


async def check(nats: str, credentials: Credentials | None = None, of_cluster: bool = False) -> None:
    """Connect as the graph's processes do; leave nothing behind. Raises QueueUnavailable where nothing answers, and
    ConfigError for a server that cannot serve this graph: no JetStream, other credentials, or not `of_cluster`."""
    from pdserve.queue.jetstream.stream import check_once

    await check_once(nats, credentials.client if credentials else None, of_cluster)


async def server_info(nats: str) -> dict[str, Any]:
    """Return what the NATS server at this URL sends to every client before TLS and authentication, so that it
    is not to be trusted. Raises OSError, also if it is no NATS server."""
    try:
        at = urlsplit(nats)
        reader, writer = await asyncio.open_connection(at.hostname, at.port or 4222)
        try:
            info: dict[str, Any] = json.loads((await reader.readline()).removeprefix(b"INFO "))
            return info
        finally:
            writer.close()
            await writer.wait_closed()
    except ValueError as error:
        raise ConnectionError(f"no NATS server: {error}") from error
