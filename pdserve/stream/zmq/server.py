"""The decode worker's end: one ROUTER for all frontends."""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import zmq

from pdserve.errors import PeerGone, ProtocolError
from pdserve.messages import ToDecode, ToFrontend, decode_to_decode, encode
from pdserve.stream.base import StreamServer
from pdserve.stream.zmq.socket import BEAT_EVERY, BYE, HEARTBEAT, HELLO, AsyncSocket, Unreachable
from pdserve.tasks import Owner

log = logging.getLogger(__name__)

SILENCE = 8.0
"""seconds without a heartbeat after which a frontend is gone; longer than the client's, because a frontend
that only stalls (it loads a tokenizer) would lose all its requests. One that dies is noticed within a
second, by its socket."""
_BATCH = 64
_INBOX_BOUND = 10_000


@dataclass
class _Peer:
    frontend: str
    identity: bytes
    """one per connection: `<frontend id>#<random>`"""
    heard: float = field(default_factory=time.monotonic)
    told: float = 0.0


class ZmqStreamServer(StreamServer):
    def __init__(self, host: str, silence: float = SILENCE) -> None:
        self._host = host
        self._silence = silence
        self._socket: AsyncSocket
        self._by_identity: dict[bytes, _Peer] = {}
        self._by_frontend: dict[str, _Peer] = {}
        self._inbox: deque[tuple[str, ToDecode | None]] = deque()
        self._filled = asyncio.Event()
        self._tasks = Owner()

    async def __aenter__(self) -> Self:
        self._socket = AsyncSocket(zmq.ROUTER, self._drain)
        self._socket.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = self._socket.raw.bind_to_random_port(f"tcp://{_bracketed(await _resolved(self._host))}")
        self.address = f"tcp://{_bracketed(self._host)}:{port}"
        self._socket.open()
        self._tasks.forever(self._keep_beating, "stream heartbeats")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()
        for peer in self._by_identity.values():
            with suppress(Unreachable):
                self._socket.try_send((peer.identity, BYE))
        self._socket.close()

    async def received(self) -> AsyncIterator[tuple[str, ToDecode | None]]:
        while True:
            while self._inbox:
                full = len(self._inbox) >= _INBOX_BOUND
                yield self._inbox.popleft()
                if full:
                    self._socket.notify_soon()
            self._filled.clear()
            await self._filled.wait()

    def _drain(self) -> None:
        """Read what has come, whether or not somebody waits for it: greetings are answered at once. Beyond a
        bound it stays with ZeroMQ, which then slows the senders down."""
        for _ in range(_BATCH):
            if len(self._inbox) >= _INBOX_BOUND or (parts := self._socket.receive()) is None:
                return
            try:
                self._take(parts)
            except Exception:  # the rest must be read all the same: it is not announced again
                log.exception("a message of %d parts could not be taken", len(parts))
        self._socket.notify_soon()

    def _take(self, parts: list[bytes]) -> None:
        identity, body = parts[0], parts[-1]
        peer = self._by_identity.get(identity)
        if body == HELLO:
            self._welcome(identity)
        elif peer is None:
            # it was given up, or this process is younger than the connection: tell it
            with suppress(Unreachable):
                self._socket.try_send((identity, BYE))
        elif body == BYE:
            self._part_with(peer, "left")
        else:
            peer.heard = time.monotonic()
            if body != HEARTBEAT and (message := _decode(peer.frontend, body)) is not None:
                self._put(peer.frontend, message)

    def _welcome(self, identity: bytes) -> None:
        frontend = identity.rpartition(b"#")[0].decode(errors="replace")
        if earlier := self._by_frontend.get(frontend):
            self._part_with(earlier, "connects anew")
        peer = _Peer(frontend, identity)
        self._by_identity[identity] = self._by_frontend[frontend] = peer
        self._tell(peer, HEARTBEAT)
        log.info("frontend %s connected", frontend)

    def _part_with(self, peer: _Peer, why: str) -> None:
        """May be called again for the same peer: a failed send and its silence are noticed apart."""
        if self._by_identity.pop(peer.identity, None) is None:
            return
        log.info("frontend %s %s", peer.frontend, why)
        del self._by_frontend[peer.frontend]
        self._put(peer.frontend, None)

    def _put(self, frontend: str, message: ToDecode | None) -> None:
        self._inbox.append((frontend, message))
        self._filled.set()

    async def send(self, frontend: str, message: ToFrontend) -> None:
        peer = self._by_frontend.get(frontend)
        if peer is None:
            raise PeerGone(frontend)
        try:
            await self._socket.send((peer.identity, encode(message)))
        except Unreachable as error:
            self._part_with(peer, f"is gone: {error}")
            raise PeerGone(frontend) from error
        peer.told = time.monotonic()

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_EVERY)
            now = time.monotonic()
            for peer in list(self._by_identity.values()):
                if now - peer.told >= BEAT_EVERY / 2:
                    self._tell(peer, HEARTBEAT)
                # what is still unread may be a heartbeat: nobody is gone because this process is slow
                if now - peer.heard > self._silence and not self._socket.pending:
                    self._part_with(peer, f"is gone: silent for {self._silence:g} s")

    def _tell(self, peer: _Peer, control: bytes) -> None:
        try:
            if self._socket.try_send((peer.identity, control)):
                peer.told = time.monotonic()
        except Unreachable as error:
            self._part_with(peer, f"is gone: {error}")


async def _resolved(host: str) -> str:
    """ZeroMQ binds to numbers only."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _decode(frontend: str, body: bytes) -> ToDecode | None:
    try:
        message: ToDecode = decode_to_decode(body)
        return message
    except ProtocolError as error:
        log.warning("message of frontend %s skipped: %s", frontend, error)
        return None
