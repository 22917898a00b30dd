"""Rare operations, each on a connection of its own: model archives in NATS' object store, and the difference of the
clocks."""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ssl import SSLContext

import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ObjectInfo, StorageType, StreamConfig

from pdserve.credentials import Credentials
from pdserve.errors import ConfigError, ProtocolError, QueueUnavailable
from pdserve.queue.base import BlobStore
from pdserve.queue.jetstream.client import available, short_connection
from pdserve.queue.jetstream.stream import API_TIMEOUT, bucket, measure

CALL_TIMEOUT = 5.0
PUT_WITHIN = 60.0


class NatsBlobs(BlobStore):
    def __init__(self, nats: str, namespace: str, credentials: Credentials | None = None) -> None:
        self._url = nats
        self._tls = credentials.client if credentials else None
        self._bucket = bucket(namespace)

    async def put(self, name: str, data: bytes) -> None:
        """Write only if the data differs, so that no reader is disturbed for nothing."""
        async with self._jetstream() as js, asyncio.timeout(PUT_WITHIN):
            store = await js.create_object_store(self._bucket)
            try:
                info = await store.get_info(name)
            except nats.js.errors.NotFoundError:
                info = None
            if info is None or info.digest != _digest(data):
                await store.put(name, data)

    async def get(self, name: str) -> bytes:
        async with self._jetstream() as js:
            try:
                store = await js.object_store(self._bucket)
                return await self._read(js, await store.get_info(name))
            except nats.js.errors.NotFoundError:
                raise KeyError(name) from None

    async def _read(self, js: JetStreamContext, info: ObjectInfo) -> bytes:
        """Read chunk by chunk: nats-py's own `get` waits for ever for a chunk that is missing."""
        data, sequence = bytearray(), 1
        for _ in range(info.chunks or 0):
            chunk = await js.get_msg(
                f"OBJ_{self._bucket}", seq=sequence, subject=f"$O.{self._bucket}.C.{info.nuid}", next=True
            )
            data += chunk.data or b""
            sequence = (chunk.seq or 0) + 1
        if info.digest != _digest(data):
            raise ProtocolError(f"{info.name} arrived damaged")
        return bytes(data)

    @asynccontextmanager
    async def _jetstream(self) -> AsyncIterator[JetStreamContext]:
        async with _available(self._url, self._tls) as client:
            yield client.jetstream(timeout=CALL_TIMEOUT)


async def clock_skew(url: str, credentials: Credentials | None = None) -> float | None:
    """As in the seam; measured on a stream that exists only for that moment."""
    stream = f"pdserve-clock-{secrets.token_hex(4)}"
    async with _available(url, credentials.client if credentials else None) as client:
        js = client.jetstream(timeout=API_TIMEOUT)
        await js.add_stream(StreamConfig(name=stream, subjects=[stream], storage=StorageType.MEMORY))
        try:
            found = await measure(client, stream)
        finally:
            await js.delete_stream(stream)
    return found.skew if found else None


@asynccontextmanager
async def _available(url: str, tls: SSLContext | None) -> AsyncIterator[Client]:
    """A client for a few operations. Raises QueueUnavailable also if the server is not of this graph."""
    try:
        with available(url):
            async with short_connection(url, tls) as client:
                yield client
    except ConfigError as error:
        raise QueueUnavailable(str(error)) from error


def _digest(data: bytes | bytearray) -> str:
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
