"""Acks of delivered requests. Each is sent up to `_MAX_SENDS` times until the server confirms it: a lost ack would make
another worker compute a finished request again."""

import secrets
from contextlib import suppress
from itertools import count

from nats.aio.client import Client
from nats.aio.msg import Msg

from pdserve.contract.messages import PrefillRequest
from pdserve.queue.base import Delivery
from pdserve.queue.jetstream.connection import NatsConnection
from pdserve.queue.jetstream.stream import ServerClock
from pdserve.util.errors import QueueUnavailable

_MAX_SENDS = 20
"""Number of sends after which an unconfirmed ack is dropped."""


class Acks:
    def __init__(self, connection: NatsConnection) -> None:
        self.losses = 0
        """how often the server is known to have lost its messages"""
        self.connection = connection
        self._inbox = f"_INBOX.{secrets.token_hex(12)}"
        self._numbers = count()
        self._unconfirmed: dict[str, tuple[str, int]] = {}
        """by the subject of the confirmation: the ack's subject, and how often it was sent"""
        connection.listen(f"{self._inbox}.*", self._confirmed)

    async def send(self, to: str) -> None:
        self._unconfirmed[confirmation := f"{self._inbox}.{next(self._numbers)}"] = to, 1
        with suppress(QueueUnavailable):
            await self.connection.publish(to, b"+ACK", confirmation)

    async def repeat(self, client: Client) -> None:
        for subject, (to, sent) in list(self._unconfirmed.items()):
            if sent >= _MAX_SENDS:
                del self._unconfirmed[subject]
                continue
            self._unconfirmed[subject] = to, sent + 1
            await client.publish(to, b"+ACK", subject)

    def lost(self) -> None:
        """Record that the server has lost its messages, and drop their acks."""
        self.losses += 1
        self._unconfirmed.clear()

    async def _confirmed(self, message: Msg) -> None:
        self._unconfirmed.pop(message.subject, None)


class JetStreamDelivery(Delivery):
    def __init__(self, acks: Acks, clock: ServerClock | None, message: Msg, request: PrefillRequest) -> None:
        self._acks = acks
        self._reply = message.reply
        self._losses = acks.losses
        queued = clock.age(message.metadata.timestamp.timestamp()) if clock else 0.0
        super().__init__(request, queued, redelivered=message.metadata.num_delivered > 1)

    async def ack(self) -> None:
        if self._is_stored:
            await self._acks.send(self._reply)

    async def in_progress(self) -> None:
        await self._send(b"+WPI")

    async def give_back(self) -> None:
        await self._send(b"-NAK")

    async def _send(self, word: bytes) -> None:
        if self._is_stored:
            await self._acks.connection.publish(self._reply, word)

    @property
    def _is_stored(self) -> bool:
        """Whether the server still has the message. An ack names a message by its number in the JetStream stream. After
        a loss, another request may have that number, so nothing is sent."""
        return self._acks.losses == self._losses
