"""Requests that end in every possible way: finish, cancel, time out, fail."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum

from pdserve_bench.client import Exchange, HttpConnection
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.measure.load import side_by_side

CONCURRENCY = 16
TIMEOUT = 120.0
MIN_OUTPUT, MAX_OUTPUT = 4, 48
FIRST_TOKEN, LAST_TOKEN = 300, 999


class Ending(StrEnum):
    """What the client does; `MixedLoad` has a method for each."""

    WHOLE = "reads to the end"
    EARLY = "leaves before the first token"
    MIDWAY = "leaves mid-stream"
    UNREAD = "never reads, and leaves"
    BAD = "sends what is refused"
    LATE = "runs into its deadline"


WEIGHTS = (3, 3, 3, 2, 2, 3)


class Unexpected(Exception):
    """A response that the request must not get."""


class MixedLoad:
    """Sends requests, `CONCURRENCY` at a time. The seed determines how they end."""

    def __init__(self, pick: Callable[[], Endpoint], lengths: tuple[int, int], seed: int) -> None:
        """`pick` chooses the frontend of each request."""
        self.done: Counter[str] = Counter()
        """Requests by ending and status."""
        self.surprises: list[str] = []
        self._pick = pick
        self._lengths = lengths
        self._dice = random.Random(seed)

    async def run(self, count: int) -> None:
        endings = self._dice.choices(list(Ending), WEIGHTS, k=count)
        await side_by_side(endings, self._request, CONCURRENCY)

    async def _request(self, ending: Ending) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                status = await getattr(self, f"_{ending.name.lower()}")()
        except TimeoutError:
            self.surprises.append(f"{ending}: no end within {TIMEOUT:g} s")
        except (Unexpected, OSError, EOFError) as error:
            self.surprises.append(f"{ending}: {error!r}")
        else:
            self.done[f"{ending}{f': {status}' if status else ''}"] += 1

    # what clients do; each method returns the response's status, 0 if it does not wait for one

    async def _whole(self) -> int:
        exchange = Exchange({**self._body(stream=self._dice.random() < 0.7), "return_token_ids": True})
        await self._pick().ask(exchange, TIMEOUT)
        if exchange.error:
            raise Unexpected(exchange.error)
        return exchange.status

    async def _early(self) -> int:
        """Disconnect in any phase: tokenizing, queued, prefilling, transfer."""
        connection = await self._open(self._body(stream=True))
        await asyncio.sleep(self._dice.choice((0.0, 0.005, 0.02, 0.05, 0.1)) * self._dice.random())
        connection.abort()
        return 0

    async def _midway(self) -> int:
        connection = await self._open(self._body(stream=True, max_tokens=200))
        try:
            if (status := await connection.status()) not in (200, 429, 503):
                raise Unexpected(status, await connection.rest())
            wanted = iter(range(self._dice.randint(0, 11)))
            await connection.lines(lambda _: next(wanted, None) is None)
        finally:
            connection.abort()
        return status

    async def _unread(self) -> int:
        connection = await self._open(self._body(stream=True, max_tokens=200))
        await asyncio.sleep(self._dice.random())
        connection.abort()
        return 0

    async def _bad(self) -> int:
        fields = self._dice.choice(
            (
                {"model": "nobody"},
                {"prompt": [FIRST_TOKEN] * 100_000},
                {"max_tokens": -1},
                {"temperature": "warm"},
                {"kv_transfer_params": {"do_remote_prefill": True}},
                {"n": 0},
            )
        )
        status, answer = await self._ask({**self._body(stream=True), **fields})
        if not 400 <= status < 500:
            raise Unexpected(fields.keys(), status, answer[-300:])
        return status

    async def _late(self) -> int:
        """Set a short deadline: the request is refused, or ends before the first token or mid-stream."""
        seconds = self._dice.choice((0.001, 0.02, 0.1, 0.4)) * (0.5 + self._dice.random())
        body = self._body(stream=self._dice.random() < 0.5, max_tokens=1000)
        status, answer = await self._ask(body, {"x-request-timeout": f"{seconds:.4f}"})
        if status not in (200, 429, 503, 504) or (status == 200 and b"error" not in answer):
            raise Unexpected(status, answer[-300:])
        return status

    # HTTP

    def _body(self, stream: bool, max_tokens: int = 0) -> dict[str, object]:
        dice = self._dice
        return {
            "model": self._pick().model,
            "prompt": [dice.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(dice.randint(*self._lengths))],
            "max_tokens": max_tokens or dice.randint(MIN_OUTPUT, MAX_OUTPUT),
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }

    async def _ask(
        self, body: dict[str, object], headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = await self._open(body, headers)
        try:
            return await connection.status(), await connection.rest(despite_reset=True)
        finally:
            connection.abort()

    async def _open(
        self, body: dict[str, object], headers: Mapping[str, str] | None = None
    ) -> HttpConnection:
        endpoint = self._pick()
        return await HttpConnection.open(endpoint.url, body, headers={**endpoint.headers, **(headers or {})})
