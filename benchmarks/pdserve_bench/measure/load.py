"""Load generators: a closed loop of N clients, and Poisson arrivals."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from pdserve.runtime.tasks import Lifetime
from pdserve_bench.client import Exchange

AFTER_FAILURE = 0.2
"""Seconds that a closed-loop client waits after a failure, so that it does not hammer a server that is down."""

T = TypeVar("T")
E = TypeVar("E", bound=Exchange)


class ClosedLoop(Lifetime, Generic[E]):
    """A closed loop: each client sends its next request when the last one has its response. Leaving the context waits
    for the last responses, so `send` must time out."""

    def __init__(
        self, requests: Iterator[E], send: Callable[[E], Coroutine[None, None, None]], clients: int
    ) -> None:
        """`requests` is endless. `send` sends one and reads its response; it does not raise."""
        self.done: list[E] = []
        self.running: set[E] = set()
        self._requests = requests
        self._send = send
        self._count = clients
        self._clients: list[asyncio.Task[None]] = []
        self._go = asyncio.Event()
        self._go.set()
        self._stopping = False
        self._news = asyncio.Condition()

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        self.join(self._count)
        try:
            yield
        except BaseException:
            for client in self._clients:
                client.cancel()
            raise
        finally:
            self._stopping = True
            self._go.set()
            await asyncio.gather(*self._clients, return_exceptions=True)

    def join(self, clients: int) -> None:
        self._clients += [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        while not self._stopping:
            await self._go.wait()
            exchange = next(self._requests)
            self.running.add(exchange)
            try:
                await self._send(exchange)
            finally:
                self.running.discard(exchange)
            self.done.append(exchange)
            async with self._news:
                self._news.notify_all()
            if exchange.error:
                await asyncio.sleep(AFTER_FAILURE)

    async def until(self, condition: Callable[[E], bool], count: int = 1) -> None:
        """Wait until `count` matching requests have ended, earlier ones included."""
        async with self._news:
            await self._news.wait_for(lambda: sum(map(condition, self.done)) >= count)

    def pause(self) -> None:
        """Send no new requests; requests in flight continue."""
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    async def idle(self) -> None:
        """Wait until no request is in flight. Call `pause` first."""
        async with self._news:
            await self._news.wait_for(lambda: not self.running)


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the arrival times, in seconds from the start, of a Poisson process of `rate` requests per second."""
    dice, due = random.Random(seed), 0.0
    while (due := due + dice.expovariate(rate)) < seconds:
        yield due


async def side_by_side(items: Iterable[T], work: Callable[[T], Awaitable[object]], clients: int) -> None:
    rest = iter(items)

    async def client() -> None:
        for item in rest:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
