"""Pulls messages from a JetStream consumer."""

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

REPLY_TIMEOUT = 2.0
ABANDON_TIMEOUT = 1.0
HEARTBEAT = 0.5
"""Seconds between two heartbeats of a consumer that has no message."""
MAX_SILENCE = 1.5
"""Seconds without a heartbeat after which the consumer's leader counts as lost."""
_NO_MESSAGES, _TIMED_OUT, _HEARTBEAT = "404", "408", "100"
_MOVED = ("Leadership Change", "Server Shutdown")
"""Status descriptions that mean: another server takes over the consumer."""


class ConsumerMissing(Exception):
    """The server has no such stream or consumer."""


class PullConsumer:
    """Sends pull requests to a JetStream consumer, one at a time.

    nats-py's own `fetch` waits for a full batch, and an abandoned request keeps taking messages. So this class speaks
    the protocol itself: it publishes a request with a reply subject, and reads messages and status headers there.

    It unsubscribes the reply subject of an abandoned request, so that the request's messages go to another worker.
    """

    def __init__(self, connection: NatsConnection, stream: str, consumer: str) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox: _Inbox | None = None
        """the last request's inbox, if it can be reused"""

    async def fetch(self, limit: int, wait: float) -> list[Msg]:
        """Return up to `limit` available messages; if there are none, the first that arrives within `wait` seconds.
        Raises QueueUnavailable and ConsumerMissing."""
        messages: list[Msg] = []
        if limit > 1 or wait <= 0:
            messages = await self._ask(limit, {"batch": limit, "no_wait": True}, REPLY_TIMEOUT)
        if not messages and wait > 0:
            request = {"batch": 1, "expires": int(wait * 1e9)}
            beats = wait > 2 * HEARTBEAT
            if beats:
                request["idle_heartbeat"] = int(HEARTBEAT * 1e9)
            messages = await self._ask(1, request, MAX_SILENCE if beats else wait + REPLY_TIMEOUT)
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
                await self._abandon(client, inbox.subscription, replies, messages)
            raise
        finally:
            lost.remove_done_callback(wake)
        if ended:
            self._inbox = inbox
        elif client.is_connected:
            await self._abandon(client, inbox.subscription, replies, [])
        return messages

    async def _collect(
        self, replies: "asyncio.Queue[Msg | None]", batch: int, within: float, messages: list[Msg]
    ) -> bool:
        """Collect messages. Return whether the reply is complete: false after `within` seconds of silence, or if the
        connection is lost after a message. Raises QueueUnavailable if it is lost before the first message."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within) as silence:
                while len(messages) < batch:
                    message = await replies.get()
                    silence.reschedule(asyncio.get_running_loop().time() + within)
                    if message is None and messages:
                        return False
                    if message is None:
                        raise QueueUnavailable(f"disconnected from NATS at {self._connection.url}")
                    status = (message.headers or {}).get("Status")
                    if status is None:
                        messages.append(message)
                    elif status != _HEARTBEAT:
                        _check_status(status, message)
                        return True
                return True
        return False

    async def _abandon(
        self,
        client: Client,
        subscription: Subscription,
        replies: "asyncio.Queue[Msg | None]",
        messages: list[Msg],
    ) -> None:
        """Abandon a request and give its messages, also those still arriving, to another worker. nats-py may send the
        ping of `flush` before the UNSUB. The ping of `drain` comes after it: its answer proves that the server has the
        UNSUB."""
        with suppress(nats.errors.Error, QueueUnavailable, TimeoutError):
            async with asyncio.timeout(ABANDON_TIMEOUT):
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
    """A subscription for replies to pull requests, on one client."""

    client: Client
    subject: str
    replies: "asyncio.Queue[Msg | None]"
    subscription: Subscription


async def _listen(client: Client) -> _Inbox:
    subject, replies = f"_INBOX.{secrets.token_hex(12)}", asyncio.Queue[Msg | None]()
    return _Inbox(client, subject, replies, await cancellable(client.subscribe(subject, cb=replies.put)))


def _check_status(status: str, message: Msg) -> None:
    description = (message.headers or {}).get("Description", "")
    if status in (_NO_MESSAGES, _TIMED_OUT) or description in _MOVED:
        return
    if status == "503" or "Deleted" in description:
        raise ConsumerMissing
    raise QueueUnavailable(f"NATS refused a pull: {status} {description}")
