"""A message from the stream, as a request in a worker's hands."""

import time

from nats.aio.msg import Msg

from pdserve.errors import QueueUnavailable
from pdserve.messages import PrefillRequest
from pdserve.queue.base import Delivery
from pdserve.queue.jetstream.clock import ServerClock
from pdserve.queue.jetstream.connection import Connection


class JetStreamDelivery(Delivery):
    def __init__(
        self,
        connection: Connection,
        owed: set[str],
        message: Msg,
        request: PrefillRequest,
        clock: ServerClock | None,
    ) -> None:
        self._connection = connection
        self._owed = owed
        self._reply = message.reply
        self.request = request
        self.redelivered = message.metadata.num_delivered > 1
        self.queued = clock.age(message.metadata.timestamp.timestamp()) if clock else 0.0
        self.deadline = time.monotonic() + request.timeout - self.queued

    async def ack(self) -> None:
        """During an outage it is remembered, and said when the server is back: nothing is raised."""
        try:
            await self._connection.publish(self._reply, b"+ACK")
        except QueueUnavailable:
            self._owed.add(self._reply)

    async def in_progress(self) -> None:
        await self._connection.publish(self._reply, b"+WPI")

    async def give_back(self) -> None:
        await self._connection.publish(self._reply, b"-NAK")
