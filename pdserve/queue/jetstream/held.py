"""Number of requests that decode workers hold back, to publish them later. Each worker broadcasts its number."""

import asyncio
import logging
import secrets
import time
from contextlib import suppress

from nats.aio.msg import Msg

from pdserve.contract.messages import HeldRequests, decode_held_requests, encode
from pdserve.queue.jetstream.connection import NatsConnection
from pdserve.util.errors import ProtocolError, QueueUnavailable
from pdserve.util.lru import LruDict

logger = logging.getLogger(__name__)

MIN_INTERVAL = 0.1
"""Minimum of seconds between two reports."""
REPEAT = 1.0
"""Seconds between two reports while this process holds requests."""
FORGET = 3.0
"""Seconds without a report after which a worker's number counts as 0."""
_MAX_WORKERS = 1000


class HeldCounts:
    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._name = secrets.token_hex(8)
        self._own = 0
        self._changed = asyncio.Event()
        self._others: LruDict[tuple[int, float]] = LruDict(_MAX_WORKERS)
        """by decode worker: the number in its last report, and the monotonic time of that report"""

    @property
    def total(self) -> int:
        since = time.monotonic() - FORGET
        return self._own + sum(count for count, at in self._others.values() if at > since)

    def hold(self, count: int) -> None:
        if count != self._own:
            self._own = count
            self._changed.set()

    async def on_report(self, message: Msg) -> None:
        try:
            held = decode_held_requests(message.data)
        except ProtocolError as error:
            logger.warning("skipped a report of held requests: %s", error)
            return
        if held.sender != self._name:
            self._others[held.sender] = held.count, time.monotonic()

    async def report(self, subject: str) -> None:
        """Report this process's number to the other processes, for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REPEAT if self._own else None):
                    await self._changed.wait()
            self._changed.clear()
            with suppress(QueueUnavailable):
                await self._connection.publish(subject, encode(HeldRequests(self._name, self._own)))
            await asyncio.sleep(MIN_INTERVAL)
