"""One connection to NATS that comes back by itself.

nats-py can reconnect too, but then it sends what it buffered while the server was away, may wait for ever
for the socket of a server that hangs, and on some errors gives up for good. So here each of its clients
lives for one TCP connection, and a new one is made when the server is gone or does not answer a ping.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from pdserve.errors import ConfigError, QueueUnavailable
from pdserve.tasks import Owner

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 2
PING_INTERVAL = 2.0
PING_TIMEOUT = 3
"""seconds; a ping can't be tried twice: nats-py breaks on a late answer to one that was given up"""
RETRY = 0.3
_INBOX_BOUND = 100_000
_PASSING = (nats.errors.Error, OSError, TimeoutError)

T = TypeVar("T")
Handler = Callable[[Msg], Awaitable[None]]


async def heed(call: Awaitable[T]) -> T:
    """Await something of nats-py, which at times swallows a cancellation (its own doing, and wait_for's
    before Python 3.12): a task that was cancelled meanwhile stops here nevertheless."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    result = await call
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


class Inbox:
    """Messages on one subject, from the moment it is listened to. What comes while nobody reads waits here;
    beyond a bound it is dropped, as at-most-once allows."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._waiting: asyncio.Queue[Msg] = asyncio.Queue(_INBOX_BOUND)

    async def take(self, message: Msg) -> None:
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("nobody reads %s: message dropped", self.subject)

    def __aiter__(self) -> AsyncIterator[Msg]:
        return self

    async def __anext__(self) -> Msg:
        return await self._waiting.get()


class Connection:
    """`prepare` gets each new client before it counts as connected; when it fails, the connection does.

    Entering returns after the first try, whatever came of it, but raises a ConfigError of `prepare`.
    """

    def __init__(self, url: str, prepare: Callable[[Client], Awaitable[None]]) -> None:
        self.url = url
        self.lost: asyncio.Future[None] | None = None
        """of the present client, done when it is lost"""
        self._prepare = prepare
        self._client: Client | None = None
        self._handlers: dict[str, Handler] = {}
        self._unsent: set[str] = set()
        self._tasks = Owner()
        self._parting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks.forever(lambda: self._keep(tried), "nats connection")
        try:
            await tried
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()
        if self._parting is not None:
            await self._parting

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    def client(self) -> Client:
        """The present client, for one operation. Raises QueueUnavailable."""
        if self._client is None or not self._client.is_connected:
            raise QueueUnavailable(f"NATS at {self.url} is away")
        return self._client

    def listen(self, subject: str, handler: Handler) -> None:
        """From now on `handler` gets what comes on `subject`, also after reconnections. The server knows of
        it before it sees anything that is published from here later."""
        self._handlers[subject] = handler
        self._unsent.add(subject)

    async def settle(self) -> None:
        """Tell the server what is listened to. Each operation does."""
        client = self.client()
        while self._unsent:
            subject = self._unsent.pop()
            await client.subscribe(subject, cb=self._handlers[subject])

    async def settled(self) -> None:
        """Return when the server knows what is listened to. Raises QueueUnavailable."""
        try:
            await self.settle()
            for _ in range(2):  # a ping of nats-py overtakes what it has not written yet
                await self.client().flush(PING_TIMEOUT)
        except (nats.errors.Error, TimeoutError) as error:
            raise QueueUnavailable(str(error)) from error

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """At most once: returns before the server has it. Raises QueueUnavailable."""
        try:
            await self.settle()
            await self.client().publish(subject, payload, reply)
        except nats.errors.Error as error:
            raise QueueUnavailable(str(error)) from error

    async def _keep(self, tried: "asyncio.Future[None]") -> None:
        """Owns the client: makes it, watches it, replaces it."""
        complaint = ""
        while True:
            client, leaving = Client(), False
            try:
                await self._use(client, tried)
                complaint = ""
                log.warning("NATS at %s is away; prompts are prefilled locally until it is back", self.url)
            except ConfigError as error:
                if not tried.done():
                    tried.set_exception(error)
                if str(error) != complaint:
                    log.error("%s", error)
                complaint = str(error)
            except _PASSING as error:
                log.debug("NATS at %s: %s", self.url, error)
            except asyncio.CancelledError:
                leaving = True
                raise
            finally:
                # leaving in just this moment must not leave the socket open
                self._parting = asyncio.create_task(self._part_with(client, leaving), name="nats close")
                await asyncio.shield(self._parting)
                if not tried.done():
                    tried.set_result(None)
            await asyncio.sleep(RETRY)

    async def _use(self, client: Client, tried: "asyncio.Future[None]") -> None:
        """Returns when a connection that worked is lost; raises when there never was one."""
        lost = self.lost = asyncio.get_running_loop().create_future()

        async def on_closed() -> None:
            if not lost.done():
                lost.set_result(None)

        await heed(open_client(client, self.url, on_closed))
        self._unsent = set(self._handlers)
        await heed(self._prepare(client))
        self._client = client
        await heed(self.settle())
        log.info("NATS at %s answers", self.url)
        if not tried.done():
            tried.set_result(None)
        await _until_silent(client, lost)

    async def _part_with(self, client: Client, leaving: bool) -> None:
        self._client = None
        if leaving and client.is_connected:
            with suppress(*_PASSING):
                await client.flush(1)
        await discard(client)
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(None)


async def open_client(
    client: Client, url: str, on_closed: Callable[[], Awaitable[None]] | None = None
) -> None:
    """For one TCP connection: without pings and reconnections of its own."""
    await client.connect(
        [one.strip() for one in url.split(",")],
        allow_reconnect=False,
        max_reconnect_attempts=1,
        reconnect_time_wait=0,
        connect_timeout=CONNECT_TIMEOUT,
        ping_interval=24 * 3600,
        flush_timeout=1,
        error_cb=_on_error,
        closed_cb=on_closed,
    )


async def discard(client: Client) -> None:
    """Close it without sending what it still has: nats-py's close() would wait for ever for a server that
    hangs to take that, and swallows cancellations meanwhile; and what was reported as failed must not be
    sent."""
    client._pending.clear()
    client._pending_data_size = 0
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
    with suppress(*_PASSING):
        await client.close()


async def _until_silent(client: Client, lost: "asyncio.Future[None]") -> None:
    while not lost.done():
        await asyncio.wait({lost}, timeout=PING_INTERVAL)
        if not lost.done():
            try:
                await heed(client.flush(PING_TIMEOUT))
            except _PASSING:
                return


async def _on_error(error: Exception) -> None:
    """Also told what a handler raised."""
    if isinstance(error, _PASSING):
        log.debug("nats: %s", error)
    else:
        log.error("a message of NATS could not be handled", exc_info=error)


async def publish_once(url: str, subject: str, payloads: Iterable[bytes]) -> None:
    """On a connection of its own, whatever the payloads are. Raises what nats-py does."""
    client = Client()
    await open_client(client, url)
    try:
        for payload in payloads:
            await client.publish(subject, payload)
        await client.flush()
    finally:
        await discard(client)
