"""A NATS connection that reconnects by itself, to the next server of a cluster.

nats-py can reconnect too, but then it sends the data that it buffered during the outage, may wait for ever for a server
that hangs, and gives up on some errors. So here each nats-py client lives for one TCP connection, and a new client
replaces it when the server is gone or does not answer a ping.
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
from pdserve.util.ticks import until_tick

logger = logging.getLogger(__name__)
T = TypeVar("T")

PING_INTERVAL = 1.0
PING_TIMEOUT = 3
RETRY_INTERVAL = 0.3
MAX_UNREAD = 100_000

Handler = Callable[[Msg], Awaitable[None]]


class SubjectMessages:
    """The unread messages of one subject. Beyond MAX_UNREAD, messages are dropped: delivery is at most once."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._unread: asyncio.Queue[Msg] = asyncio.Queue(MAX_UNREAD)

    async def put(self, message: Msg) -> None:
        try:
            self._unread.put_nowait(message)
        except asyncio.QueueFull:
            logger.warning("nats: dropped a message on %s: %d messages are unread", self.subject, MAX_UNREAD)

    async def next(self) -> Msg:
        return await self._unread.get()


class NatsConnection(Lifetime):
    """`prepare` sets up each new client before the client counts as connected; if `prepare` fails, another client is
    tried. `outage_effect` is the log's text for what an outage means.

    Entering returns after the first attempt, successful or not. It raises ConfigError if `prepare` does, if the
    server and `tls` do not match, or if `url` names several servers and the one tried is in no cluster.
    """

    def __init__(
        self,
        url: str,
        tls: SSLContext | None,
        outage_effect: str,
        prepare: Callable[[Client], Awaitable[None]] | None = None,
    ) -> None:
        self.url = strip_passwords(url)
        """for logs and errors"""
        servers = split_servers(url)
        self.of_cluster = len(servers) > 1
        self.lost: asyncio.Future[None] | None = None
        """done when the present client is lost"""
        self._servers = cycle(random.sample(servers, len(servers)))
        """in random order, to spread processes over the cluster"""
        self._has_client = asyncio.Event()
        self._prepare = prepare
        self._tls = tls
        self._outage_effect = outage_effect
        self._client: Client | None = None
        self._handlers: dict[str, Handler] = {}
        self._unsubscribed: set[str] = set()
        """subjects whose subscription is not sent yet"""
        self._logged_problem = ""
        self._closing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with TaskOwner() as tasks:
                tasks.forever(lambda: self._keep_client(tried), "nats connection", again_after=RETRY_INTERVAL)
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
            raise QueueUnavailable(f"disconnected from NATS at {self.url}")
        return self._client

    async def client_until(self, ends: float) -> Client | None:
        """Return the present client, or the next one; None if no client is connected by monotonic time `ends`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ends - time.monotonic()):
                await self._has_client.wait()
        return self._client if self.connected else None

    def leave(self, client: Client) -> None:
        """Connect to the next server of the cluster, because this client's server answers pings but cannot reach
        the other servers."""
        if self.of_cluster and client is self._client and self.lost is not None and not self.lost.done():
            self.lost.set_result(None)
            self._client = None
            self._has_client.clear()

    async def unless_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of the present client. Raises ConnectionClosedError when the client is lost; nats-py alone
        would still wait for the reply."""
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
        """Pass the messages on `subject` to `handler`, also after reconnections. The server gets the subscription
        before any message that this connection publishes later."""
        self._handlers[subject] = handler
        self._unsubscribed.add(subject)

    async def subscribe(self) -> None:
        """Send the new subscriptions. Each operation calls this first."""
        client = self.client()
        while self._unsubscribed:
            subject = self._unsubscribed.pop()
            await cancellable(client.subscribe(subject, cb=self._handlers[subject]))

    async def decoded(self, inbox: SubjectMessages, decode: Callable[[bytes], T]) -> AsyncIterator[T]:
        """Yield the decoded messages of an inbox. Undecodable ones are logged and skipped."""
        with suppress(QueueUnavailable):
            await self.subscribe()
        while True:
            message = await inbox.next()
            try:
                yield decode(message.data)
            except ProtocolError as error:
                logger.warning("nats: skipped a message on %s: %s", inbox.subject, error)

    async def flush_subscriptions(self) -> None:
        """Return when the server has all subscriptions. Raises QueueUnavailable."""
        with available(self.url):
            await self.subscribe()
            for _ in range(2):  # nats-py may send its first ping before new subscriptions
                await cancellable(self.client().flush(PING_TIMEOUT))

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Publish at most once, without waiting for the server. Raises QueueUnavailable."""
        with available(self.url):
            await self.subscribe()
            await cancellable(self.client().publish(subject, payload, reply))

    async def _keep_client(self, tried: "asyncio.Future[None]") -> None:
        """Connect a client, and close it when it is lost or cannot connect."""
        client, leaving = GraphClient(next(self._servers), self._tls), False
        try:
            await self._use(client, tried)
            self._logged_problem = ""
            logger.warning(
                "nats: disconnected from %s; %s until it reconnects", client.url, self._outage_effect
            )
        except ConfigError as error:
            if not tried.done():
                tried.set_exception(error)
            self._log_once(str(error))
        except nats.js.errors.ServiceUnavailableError as error:
            logger.debug("nats: %s: %s", client.url, error.description)  # a cluster without a leader
        except nats.js.errors.APIError as error:
            self._log_once(f"NATS at {client.url} refused to set up the queue: {error.description}; retrying")
        except PASSING as error:
            logger.debug("nats: %s: %s", client.url, error)
        except asyncio.CancelledError:
            leaving = True
            raise
        finally:
            # shielded: a cancellation now must not leave the socket open
            self._closing = asyncio.create_task(self._close_client(client, leaving), name="nats close")
            await asyncio.shield(self._closing)
            if not tried.done():
                tried.set_result(None)

    def _log_once(self, problem: str) -> None:
        if problem != self._logged_problem:
            logger.error("%s", problem)
        self._logged_problem = problem

    async def _use(self, client: GraphClient, tried: "asyncio.Future[None]") -> None:
        """Connect, and return when the connection is lost. Raises if connecting fails."""
        lost = self.lost = asyncio.get_running_loop().create_future()

        async def on_closed() -> None:
            if not lost.done():
                lost.set_result(None)

        await cancellable(open_client(client, on_closed))
        if self.of_cluster:
            require_cluster(client)
        self._unsubscribed = set(self._handlers)
        if self._prepare is not None:
            await cancellable(self._prepare(client))
        self._client = client
        await self.subscribe()
        self._has_client.set()
        logger.info("nats: connected to %s", client.url)
        if not tried.done():
            tried.set_result(None)
        await _until_lost(client, lost)

    async def _close_client(self, client: GraphClient, leaving: bool) -> None:
        self._client = None
        self._has_client.clear()
        if leaving and client.is_connected:
            with suppress(*PASSING):
                await client.flush(1)
        await discard(client)
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(None)


async def _until_lost(client: Client, lost: "asyncio.Future[None]") -> None:
    """Return when the client is closed, its reading task has ended, or the server does not answer a ping."""
    while not lost.done() and client._reading_task is not None and not client._reading_task.done():
        await asyncio.wait(
            {lost, client._reading_task},
            timeout=until_tick(PING_INTERVAL),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not lost.done():
            try:
                await cancellable(client.flush(PING_TIMEOUT))
            except PASSING:
                return
