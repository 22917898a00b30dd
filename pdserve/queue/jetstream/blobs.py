"""Model archives in NATS' object store. Each operation has a connection of its own: they are rare."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ObjectInfo

from pdserve.errors import ProtocolError, QueueUnavailable
from pdserve.queue.base import BlobStore
from pdserve.queue.jetstream.clock import measure
from pdserve.queue.jetstream.connection import discard, open_client
from pdserve.queue.jetstream.names import bucket

CALL_TIMEOUT = 5.0
PUT_WITHIN = 60.0


class NatsBlobs(BlobStore):
    """Raises QueueUnavailable while NATS is away."""

    def __init__(self, nats: str, namespace: str) -> None:
        self._url = nats
        self._bucket = bucket(namespace)

    async def put(self, name: str, data: bytes) -> None:
        """Putting again what is there does nothing, so that nobody who reads it just then is disturbed."""
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

    async def clock_skew(self) -> float | None:
        async with self._jetstream() as js:
            await js.create_object_store(self._bucket)
            found = await measure(js._nc, f"OBJ_{self._bucket}")
        return found.skew if found else None

    async def _read(self, js: JetStreamContext, info: ObjectInfo) -> bytes:
        """Chunk by chunk: nats-py's own `get` waits for ever for a chunk that is not there."""
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
        client = Client()
        try:
            await open_client(client, self._url)
            yield client.jetstream(timeout=CALL_TIMEOUT)
        except nats.js.errors.NotFoundError:
            raise
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise QueueUnavailable(f"NATS at {self._url}: {error}") from error
        finally:
            await discard(client)


def _digest(data: bytes | bytearray) -> str:
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
