"""A frontend's end: one DEALER for one decode worker."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Self

import zmq

from pdserve.errors import PeerGone, ProtocolError
from pdserve.messages import ToDecode, ToFrontend, decode_to_frontend, encode_to_decode
from pdserve.stream.base import StreamClient
from pdserve.stream.zmq.socket import BEAT_EVERY, BYE, HEARTBEAT, HELLO, AsyncSocket, Unreachable
from pdserve.tasks import Owner

log = logging.getLogger(__name__)

SILENCE = 4.0
CONNECT_WITHIN = 3.0
_BATCH = 64
_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED


class ZmqStreamClient(StreamClient):
    def __init__(self, address: str, frontend: str, silence: float = SILENCE) -> None:
        self._address = address
        self._frontend = frontend
        self._silence = silence
        self._heard = 0.0
        self._gone = False
        self._readable = asyncio.Event()
        self._socket: AsyncSocket
        self._events: zmq.Socket[bytes]
        self._tasks = Owner()

    async def __aenter__(self) -> Self:
        """Raises PeerGone when nobody answers within a few seconds."""
        self._socket = AsyncSocket(zmq.DEALER, self._readable.set)
        raw = self._socket.raw
        raw.setsockopt(zmq.IDENTITY, f"{self._frontend}#{secrets.token_hex(6)}".encode())
        raw.setsockopt(zmq.RECONNECT_IVL, -1)
        self._events = raw.get_monitor_socket(_BROKEN)
        raw.connect(self._address)
        self._socket.open()
        asyncio.get_running_loop().add_reader(int(self._events.getsockopt(zmq.FD)), self._on_broken)
        self._on_broken()  # ZeroMQ announces nothing to those who never tried to read
        try:
            await self._shake_hands()
        except BaseException:
            self._close()
            raise
        self._tasks.forever(self._keep_beating, "stream heartbeats")
        return self

    async def _shake_hands(self) -> None:
        self._socket.try_send((HELLO,))
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_WITHIN):
                while not self._gone:
                    self._readable.clear()
                    if self._socket.receive() == [HEARTBEAT]:
                        self._heard = time.monotonic()
                        return
                    await self._readable.wait()
        raise PeerGone(self._address)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()
        if not self._gone:
            with suppress(Unreachable):
                self._socket.try_send((BYE,))
        self._close()

    def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(int(self._events.getsockopt(zmq.FD)))
        self._socket.raw.disable_monitor()
        self._events.close()
        self._socket.close()

    async def send(self, message: ToDecode) -> None:
        if self._gone:
            raise PeerGone(self._address)
        try:
            await self._socket.send((encode_to_decode(message),))
        except Unreachable as error:
            self._set_gone(f"it {error}")
            raise PeerGone(self._address) from error

    async def received(self) -> AsyncIterator[ToFrontend]:
        count = 0
        while True:
            self._readable.clear()
            parts = self._socket.receive()
            if parts is None and self._gone:
                raise PeerGone(self._address)
            if parts is None:
                await self._readable.wait()
                continue
            self._heard = time.monotonic()
            body = parts[-1]
            if body == BYE:
                self._set_gone("it closed the connection")
            elif body != HEARTBEAT:
                yield self._decoded(body)
            count += 1
            if count % _BATCH == 0:
                await asyncio.sleep(0)

    def _decoded(self, body: bytes) -> ToFrontend:
        """What can't be read may have had tokens in it: the requests of this connection must go on at another
        worker. Says good-bye, so that this one drops them."""
        try:
            message: ToFrontend = decode_to_frontend(body)
        except ProtocolError as error:
            with suppress(Unreachable):
                self._socket.try_send((BYE,))
            self._set_gone(f"its message cannot be read: {error}")
            raise PeerGone(self._address) from error
        return message

    def _on_broken(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._events.recv_multipart(zmq.DONTWAIT)
                self._set_gone("the connection broke")

    def _set_gone(self, why: str) -> None:
        """What was received before can still be read."""
        if not self._gone:
            self._gone = True
            log.info("worker at %s is gone: %s", self._address, why)
        self._readable.set()

    async def _keep_beating(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_EVERY)
            if time.monotonic() - before > 2 * BEAT_EVERY:
                # this process stalled, and knows nothing of the worker's silence
                self._heard = time.monotonic()
            with suppress(Unreachable):
                self._socket.try_send((HEARTBEAT,))
            if time.monotonic() - self._heard > self._silence and not self._socket.pending:
                self._set_gone(f"silent for {self._silence:g} s")
