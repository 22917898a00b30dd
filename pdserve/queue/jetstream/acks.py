"""Deliveries, and their acks: each is sent until the server has confirmed it. An ack is lost with the server that it
was sent to, and while a consumer has no leader; unacked, a request that was answered would be computed again."""

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

_TRIES = 20
"""after so many an ack is forgotten: the server does not confirm it, whatever the reason"""


class Acks:
    def __init__(self, connection: NatsConnection) -> None:
        self.losses = 0
        """how often the server is known to have lost the messages"""
        self.connection = connection
        self._inbox = f"_INBOX.{secrets.token_hex(12)}"
        self._numbers = count()
        self._owed: dict[str, tuple[str, int]] = {}
        """by the subject of its confirmation: where an ack goes, and how often it was sent"""
        connection.listen(f"{self._inbox}.*", self._confirmed)

    async def send(self, to: str) -> None:
        self._owed[confirmation := f"{self._inbox}.{next(self._numbers)}"] = to, 1
        with suppress(QueueUnavailable):
            await self.connection.publish(to, b"+ACK", confirmation)

    async def repeat(self, client: Client) -> None:
        self._owed = {subject: (to, sent) for subject, (to, sent) in self._owed.items() if sent < _TRIES}
        for subject, (to, sent) in list(self._owed.items()):
            self._owed[subject] = to, sent + 1
            await client.publish(to, b"+ACK", subject)

    def lost(self) -> None:
        """The server has lost the messages, and their acks with them."""
        self.losses += 1
        self._owed.clear()

    async def _confirmed(self, message: Msg) -> None:
        self._owed.pop(message.subject, None)


class JetStreamDelivery(Delivery):
    def __init__(self, acks: Acks, clock: ServerClock | None, message: Msg, request: PrefillRequest) -> None:
        self._acks, self._reply, self._losses = acks, message.reply, acks.losses
        queued = clock.age(message.metadata.timestamp.timestamp()) if clock else 0.0
        super().__init__(request, queued, redelivered=message.metadata.num_delivered > 1)

    async def ack(self) -> None:
        """During an outage the ack is kept, and sent when the server is back."""
        if self._still_there:
            await self._acks.send(self._reply)

    async def in_progress(self) -> None:
        await self._send(b"+WPI")

    async def give_back(self) -> None:
        await self._send(b"-NAK")

    async def _send(self, word: bytes) -> None:
        if self._still_there:
            await self._acks.connection.publish(self._reply, word)

    @property
    def _still_there(self) -> bool:
        """An ack names a message by its number, which in a newer stream is another request's: if the server has lost
        the message's stream, send nothing."""
        return self._acks.losses == self._losses
