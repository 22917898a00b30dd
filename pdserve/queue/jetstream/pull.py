"""Pull requests to a JetStream consumer.

nats-py's own `fetch` waits for a full batch, raises plain timeouts, and lets a request that was given up go
on catching messages. This is the protocol itself, which is small: publish a request with a reply subject,
read messages and status headers there.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pdserve.errors import QueueUnavailable
from pdserve.queue.jetstream.connection import Connection

ANSWER_WITHIN = 2.0
LEAVE_WITHIN = 1.0
_NO_MESSAGES, _TIMED_OUT, _HEARTBEAT = "404", "408", "100"


class ConsumerMissing(Exception):
    """The server has no such stream or consumer (any more)."""


class Puller:
    """One caller at a time."""

    def __init__(self, connection: Connection, stream: str, consumer: str) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"

    async def fetch(self, limit: int, wait: float) -> list[Msg]:
        """What is there at once, up to `limit`; where nothing is, the first that comes within `wait` seconds.
        Raises QueueUnavailable and ConsumerMissing."""
        messages = await self._ask(limit, {"batch": limit, "no_wait": True}, ANSWER_WITHIN)
        if not messages and wait > 0:
            request = {"batch": 1, "expires": int(wait * 1e9)}
            messages = await self._ask(1, request, wait + ANSWER_WITHIN)
        return messages

    async def _ask(self, batch: int, request: Mapping[str, object], within: float) -> list[Msg]:
        """A reply subject for this request alone: when we leave early, nobody listens there, and the server
        gives the message to another worker."""
        client, lost = self._connection.client(), self._connection.lost
        assert lost is not None
        reply = f"_INBOX.{secrets.token_hex(12)}"
        replies: asyncio.Queue[Msg | None] = asyncio.Queue()
        messages: list[Msg] = []
        lost.add_done_callback(wake := lambda _: replies.put_nowait(None))
        subscription = await client.subscribe(reply, cb=replies.put)
        try:
            await self._connection.publish(self._subject, json.dumps(request).encode(), reply)
            await self._collect(replies, batch, within, messages)
        except BaseException:
            if client.is_connected:
                await self._leave(client, subscription, replies, messages)
            raise
        finally:
            lost.remove_done_callback(wake)
        if client.is_connected:
            await subscription.unsubscribe()
        return messages

    async def _collect(
        self, replies: "asyncio.Queue[Msg | None]", batch: int, within: float, messages: list[Msg]
    ) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while len(messages) < batch:
                    message = await replies.get()
                    if message is None and messages:
                        return
                    if message is None:
                        raise QueueUnavailable(f"NATS at {self._connection.url} went away")
                    status = (message.headers or {}).get("Status")
                    if status is None:
                        messages.append(message)
                    elif status != _HEARTBEAT:
                        _check(status, message)
                        return

    async def _leave(
        self,
        client: Client,
        subscription: Subscription,
        replies: "asyncio.Queue[Msg | None]",
        messages: list[Msg],
    ) -> None:
        """Given up: what was delivered, or still is until the server hears of it, goes to somebody else at
        once. A ping of nats-py overtakes what it has not written yet, so the one within drain() would not
        prove that the server knows; it does when an earlier one was answered first."""
        with suppress(nats.errors.Error, QueueUnavailable, TimeoutError):
            async with asyncio.timeout(LEAVE_WITHIN):
                await client._send_unsubscribe(subscription._id)
                await client.flush()
                await subscription.drain()  # type: ignore[no-untyped-call]
            while not replies.empty():
                messages += [late] if (late := replies.get_nowait()) else []
            for message in messages:
                if message.reply:
                    await self._connection.publish(message.reply, b"-NAK")


def _check(status: str, message: Msg) -> None:
    if status in (_NO_MESSAGES, _TIMED_OUT):
        return
    what = (message.headers or {}).get("Description", "")
    if status == "503" or "Deleted" in what:
        raise ConsumerMissing
    raise QueueUnavailable(f"pull refused: {status} {what}")
