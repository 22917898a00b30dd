"""A message from the stream, as a request in a worker's hands."""

import time
from collections.abc import Callable

from nats.aio.msg import Msg

from pdserve.errors import QueueUnavailable
from pdserve.messages import PrefillRequest
from pdserve.queue.base import Delivery
from pdserve.queue.jetstream.clock import ServerClock
from pdserve.queue.jetstream.connection import Connection


class JetStreamDelivery(Delivery):
    """`losses` counts how often the server lost its stream. What is said of a message names it by its number, which in
    a later stream is another request's: nothing is said then."""

    def __init__(
        self,
        connection: Connection,
        owed: set[str],
        message: Msg,
        request: PrefillRequest,
        clock: ServerClock | None,
        losses: Callable[[], int],
    ) -> None:
        self._connection = connection
        self._owed = owed
        self._reply = message.reply
        self._losses, self._lost_before = losses, losses()
        self.request = request
        self.redelivered = message.metadata.num_delivered > 1
        self.queued = clock.age(message.metadata.timestamp.timestamp()) if clock else 0.0
        self.deadline = time.monotonic() + request.timeout - self.queued

    async def ack(self) -> None:
        """During an outage it is remembered, and said when the server is back: nothing is raised."""
        try:
            await self._say(b"+ACK")
        except QueueUnavailable:
            self._owed.add(self._reply)

    async def in_progress(self) -> None:
        await self._say(b"+WPI")

    async def give_back(self) -> None:
        await self._say(b"-NAK")

    async def _say(self, word: bytes) -> None:
        if self._losses() == self._lost_before:
            await self._connection.publish(self._reply, word)
