"""The HTTP client of every benchmark: requests to an OpenAI-compatible server, and all that is seen of their answers.

Each request has a connection of its own, so that frontends that share a port share the requests. Made of asyncio and
httptools alone: a load generator shares the machine with the graph that it measures, so its own work has to be little,
and faults are about connections: which port, an abrupt end, an answer that is never read.
"""

import asyncio
import json
import os
import re
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Any, Self
from urllib.parse import urlsplit

import httptools
import msgspec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class BadAnswer(Exception):
    """The answer is an error, or no answer as the API defines it; the text says which."""


class Outcome(StrEnum):
    """Every request that was begun has one of these."""

    FINISHED = "finished"
    FAILED = "failed"
    """an error status, an error in the stream, a broken connection, or no end in time"""
    UNFINISHED = "unfinished"
    """still running when it was last looked at"""


@dataclass(eq=False)
class Exchange:
    """A request and what has come of it so far. Times are monotonic, in seconds."""

    body: Mapping[str, object] = field(default_factory=dict)
    request_id: str = field(default_factory=lambda: f"bench-{uuid.uuid4().hex[:12]}")
    """sent along, so that the logs can be searched for it even where no answer ever came"""
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    """0 while it runs"""
    port: int = 0
    """the client's end of its connection, 0 while there is none"""
    status: int = 0
    """of HTTP, 0 while there is none"""
    prefill: str = ""
    """`local` or `remote`, as the response header says"""
    instance: str = ""
    """the decode worker, as the response header says"""
    tokens: list[int] = field(default_factory=list)
    """where the body asked for `return_token_ids`"""
    arrivals: list[float] = field(default_factory=list)
    """when each token came, where the answer is streamed; without token ids, when each event with text did"""
    text: str = ""
    """of the answer"""
    reasoning: str = ""
    """what the model thought before it, where the server tells that apart"""
    prompt_tokens: int = 0
    """as the answer's usage says: `stream_options: {"include_usage": true}`"""
    completion_tokens: int = 0
    """as the answer's usage says"""
    cached_tokens: int | None = None
    """of the prompt, found in a prefix cache; None where the usage does not say it"""
    error: str = ""
    reset: bool = False
    """the connection was refused, or ended before the answer did"""
    hung: bool = False
    """given up after the client's timeout"""

    @property
    def outcome(self) -> Outcome:
        if not self.ended:
            return Outcome.UNFINISHED
        return Outcome.FAILED if self.error else Outcome.FINISHED

    @property
    def ttft(self) -> float | None:
        """Time to first token; None where none came."""
        return self.arrivals[0] - self.started if self.arrivals else None

    @property
    def output_tokens(self) -> int:
        """By the usage, else by the token ids, else by the events with text."""
        return self.completion_tokens or len(self.tokens) or len(self.arrivals)

    @property
    def answer(self) -> str:
        """What the next message of a chat follows; the reasoning where there was no room for more."""
        return self.text or self.reasoning

    @property
    def tokens_per_second(self) -> float | None:
        """While it was generated, from the first token on; None where it came in one piece."""
        took = self.ended - self.arrivals[0] if self.ended and len(self.arrivals) > 1 else 0.0
        return self.output_tokens / took if took > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens. Those of one event have come together."""
        return [after - before for before, after in pairwise(self.arrivals)]


class LoadClient:
    """Sends exchanges to the server at `url`, a base URL without `/v1`."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, source: str = "") -> None:
        """`source` is the address of this machine that the requests come from."""
        self._url = url
        self._headers = dict(headers or {})
        self._source = source

    async def ask(self, exchange: Exchange, timeout: float, path: str = COMPLETIONS) -> None:
        """Never fails: what goes wrong is told by the exchange. Cancelled, it stays unfinished."""
        exchange.started = time.monotonic()
        bound = asyncio.timeout(timeout)
        try:
            async with bound:
                await self._ask(exchange, path)
        except BadAnswer as error:
            exchange.error = str(error)
        except (OSError, EOFError) as error:
            if bound.expired():
                exchange.hung, exchange.error = True, f"no end within {timeout:g} s"
            else:
                exchange.reset, exchange.error = True, f"connection: {str(error) or type(error).__name__}"
        except _UNREADABLE as error:
            exchange.error = f"an answer that cannot be read: {error!r}"
        exchange.ended = time.monotonic()

    async def _ask(self, exchange: Exchange, path: str) -> None:
        headers = {**self._headers, "x-request-id": exchange.request_id}
        connection = await HttpConnection.open(
            self._url, exchange.body, path=path, headers=headers, source=self._source
        )
        exchange.port = connection.port
        try:
            exchange.status = await connection.status()
            exchange.prefill = connection.headers.get("x-pdserve-prefill", "")
            exchange.instance = connection.headers.get("x-pdserve-instance", "")
            if exchange.status != 200:
                moved = connection.headers.get("location", "")
                told = f" to {moved}" if moved else f" {error_message(await connection.rest())}"
                raise BadAnswer(f"HTTP {exchange.status}{told}")
            asked = bool(exchange.body.get("stream"))
            if asked and not connection.headers.get("content-type", "").startswith("application/json"):
                await _read_stream(exchange, connection)
            else:  # some servers know no streams
                _read_whole(exchange, await connection.rest(), asked)
        finally:
            connection.abort()


_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    httptools.HttpParserError,
    httptools.HttpParserUpgrade,
)


