"""Stored responses on NATS: a stream in the server's memory for each owner, with one subject for each response, and
questions between frontends as requests with several replies."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import cast

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from pdserve.credentials import Credentials
from pdserve.errors import PeerGone, QueueUnavailable
from pdserve.queue.jetstream.client import available, cancellable
from pdserve.queue.jetstream.connection import NatsConnection
from pdserve.queue.jetstream.stream import API_TIMEOUT, NAME_IN_USE, token
from pdserve.queue.responses import Answer, ResponseStore, StoreLimits
from pdserve.tasks import Owner

CHUNK = 256 << 10
"""bytes of a message: a server takes a megabyte by default"""
SILENT, ALIVE = 5.0, 1.0
"""seconds of silence after which a frontend that was asked counts as gone, and after which it sends a sign of life"""
_PART, _ALIVE, _END = b"+", b"-", b"."
_NOBODY = "503"
"""status of a request to which nothing listens"""

_Head = tuple[str, int, bytes]
"""version of the stored response, number of further messages that it has, and its first part"""


class JetStreamResponses(ResponseStore):
    def __init__(
        self, nats: str, namespace: str, limits: StoreLimits, credentials: Credentials | None = None
    ) -> None:
        self._namespace = token(namespace)
        self._limits = limits
        tls = credentials.client if credentials else None
        self._connection = NatsConnection(nats, tls, "responses are not stored", self._forget)
        self._tasks = Owner()
        self._made: set[str] = set()
        """streams that are known to exist"""

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with self._connection, self._tasks:
            yield

    @property
    def connected(self) -> bool:
        return self._connection.connected

    async def put(self, owner: str, key: str, data: bytes) -> None:
        """Store the parts first, under names of this version, and then the head that names them: a reader finds all of
        this version or all of the one before."""
        stream, subject, version = self._stream(owner), self._subject(owner, key), secrets.token_hex(4)
        rest = [data[at : at + CHUNK] for at in range(CHUNK, len(data), CHUNK)]
        head: _Head = version, len(rest), data[:CHUNK]
        with available(self._connection.url):
            js = self._connection.client().jetstream(timeout=API_TIMEOUT)
            try:
                await self._make(js, stream, owner)
                for number, part in enumerate(rest):
                    await cancellable(js.publish(f"{subject}.{version}.{number}", part, stream=stream))
                await cancellable(js.publish(subject, msgspec.msgpack.encode(head), stream=stream))
            except nats.js.errors.Error:
                self._made.discard(stream)
                raise

    async def get(self, owner: str, key: str) -> bytes:
        stream, subject = self._stream(owner), self._subject(owner, key)
        with available(self._connection.url):
            js = self._connection.client().jetstream(timeout=API_TIMEOUT)
            try:
                version, count, data = msgspec.msgpack.decode(await _last(js, stream, subject), type=_Head)
                parts = [await _last(js, stream, f"{subject}.{version}.{number}") for number in range(count)]
            except nats.js.errors.NotFoundError:  # also of a stream that was never made
                raise KeyError(key) from None
        return b"".join([data, *parts])

    async def listen(self, frontend: str, answer: Answer) -> None:
        async def take(message: Msg) -> None:
            self._tasks.start(self._reply(message, answer), "answer to a frontend")

        self._connection.listen(self._frontend(frontend), take)
        if self._connection.connected:
            await self._connection.subscribe()

    async def ask(self, frontend: str, question: bytes) -> AsyncIterator[bytes]:
        client, lost = self._connection.client(), self._connection.lost
        assert lost is not None
        inbox, replies = f"_INBOX.{secrets.token_hex(12)}", asyncio.Queue[Msg | None]()
        with available(self._connection.url):
            subscription = await cancellable(client.subscribe(inbox, cb=replies.put))
        lost.add_done_callback(wake := lambda _: replies.put_nowait(None))
        try:
            await self._connection.publish(self._frontend(frontend), question, inbox)
            while part := await self._next(frontend, replies):
                if part[:1] == _PART:
                    yield part[1:]
                elif part == _END:
                    return
        finally:
            lost.remove_done_callback(wake)
            if client.is_connected:
                await cancellable(subscription.unsubscribe())

    async def _next(self, frontend: str, replies: "asyncio.Queue[Msg | None]") -> bytes:
        try:
            async with asyncio.timeout(SILENT):
                message = await replies.get()
        except TimeoutError:
            raise PeerGone(frontend) from None
        if message is None:
            raise QueueUnavailable(f"NATS at {self._connection.url} went away")
        if (message.headers or {}).get("Status") == _NOBODY:
            raise PeerGone(frontend)
        return message.data

    async def _reply(self, message: Msg, answer: Answer) -> None:
        with suppress(QueueUnavailable):
            answering = asyncio.create_task(self._answer(message, answer))
            asked = asyncio.create_task(self._stay_alive(message.reply))
            try:
                await asyncio.wait({answering, asked}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                answering.cancel()
                asked.cancel()
                await asyncio.wait({answering, asked})
            if not answering.cancelled():
                answering.result()

    async def _answer(self, message: Msg, answer: Answer) -> None:
        async with aclosing(cast(AsyncGenerator[bytes], answer(message.data))) as parts:
            async for part in parts:
                for at in range(0, len(part), CHUNK):
                    await self._connection.publish(message.reply, _PART + part[at : at + CHUNK])
        await self._connection.publish(message.reply, _END)

    async def _stay_alive(self, reply: str) -> None:
        """Send signs of life until nothing listens any more: the other frontend's client has left, or NATS is away. The
        server itself reports that at once; the frontend does not answer."""
        with suppress(nats.errors.Error, QueueUnavailable):
            while True:
                with suppress(TimeoutError):
                    await cancellable(self._connection.client().request(reply, _ALIVE, timeout=ALIVE))

    # on the server

    async def _forget(self, _: Client) -> None:
        self._made.clear()  # the server may be another one, or have lost its memory

    def _stream(self, owner: str) -> str:
        return f"pdserve-responses+{self._namespace}+{token(owner)}"

    def _subject(self, owner: str, key: str) -> str:
        """Hold the key's digest only: clients may choose any key."""
        digest = hashlib.sha256(key.encode()).hexdigest()[:32]
        return f"pdserve-responses.{self._namespace}.{token(owner)}.{digest}"

    def _frontend(self, frontend: str) -> str:
        return f"pdserve-frontends.{self._namespace}.{token(frontend)}"

    async def _make(self, js: JetStreamContext, stream: str, owner: str) -> None:
        if stream in self._made:
            return
        config = StreamConfig(
            name=stream,
            subjects=[f"pdserve-responses.{self._namespace}.{token(owner)}.>"],
            storage=StorageType.MEMORY,
            discard=DiscardPolicy.OLD,
            max_msgs_per_subject=1,
            max_bytes=self._limits.max_bytes,
            max_age=self._limits.age,
            duplicate_window=min(120.0, self._limits.age),
        )
        try:
            await cancellable(js.add_stream(config))
        except nats.js.errors.BadRequestError as error:
            if error.err_code != NAME_IN_USE:
                raise
            await cancellable(js.update_stream(config))
        self._made.add(stream)


async def _last(js: JetStreamContext, stream: str, subject: str) -> bytes:
    return (await cancellable(js.get_last_msg(stream, subject))).data or b""
