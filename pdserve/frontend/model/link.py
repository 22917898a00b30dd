"""One connection to one decode worker, for as long as it holds."""

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import PeerGone, ProtocolError
from pdserve.messages import Failed, Hello, Submit, ToDecode, ToFrontend
from pdserve.stream.base import StreamClient

if TYPE_CHECKING:
    from pdserve.frontend.model.generation import Generation

logger = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """Told what happens on a link; neither call may raise."""

    def arrived(self, link: "Link", message: ToFrontend) -> None: ...

    def link_up(self, link: "Link") -> None: ...

    def link_lost(self, link: "Link", reason: str) -> None:
        """Whatever is still in `link.generations` will not be answered any more."""


class Link:
    def __init__(self, instance: str, client: StreamClient, owner: LinkOwner, vllm_version: str) -> None:
        self.instance = instance
        self.generations: dict[str, Generation] = {}
        """by wire id: what this worker is at for us"""
        self.tokens = 0.0
        """of KV that these will need"""
        self.refused = False
        """the worker takes nothing from us"""
        self._client = client
        self._owner = owner
        self._outbox: asyncio.Queue[ToDecode] = asyncio.Queue()
        self._outbox.put_nowait(Hello(vllm_version))

    @property
    def requests(self) -> int:
        return len(self.generations)

    @property
    def starting(self) -> bool:
        """One of them has no token yet."""
        return any(not one.tokens for one in self.generations.values())

    def post(self, message: ToDecode) -> None:
        """Send, in order; never waits and never fails: a lost link is told by `link_lost`. What is posted is
        bounded by what is in flight, and that by the workers' room."""
        self._outbox.put_nowait(message)

    async def run(self) -> None:
        """Until the worker is gone; then raises PeerGone. `link_lost` is called however it ends."""
        reason = f"the connection to {self.instance} was closed"
        try:
            async with self._client:
                writer = asyncio.create_task(self._write(), name=f"to {self.instance}")
                try:
                    self._owner.link_up(self)
                    await self._read(writer)
                finally:
                    writer.cancel()
                    with suppress(asyncio.CancelledError, PeerGone):
                        await writer
        except PeerGone:
            reason = f"{self.instance} is gone"
            raise
        finally:
            self._owner.link_lost(self, reason)

    async def _read(self, writer: asyncio.Task[None]) -> None:
        reader = asyncio.create_task(self._receive(), name=f"from {self.instance}")
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError, PeerGone):
                await reader

    async def _receive(self) -> None:
        async for message in self._client.received():
            self._owner.arrived(self, message)
        raise PeerGone(self.instance)

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._client.send(message)
            except ProtocolError as error:
                if isinstance(message, Submit):
                    self._owner.arrived(self, Failed(message.request_id, str(error)))


class Router(Protocol):
    def pick(self, avoid: Collection[str], only_others: bool) -> Link | None:
        """A worker for one request; None while there is none. Those in `avoid` are the last resort, or none
        with `only_others`."""
