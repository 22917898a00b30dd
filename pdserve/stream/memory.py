"""The stream seam in memory, within one process; tests can cut its connections."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from pdserve.errors import PeerGone
from pdserve.messages import ToDecode, ToFrontend, encode, encode_to_decode
from pdserve.stream.base import StreamClient, StreamServer
from pdserve.stream.framing import bounded

_listening: "WeakValueDictionary[str, MemoryStreamServer]" = WeakValueDictionary()
_numbers = itertools.count(1)


class MemoryStreamServer(StreamServer):
    def __init__(self) -> None:
        self._inbox: asyncio.Queue[tuple[str, ToDecode | None]] = asyncio.Queue()
        self._clients: dict[str, MemoryStreamClient] = {}

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        self.address = f"memory://{next(_numbers)}"
        _listening[self.address] = self
        try:
            yield
        finally:
            del _listening[self.address]
            for frontend in list(self._clients):
                self.cut(frontend)

    def cut(self, frontend: str) -> None:
        """Break the connection of this frontend; both sides learn of it."""
        if client := self._clients.pop(frontend, None):
            self._inbox.put_nowait((frontend, None))
            client.inbox.put_nowait(None)

    def accept(self, frontend: str, client: "MemoryStreamClient") -> None:
        self.cut(frontend)
        self._clients[frontend] = client

    def has(self, client: "MemoryStreamClient") -> bool:
        return client in self._clients.values()

    def take(self, frontend: str, message: ToDecode) -> None:
        self._inbox.put_nowait((frontend, message))

    async def received(self) -> AsyncIterator[tuple[str, ToDecode | None]]:
        while True:
            yield await self._inbox.get()

    async def send(self, frontend: str, message: ToFrontend) -> None:
        if frontend not in self._clients:
            raise PeerGone(frontend)
        bounded(message, encode(message))
        self._clients[frontend].inbox.put_nowait(message)


class MemoryStreamClient(StreamClient):
    def __init__(self, address: str, name: str) -> None:
        self._address = address
        self._name = name
        self._server: MemoryStreamServer | None = None
        self.inbox: asyncio.Queue[ToFrontend | None] = asyncio.Queue()

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        server = self._server = _listening.get(self._address)
        if server is None:
            raise PeerGone(self._address)
        server.accept(self._name, self)
        try:
            yield
        finally:
            if server.has(self):
                server.cut(self._name)

    async def send(self, message: ToDecode) -> None:
        if self._server is None or not self._server.has(self):
            raise PeerGone(self._address)
        bounded(message, encode_to_decode(message))
        self._server.take(self._name, message)

    @property
    def round_trip(self) -> float:
        return 0.0

    async def received(self) -> AsyncIterator[ToFrontend]:
        while (message := await self.inbox.get()) is not None:
            yield message
        raise PeerGone(self._address)
