"""The prefill queue seam (see `base`). The address chooses the implementation. With credentials, all is TLS and nothing
else: a server without it, or of another graph, is none."""

import asyncio
import json
from importlib import import_module
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from pdserve.credentials import Credentials
from pdserve.queue.base import BlobStore, PrefillQueue
from pdserve.queue.broadcast import Broadcast
from pdserve.queue.responses import ResponseStore, StoreLimits

_IMPLEMENTATIONS = {"nats": "pdserve.queue.jetstream", "memory": "pdserve.queue.memory"}


def connect(nats: str, namespace: str, model: str, credentials: Credentials | None = None) -> PrefillQueue:
    """The queue of one model, to enter. `nats` is a NATS URL, several of them separated by commas, or
    `memory://<name>` for one that lives in this process."""
    queue: PrefillQueue = _implementation(nats).connect(nats, namespace, model, credentials)
    return queue


def connect_blobs(nats: str, namespace: str, credentials: Credentials | None = None) -> BlobStore:
    """The store of model archives; it connects for each operation, so there is nothing to enter."""
    store: BlobStore = _implementation(nats).connect_blobs(nats, namespace, credentials)
    return store


def connect_broadcast(
    nats: str, namespace: str, topic: str, meanwhile: str, credentials: Credentials | None = None
) -> Broadcast:
    """Of one topic (a word), to enter; `meanwhile` is for the log: what an outage means."""
    broadcast: Broadcast = _implementation(nats).connect_broadcast(
        nats, namespace, topic, meanwhile, credentials
    )
    return broadcast


def connect_responses(
    nats: str, namespace: str, limits: StoreLimits, credentials: Credentials | None = None
) -> ResponseStore:
    """The store of responses, to enter."""
    store: ResponseStore = _implementation(nats).connect_responses(nats, namespace, limits, credentials)
    return store


async def clock_skew(nats: str, credentials: Credentials | None = None) -> float | None:
    """Seconds that this process's time of day is ahead of the server's; None where that does not tell its time. Leaves
    nothing behind on the server. Raises QueueUnavailable."""
    skew: float | None = await _implementation(nats).clock_skew(nats, credentials)
    return skew


async def server_info(nats: str) -> dict[str, Any]:
    """What the NATS server at this URL says of itself to each client, before TLS and any authentication: not to be
    relied on. Raises OSError, also for what is no NATS server."""
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


def _implementation(nats: str) -> ModuleType:
    return import_module(_IMPLEMENTATIONS["memory" if nats.startswith("memory://") else "nats"])
