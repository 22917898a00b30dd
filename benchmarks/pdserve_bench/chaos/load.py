"""Steady load: so many clients, each of which asks again as soon as it has its answer."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Self

import httpx

from pdserve_bench.chaos.cases import Case
from pdserve_bench.chaos.client import Client, Exchange
from pdserve_bench.chaos.verdict import Result, Seen, judge, longest_pause, trace

AFTER_FAILURE = 0.2
"""seconds that a client waits after an answer that was none: nobody hammers a server that is down"""
DYING = 2.0
"""seconds after the kill of a frontend in which its port may still take connections"""


class Load:
    """Runs while it is entered; leaving it waits for the last answers, which the clients' patience bounds."""

    def __init__(
        self,
        url: str,
        model: str,
        cases: Iterator[Case],
        concurrency: int,
        patience: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.done: list[Exchange] = []
        self.also_right: dict[tuple[int, ...], tuple[int, ...]] = {}
        """a second right answer by prompt, of prompts that have two: all of it, never a mixture of both"""
        self.urls = [url]
        """of frontends, which are asked in turn"""
        self._model = model
        self._cases = cases
        self._concurrency = concurrency
        self._patience = patience
        self._headers = headers
        self._serial = count()
        self._asking = asyncio.Event()
        self._asking.set()
        self._running: set[Exchange] = set()
        self._stopping = False
        self._news = asyncio.Condition()
        self._killed_at = 0.0
        self._spared: set[int] = set()

    async def __aenter__(self) -> Self:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self._clients = [asyncio.create_task(self._ask()) for _ in range(self._concurrency)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._asking.set()
        if kind is not None:
            for task in self._clients:
                task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self._http.aclose()

    async def _ask(self) -> None:
        while not self._stopping:
            await self._asking.wait()
            exchange = Exchange(next(self._cases))
            url = self.urls[next(self._serial) % len(self.urls)]
            client = Client(url, self._model, self._http, self._headers)
            self._running.add(exchange)
            try:
                await client.ask(exchange, self._patience)
            finally:
                self._running.discard(exchange)
            self.done.append(exchange)
            async with self._news:
                self._news.notify_all()
            if exchange.error:
                await asyncio.sleep(AFTER_FAILURE)

    async def until(self, condition: Callable[[Exchange], bool], count: int = 1) -> None:
        """Until so many requests that fit have ended."""
        async with self._news:
            await self._news.wait_for(lambda: sum(map(condition, self.done)) >= count)

    def pause(self) -> None:
        """Begin no new requests; those in flight go on."""
        self._asking.clear()

    def resume(self) -> None:
        self._asking.set()

    async def idle(self) -> None:
        """Until nothing is in flight any more, while it is paused."""
        async with self._news:
            await self._news.wait_for(lambda: not self._running)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def frontend_dies(self, spared: set[int]) -> None:
        """From now on a broken connection is nobody's fault, but for those on these ports: they are the
        living frontends'."""
        self._killed_at, self._spared = time.monotonic(), spared

    def seen(self, fault: str, began: float) -> list[Seen]:
        """What came of all requests that have ended; `began` is when the fault did."""
        return [self._seen(one, fault, began) for one in self.done]

    def _seen(self, one: Exchange, fault: str, began: float) -> Seen:
        other = self.also_right.get(one.case.prompt, ())[: one.case.max_tokens]
        if other and tuple(one.tokens) == other[: len(one.tokens)]:
            one.case = replace(one.case, expected=other)
        pause = longest_pause(one.started, one.arrivals, one.ended) if one.case.stream else None
        result = judge(one.tokens, one.case.expected, one.error, one.hung)
        if result is Result.OK:
            return Seen(result, pause, None, one.request_id)
        if result is Result.FAILED and self._was_on_killed(one):
            return Seen(Result.APART, pause, None, one.request_id)
        return Seen(result, pause, trace(one, result, fault, began), one.request_id)

    def _was_on_killed(self, one: Exchange) -> bool:
        there = one.started <= self._killed_at + DYING and one.ended >= self._killed_at
        return bool(self._killed_at) and one.reset and there and one.port not in self._spared