def _read_whole(exchange: Exchange, answer: bytes, timed: bool) -> None:
    """All of it has come now."""
    found = msgspec.json.decode(answer)
    if found.get("error"):
        raise BadAnswer(error_message(answer))
    for choice in found["choices"]:
        _read_choice(exchange, choice, choice.get("message") or {}, time.monotonic() if timed else None)
    _read_usage(exchange, found)


async def _read_stream(exchange: Exchange, connection: "HttpConnection") -> None:
    """Server-sent events; what is no data is of no matter (comments keep connections open). The end is `[DONE]`, or a
    last choice with a reason to finish where the server sends none."""
    finished = False
    async for line in connection.lines():
        kind, _, data = line.partition(b":")
        data = data.strip()
        if kind != b"data" or not data:
            continue
        if data == b"[DONE]":
            return
        event = msgspec.json.decode(data)
        if event.get("error") or event.get("object") == "error":
            raise BadAnswer(f"in the stream: {error_message(data)}")
        _read_usage(exchange, event)
        for choice in event.get("choices") or ():
            _read_choice(exchange, choice, choice.get("delta") or {}, time.monotonic())
            finished = finished or bool(choice.get("finish_reason"))
    if not finished:
        raise BadAnswer("the stream ended without [DONE]")


def _read_choice(
    exchange: Exchange, choice: Mapping[str, Any], message: Mapping[str, Any], now: float | None
) -> None:
    """`message` is a chat's, or its delta. Where a first event names the role alone, no token has come yet. Reasoning
    counts as tokens too: it is generated, and waited for."""
    tokens = choice.get("token_ids") or ()
    text = choice.get("text") or message.get("content") or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    exchange.text += text
    exchange.reasoning += reasoning
    exchange.tokens += tokens
    if now is not None:
        exchange.arrivals += [now] * (len(tokens) or bool(text or reasoning))


def _read_usage(exchange: Exchange, answer: Mapping[str, Any]) -> None:
    """Where a server sends it with each event, the last one counts."""
    if usage := answer.get("usage"):
        exchange.prompt_tokens = usage.get("prompt_tokens") or 0
        exchange.completion_tokens = usage.get("completion_tokens") or 0
        exchange.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def error_message(answer: bytes) -> str:
    """The message in an error object, wherever servers put it; of a page its text; else the answer itself. Shortened,
    in one line."""
    text = answer.decode(errors="replace")
    with suppress(ValueError):
        found = msgspec.json.decode(answer)
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(name):
                found = found[name]
        text = found if isinstance(found, str) else text
    if text.lstrip()[:1] == "<":
        text = _MARKUP.sub(" ", text)
    return " ".join(text.split())[:300]


_MARKUP = re.compile(r"<(script|style|head)\b.*?</\1>|<[^>]*>", re.I | re.S)
"""what a reader of a page does not see"""


class HttpConnection:
    """One POST on a connection of its own, and its answer as far as it was read. Reading raises EOFError and OSError
    where the connection ends before the answer does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.headers: dict[str, str] = {}
        """of the answer, in lower case"""
        self.port: int = writer.get_extra_info("sockname")[1]
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._begun = self._over = False

    @classmethod
    async def open(
        cls,
        url: str,
        body: Mapping[str, object] | bytes,
        *,
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
        source: str = "",
    ) -> Self:
        """Connect and send. Raises OSError."""
        target = urlsplit(url)
        secure = target.scheme == "https"
        reader, writer = await asyncio.open_connection(
            target.hostname,
            target.port or (443 if secure else 80),
            ssl=_trusted(os.environ.get("SSL_CERT_FILE")) if secure else None,
            local_addr=(source, 0) if source else None,
        )
        writer.write(post(url, body, path, headers))
        return cls(reader, writer)

    async def status(self) -> int:
        while not self._begun:
            await self._fill()
        return int(self._parser.get_status_code())

    async def lines(self) -> AsyncIterator[bytes]:
        """Without their ends, and without empty ones; a last one without an end counts where the answer is complete."""
        start = 0
        while True:
            while (end := self._body.find(b"\n", start)) >= 0:
                line, start = bytes(self._body[start:end]).rstrip(), end + 1
                if line:
                    yield line
            del self._body[:start]
            start = 0
            if self._over:
                if self._body.strip():
                    yield bytes(self._body).strip()
                return
            await self._fill()

    async def rest(self, despite_reset: bool = False) -> bytes:
        """`despite_reset`: as much as came, where the server refused to read the whole request."""
        with suppress(*([ConnectionResetError] if despite_reset else [])):
            while not self._over:
                await self._fill()
        return bytes(self._body)

    def abort(self) -> None:
        """At once, whatever is still on its way."""
        self._writer.transport.abort()

    async def _fill(self) -> None:
        data = await self._reader.read(1 << 16)
        if data:
            self._parser.feed_data(data)
        elif self._begun and not {"content-length", "transfer-encoding"} & self.headers.keys():
            self._over = True  # such an answer ends with its connection
        else:
            raise EOFError("it ended before the answer did")

    # httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._over = True


@cache
def _trusted(file: str | None) -> ssl.SSLContext:
    """Of the certificates in the file, else of the system's; they take some milliseconds to load."""
    return ssl.create_default_context(cafile=file)


def post(
    url: str,
    body: Mapping[str, object] | bytes,
    path: str = COMPLETIONS,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The request as it goes over the wire."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {
        "host": urlsplit(url).netloc,
        "user-agent": "pdserve-bench",
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(raw)),
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {urlsplit(url).path.rstrip('/')}{path} HTTP/1.1\r\n{head}\r\n".encode() + raw
