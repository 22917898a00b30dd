"""A connection to NATS that comes back by itself, to the next server where there are several.

nats-py can reconnect too, but then it sends what it buffered during the outage, may wait for ever for the socket of a
server that hangs, and on some errors gives up for good. So each of its clients lives for one TCP connection here, and a
new client is made when the server is gone or does not answer a ping.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from ssl import SSLContext
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from pdserve.queue.jetstream.client import (
    PASSING,
    GraphClient,
    available,
    cancellable,
    discard,
    open_client,
    require_cluster,
)
from pdserve.runtime.tasks import Lifetime, TaskOwner
from pdserve.util.errors import ConfigError, ProtocolError, QueueUnavailable
from pdserve.util.net import split_servers, strip_passwords

logger = logging.getLogger(__name__)
T = TypeVar("T")

PING_INTERVAL = 1.0
PING_TIMEOUT = 3
"""seconds"""
RETRY = 0.3
_INBOX_BOUND = 100_000


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
            logger.warning("%s is not read: message dropped", self.subject)

    async def next(self) -> Msg:
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
        self.url = strip_passwords(url)
        """for messages"""
        servers = split_servers(url)
        self.of_cluster = len(servers) > 1
        self.lost: asyncio.Future[None] | None = None
        """done when the present client is lost"""
        self._servers = cycle(random.sample(servers, len(servers)))
        """in turn; in another order in each process, so that each server has some"""
        self._answers = asyncio.Event()
        """set while there is a client"""
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
            async with TaskOwner() as tasks:
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

    async def client_until(self, ends: float) -> Client | None:
        """Return the present client, or the next one if it comes before this monotonic time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ends - time.monotonic()):
                await self._answers.wait()
        return self._client if self.connected else None

    def leave(self, client: Client) -> None:
        """This client's server answers, but does not reach what it should: go on to the next server of the cluster."""
        if self.of_cluster and client is self._client and self.lost is not None and not self.lost.done():
            self.lost.set_result(None)
            self._client = None
            self._answers.clear()

    async def unless_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of the present client. Raises ConnectionClosedError when it is lost, where nats-py would wait
        for an answer that cannot come."""
        assert self.lost is not None
        task = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {task, self.lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise nats.errors.ConnectionClosedError
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

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
        while True:
            message = await inbox.next()
            try:
                yield decode(message.data)
            except ProtocolError as error:
                logger.warning("message on %s skipped: %s", inbox.subject, error)

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
        client, leaving = GraphClient(next(self._servers), self._tls), False
        try:
            await self._use(client, tried)
            self._complaint = ""
            logger.warning("NATS at %s is away; %s until it is back", client.url, self._meanwhile)
        except ConfigError as error:
            if not tried.done():
                tried.set_exception(error)
            self._complain(str(error))
        except nats.js.errors.ServiceUnavailableError as error:
            logger.debug("NATS at %s: %s", client.url, error.description)  # a cluster without a leader
        except nats.js.errors.APIError as error:
            self._complain(f"NATS at {client.url} refuses what is needed of it: {error.description}")
        except PASSING as error:
            logger.debug("NATS at %s: %s", client.url, error)
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
            logger.error("%s", text)
        self._complaint = text

    async def _use(self, client: GraphClient, tried: "asyncio.Future[None]") -> None:
        """Return when a connection that worked is lost; raise if it could not be made."""
        lost = self.lost = asyncio.get_running_loop().create_future()

        async def on_closed() -> None:
            if not lost.done():
                lost.set_result(None)

        await cancellable(open_client(client, on_closed))
        if self.of_cluster:
            require_cluster(client)
        self._unsent = set(self._handlers)
        if self._prepare is not None:
            await cancellable(self._prepare(client))
        self._client = client
        await self.subscribe()
        self._answers.set()
        logger.info("NATS at %s answers", client.url)
        if not tried.done():
            tried.set_result(None)
        await _until_lost(client, lost)

    async def _close_client(self, client: GraphClient, leaving: bool) -> None:
        self._client = None
        self._answers.clear()
        if leaving and client.is_connected:
            with suppress(*PASSING):
                await client.flush(1)
        await discard(client)
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(None)


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
