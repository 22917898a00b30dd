"""A connection to NATS that comes back by itself, and pulling from a JetStream consumer over it.

nats-py can reconnect too, but then it sends what it buffered during the outage, may wait for ever for the socket of a
server that hangs, and on some errors gives up for good. So each of its clients lives for one TCP connection here, and a
new client is made when the server is gone or does not answer a ping.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ssl import SSLContext
from typing import TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pdserve.errors import ConfigError, ProtocolError, QueueUnavailable
from pdserve.queue.jetstream.client import PASSING, GraphClient, available, cancellable, discard, open_client
from pdserve.tasks import Lifetime, Owner

log = logging.getLogger(__name__)
T = TypeVar("T")

PING_INTERVAL = 1.0
PING_TIMEOUT = 3
"""seconds"""
RETRY = 0.3
_INBOX_BOUND = 100_000
ANSWER_WITHIN = 2.0
LEAVE_WITHIN = 1.0
_NO_MESSAGES, _TIMED_OUT, _HEARTBEAT = "404", "408", "100"

Handler = Callable[[Msg], Awaitable[None]]


class SubjectMessages:
    """The messages on one subject, from the moment it is listened to. Unread messages wait here; beyond a bound they
    are dropped, as at-most-once delivery allows."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._waiting: asyncio.Queue[Msg] = asyncio.Queue(_INBOX_BOUND)

    async def take(self, message: Msg) -> None:
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("%s is not read: message dropped", self.subject)

    def __aiter__(self) -> AsyncIterator[Msg]:
        return self

    async def __anext__(self) -> Msg:
        return await self._waiting.get()


class NatsConnection(Lifetime):
    """`prepare` sets up each new client before it counts as connected; if it fails, so does the connection. `meanwhile`
    says in the log what an outage means.

    Entering returns after the first attempt, successful or not. It raises the ConfigError of `prepare`, and one if the
    server and `tls` do not fit.
    """

    def __init__(
        self,
        url: str,
        tls: SSLContext | None,
        meanwhile: str,
        prepare: Callable[[Client], Awaitable[None]] | None = None,
    ) -> None:
        self.url = url
        self.lost: asyncio.Future[None] | None = None
        """done when the present client is lost"""
        self._prepare = prepare
        self._tls = tls
        self._meanwhile = meanwhile
        self._client: Client | None = None
        self._handlers: dict[str, Handler] = {}
        self._unsent: set[str] = set()
        self._complaint = ""
        """what of the server's setup was logged last; each is logged once"""
        self._closing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with Owner() as tasks:
                tasks.forever(lambda: self._keep_client(tried), "nats connection", again_after=RETRY)
                await tried
                yield
        finally:
            if self._closing is not None:
                await self._closing

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    def client(self) -> Client:
        """Return the present client, for one operation. Raises QueueUnavailable."""
        if self._client is None or not self._client.is_connected:
            raise QueueUnavailable(f"NATS at {self.url} is away")
        return self._client

    def listen(self, subject: str, handler: Handler) -> None:
        """Pass to `handler` what comes on `subject` from now on, also after reconnections. The server gets the
        subscription before anything that this connection publishes later."""
        self._handlers[subject] = handler
        self._unsent.add(subject)

    async def subscribe(self) -> None:
        """Send the server the new subscriptions; each operation does so first."""
        client = self.client()
        while self._unsent:
            subject = self._unsent.pop()
            await cancellable(client.subscribe(subject, cb=self._handlers[subject]))

    async def decoded(self, inbox: SubjectMessages, decode: Callable[[bytes], T]) -> AsyncIterator[T]:
        """Yield the messages of an inbox that is listened to; those that cannot be read are logged and skipped."""
        with suppress(QueueUnavailable):
            await self.subscribe()
        async for message in inbox:
            try:
                yield decode(message.data)
            except ProtocolError as error:
                log.warning("message on %s skipped: %s", inbox.subject, error)

    async def flush_subscriptions(self) -> None:
        """Return when the server has all subscriptions. Raises QueueUnavailable."""
        with available(self.url):
            await self.subscribe()
            for _ in range(2):  # a ping of nats-py overtakes what it has not written yet
                await cancellable(self.client().flush(PING_TIMEOUT))

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Publish at most once: returns before the server has the message. Raises QueueUnavailable."""
        with available(self.url):
            await self.subscribe()
            await cancellable(self.client().publish(subject, payload, reply))

    async def _keep_client(self, tried: "asyncio.Future[None]") -> None:
        """Make a client, watch it, and close it when it is lost."""
        client, leaving = GraphClient(self.url, self._tls), False
        try:
            await self._use(client, tried)
            self._complaint = ""
            log.warning("NATS at %s is away; %s until it is back", self.url, self._meanwhile)
        except ConfigError as error:
            if not tried.done():
                tried.set_exception(error)
            self._complain(str(error))
        except nats.js.errors.APIError as error:
            self._complain(f"NATS at {self.url} refuses what is needed of it: {error.description}")
        except PASSING as error:
            log.debug("NATS at %s: %s", self.url, error)
        except asyncio.CancelledError:
            leaving = True
            raise
        finally:
            # a cancellation at this moment must not leave the socket open
            self._closing = asyncio.create_task(self._close_client(client, leaving), name="nats close")
            await asyncio.shield(self._closing)
            if not tried.done():
                tried.set_result(None)

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            log.error("%s", text)
        self._complaint = text

    async def _use(self, client: GraphClient, tried: "asyncio.Future[None]") -> None:
        """Return when a connection that worked is lost; raise if it could not be made."""
        lost = self.lost = asyncio.get_running_loop().create_future()

        async def on_closed() -> None:
            if not lost.done():
                lost.set_result(None)

        await cancellable(open_client(client, on_closed))
        self._unsent = set(self._handlers)
        if self._prepare is not None:
            await cancellable(self._prepare(client))
        self._client = client
        await self.subscribe()
        log.info("NATS at %s answers", self.url)
        if not tried.done():
            tried.set_result(None)
        await _until_lost(client, lost)

    async def _close_client(self, client: GraphClient, leaving: bool) -> None:
        self._client = None
        if leaving and client.is_connected:
            with suppress(*PASSING):
                await client.flush(1)
        await discard(client)
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(None)


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
            messages = await self._ask(1, request, wait + ANSWER_WITHIN)
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
            await cancellable(inbox.subscription.unsubscribe())
        return messages

    async def _collect(
        self, replies: "asyncio.Queue[Msg | None]", batch: int, within: float, messages: list[Msg]
    ) -> bool:
        """Return whether the server's answer to this request is complete."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while len(messages) < batch:
                    message = await replies.get()
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
    if status in (_NO_MESSAGES, _TIMED_OUT):
        return
    what = (message.headers or {}).get("Description", "")
    if status == "503" or "Deleted" in what:
        raise ConsumerMissing
    raise QueueUnavailable(f"pull refused: {status} {what}")


async def _until_lost(client: Client, lost: "asyncio.Future[None]") -> None:
    """Return when the client is closed, does not answer a ping, or no longer reads: then `flush` waits for nothing."""
    while not lost.done() and client._reading_task is not None and not client._reading_task.done():
        await asyncio.wait(
            {lost, client._reading_task}, timeout=PING_INTERVAL, return_when=asyncio.FIRST_COMPLETED
        )
        if not lost.done():
            try:
                await cancellable(client.flush(PING_TIMEOUT))
            except PASSING:
                return
