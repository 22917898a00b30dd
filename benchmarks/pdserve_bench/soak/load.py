"""Requests that end in every way in which a request can end."""

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from enum import StrEnum
from urllib.parse import urlsplit

CONCURRENCY = 16
PATIENCE = 120.0
MIN_OUTPUT, MAX_OUTPUT = 4, 48
FIRST_TOKEN, LAST_TOKEN = 300, 999


class Kind(StrEnum):
    """Its value says what the client does."""

    WHOLE = "reads to the end"
    EARLY = "leaves before the first token"
    MIDWAY = "leaves mid-stream"
    UNREAD = "never reads, and leaves"
    BAD = "sends what is refused"
    LATE = "runs into its deadline"


WEIGHTS = {Kind.WHOLE: 3, Kind.EARLY: 3, Kind.MIDWAY: 3, Kind.UNREAD: 2, Kind.BAD: 2, Kind.LATE: 3}


class Unexpected(Exception):
    """An answer that this kind of request must not get."""


class Load:
    """`run` sends so many requests, `CONCURRENCY` at a time. One seed, one row of requests."""

    def __init__(self, url: str, model: str, lengths: tuple[int, int], seed: int) -> None:
        address = urlsplit(url)
        self.done: Counter[str] = Counter()
        """by what became of them: the kind, and the status where there was one"""
        self.surprises: list[str] = []
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._model = model
        self._lengths = lengths
        self._dice = random.Random(seed)

    async def run(self, count: int) -> None:
        kinds = iter(self._dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count))

        async def client() -> None:
            for kind in kinds:
                await self._request(kind)

        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))

    async def _request(self, kind: Kind) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                status = await self._act(kind)
        except TimeoutError:
            self.surprises.append(f"{kind}: no end within {PATIENCE:g} s")
        except (Unexpected, OSError, asyncio.IncompleteReadError) as error:
            self.surprises.append(f"{kind}: {error!r}")
        else:
            self.done[f"{kind}{f': {status}' if status else ''}"] += 1

    # what clients do; each returns the answer's status, 0 where the client does not wait for one

    async def _act(self, kind: Kind) -> int:
        match kind:
            case Kind.WHOLE:
                return await self._whole()
            case Kind.EARLY:
                return await self._early()
            case Kind.MIDWAY:
                return await self._midway()
            case Kind.UNREAD:
                return await self._unread()
            case Kind.BAD:
                return await self._bad()
            case Kind.LATE:
                return await self._late()

    async def _whole(self) -> int:
        stream = self._dice.random() < 0.7
        status, answer = await self._ask(self._body(stream=stream))
        if status != 200 or (stream and b"data: [DONE]" not in answer):
            raise Unexpected(status, answer[-300:])
        return status

    async def _early(self) -> int:
        """In whatever phase it is then: tokenizing, queued, being prefilled, on its way."""
        connection = await Connection.open(self._host, self._port, self._body(stream=True))
        await asyncio.sleep(self._dice.choice((0.0, 0.005, 0.02, 0.05, 0.1)) * self._dice.random())
        connection.leave()
        return 0

    async def _midway(self) -> int:
        connection = await Connection.open(self._host, self._port, self._body(stream=True, max_tokens=200))
        try:
            status = await connection.status()
            for _ in range(self._dice.randint(1, 12)):
                await connection.line()
        finally:
            connection.leave()
        return status

    async def _unread(self) -> int:
        connection = await Connection.open(self._host, self._port, self._body(stream=True, max_tokens=200))
        await asyncio.sleep(self._dice.random())
        connection.leave()
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
        """The deadline may pass at once, before the first token, or with the stream in full swing; where it is too
        near, the request is refused."""
        seconds = self._dice.choice((0.001, 0.02, 0.1, 0.4)) * (0.5 + self._dice.random())
        body = self._body(stream=self._dice.random() < 0.5, max_tokens=1000)
        status, answer = await self._ask(body, f"x-request-timeout: {seconds:.4f}\r\n")
        if status not in (200, 429, 503, 504) or (status == 200 and b"error" not in answer):
            raise Unexpected(status, answer[-300:])
        return status

    # HTTP

    def _body(self, stream: bool, max_tokens: int = 0) -> dict[str, object]:
        dice = self._dice
        return {
            "model": self._model,
            "prompt": [dice.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(dice.randint(*self._lengths))],
            "max_tokens": max_tokens or dice.randint(MIN_OUTPUT, MAX_OUTPUT),
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }

    async def _ask(self, body: dict[str, object], headers: str = "") -> tuple[int, bytes]:
        connection = await Connection.open(self._host, self._port, body, headers)
        try:
            return await connection.status(), await connection.rest()
        finally:
            connection.leave()


class Connection:
    """One request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        body: dict[str, object] | bytes,
        headers: str = "",
        path: str = "/v1/completions",
    ) -> "Connection":
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n{headers}\r\n"
        )
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + raw)
        return cls(reader, writer)

    async def status(self) -> int:
        return int((await self._reader.readuntil(b"\r\n"))[9:12])

    async def line(self) -> bytes:
        return await self._reader.readline()

    async def rest(self) -> bytes:
        with suppress(ConnectionResetError):  # a body that is refused unread
            return await self._reader.read()
        return b""

    def leave(self) -> None:
        """At once, whatever is still on its way."""
        self._writer.transport.abort()
