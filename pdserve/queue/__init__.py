"""The prefill queue (contract in `base.py`), implemented on NATS JetStream. Tests have one in memory."""

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
    outage_effect: str = "",
    replicas: int | None = None,
) -> PrefillQueue:
    """Return the queue of a model, to be entered. `nats` is a URL, or a cluster's URLs separated by commas. With
    credentials all connections use TLS, and servers without TLS or of another graph are refused. `outage_effect` is the
    log's text for what an outage means to this process. `replicas` is `Graph.queue-replicas`."""
    from pdserve.queue.jetstream.queue import JetStreamQueue

    return JetStreamQueue(
        nats, namespace, model, credentials=credentials, outage_effect=outage_effect, replicas=replicas
    )


async def check(nats: str, credentials: Credentials | None = None, of_cluster: bool = False) -> None:
    """Connect once as the graph's processes do. Raises QueueUnavailable if NATS does not answer, and ConfigError if it
    cannot serve this graph: no JetStream, other credentials, or no cluster although `of_cluster`."""
    from pdserve.queue.jetstream.stream import check_once

    await check_once(nats, credentials.client if credentials else None, of_cluster)


async def server_info(nats: str) -> dict[str, Any]:
    """Return a NATS server's INFO message. The server sends it before TLS: do not trust it. Raises OSError, also if the
    server is not NATS."""
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
        raise ConnectionError(f"not a NATS server: {error}") from error
