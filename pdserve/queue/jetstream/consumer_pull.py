"""Pulling from a JetStream consumer."""

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pdserve.queue.jetstream.client import cancellable
from pdserve.queue.jetstream.connection import NatsConnection
from pdserve.util.errors import QueueUnavailable

ANSWER_WITHIN = 2.0
LEAVE_WITHIN = 1.0
HEARTBEAT = 0.5
"""seconds between two signs of a consumer that has no message yet"""
SILENT = 1.5
"""seconds without a sign after which the consumer's leader is lost"""
_NO_MESSAGES, _TIMED_OUT, _HEARTBEAT = "404", "408", "100"
_MOVED = ("Leadership Change", "Server Shutdown")
"""descriptions of a status: the consumer goes on elsewhere"""


class ConsumerMissing(Exception):
    """The server has no such stream or consumer (any more)."""


class PullConsumer:
    """Pull requests to a JetStream consumer, one at a time.

    nats-py's own `fetch` waits for a full batch, raises plain timeouts, and lets an abandoned request go on catching
    messages. This is the protocol itself, which is small: publish a request with a reply subject, and read messages and
    status headers there.

    The reply subject serves the next request too if this one ended as it should, with a message or a status. When a
    request is abandoned, so is its subject: nothing listens there, and the server gives the message to another worker.
    """

    def __init__(self, connection: NatsConnection, stream: str, consumer: str) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox: _Inbox | None = None
        """the reply subject of the last request, if it may serve the next"""

    async def fetch(self, limit: int, wait: float) -> list[Msg]:
        """Return the messages that are there, up to `limit`; if there are none, the first that comes within `wait`
        seconds. Raises QueueUnavailable and ConsumerMissing."""
        messages: list[Msg] = []
        if limit > 1 or wait <= 0:
            messages = await self._ask(limit, {"batch": limit, "no_wait": True}, ANSWER_WITHIN)
        if not messages and wait > 0:
            request = {"batch": 1, "expires": int(wait * 1e9)}
            beats = wait > 2 * HEARTBEAT
            if beats:
                request["idle_heartbeat"] = int(HEARTBEAT * 1e9)
            messages = await self._ask(1, request, SILENT if beats else wait + ANSWER_WITHIN)
        return messages

    async def _ask(self, batch: int, request: Mapping[str, object], within: float) -> list[Msg]:
        client, lost = self._connection.client(), self._connection.lost
        assert lost is not None
        inbox, self._inbox = self._inbox, None
        if inbox is None or inbox.client is not client:
            inbox = await _listen(client)
        replies = inbox.replies
        messages: list[Msg] = []
        lost.add_done_callback(wake := lambda _: replies.put_nowait(None))
        try:
            await self._connection.publish(self._subject, json.dumps(request).encode(), inbox.subject)
            ended = await self._collect(replies, batch, within, messages)
        except BaseException:
            if client.is_connected:
                await self._leave(client, inbox.subscription, replies, messages)
            raise
        finally:
            lost.remove_done_callback(wake)
        if ended:
            self._inbox = inbox
        elif client.is_connected:
            await self._leave(client, inbox.subscription, replies, [])
        return messages

    async def _collect(
        self, replies: "asyncio.Queue[Msg | None]", batch: int, within: float, messages: list[Msg]
    ) -> bool:
        """Return whether the server's answer to this request is complete. It may take so long from one sign of the
        server to the next."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within) as silence:
                while len(messages) < batch:
                    message = await replies.get()
                    silence.reschedule(asyncio.get_running_loop().time() + within)
                    if message is None and messages:
                        return False
                    if message is None:
                        raise QueueUnavailable(f"NATS at {self._connection.url} went away")
                    status = (message.headers or {}).get("Status")
                    if status is None:
                        messages.append(message)
                    elif status != _HEARTBEAT:
                        _check(status, message)
                        return True
                return True
        return False

    async def _leave(
        self,
        client: Client,
        subscription: Subscription,
        replies: "asyncio.Queue[Msg | None]",
        messages: list[Msg],
    ) -> None:
        """Abandon a request: messages that were delivered, or are until the server hears of it, go to another worker at
        once. A ping of nats-py overtakes what it has not written yet, so that the ping within drain() proves that the
        server knows only if an earlier ping was answered first."""
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


@dataclass(frozen=True)
class _Inbox:
    """Where the server answers pull requests, for the life of one client at most."""

    client: Client
    subject: str
    replies: "asyncio.Queue[Msg | None]"
    subscription: Subscription


async def _listen(client: Client) -> _Inbox:
    subject, replies = f"_INBOX.{secrets.token_hex(12)}", asyncio.Queue[Msg | None]()
    return _Inbox(client, subject, replies, await cancellable(client.subscribe(subject, cb=replies.put)))


def _check(status: str, message: Msg) -> None:
    what = (message.headers or {}).get("Description", "")
    if status in (_NO_MESSAGES, _TIMED_OUT) or what in _MOVED:
        return
    if status == "503" or "Deleted" in what:
        raise ConsumerMissing
    raise QueueUnavailable(f"pull refused: {status} {what}")
