"""Broadcasts on a core subject of NATS."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.credentials import Credentials
from pdserve.queue.broadcast import Broadcast
from pdserve.queue.jetstream.connection import NatsConnection, SubjectMessages
from pdserve.queue.jetstream.stream import token


class NatsBroadcast(Broadcast):
    def __init__(
        self,
        nats: str,
        namespace: str,
        topic: str,
        meanwhile: str,
        credentials: Credentials | None = None,
    ) -> None:
        self._connection = NatsConnection(nats, credentials.client if credentials else None, meanwhile)
        self._subject = f"pdserve.{token(namespace)}.{topic}"
        self._messages = SubjectMessages(self._subject)

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        self._connection.listen(self._subject, self._messages.take)
        async with self._connection:
            yield

    @property
    def connected(self) -> bool:
        return self._connection.connected

    async def send(self, message: bytes) -> None:
        await self._connection.publish(self._subject, message)

    async def messages(self) -> AsyncIterator[bytes]:
        async for message in self._messages:
            yield message.data
