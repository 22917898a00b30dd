"""The HTTP client of every benchmark: sends requests to an OpenAI-compatible server and records the responses.

Each request opens its own connection, so that frontends that share a port share the requests. The client uses only
asyncio and httptools, because it must leave the CPU to the measured graph, and chaos needs control over connections.
"""

import asyncio
import json
import os
import re
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
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
_CONNECT_WITHIN = 10.0


class BadAnswer(Exception):
    """The response is an error or does not follow the API; the text says which."""


class Outcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    """An error status, an error in the stream, a broken connection, or a timeout."""
    UNFINISHED = "unfinished"
    """Still running when the exchange was read."""


@dataclass(eq=False)
class Exchange:
    """A request and what was received of its response so far. Times are monotonic seconds."""

    body: Mapping[str, object] = field(default_factory=dict)
    request_id: str = field(default_factory=lambda: f"bench-{uuid.uuid4().hex[:12]}")
    """Sent as `x-request-id`, so that logs can be searched for the request."""
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    port: int = 0
    """The client's port of the connection; 0 before it is open."""
    status: int = 0
    """HTTP status; 0 before it is received."""
    prefill: str = ""
    """`local` or `remote`, from the response header."""
    instance: str = ""
    """The decode worker, from the response header."""
    tokens: list[int] = field(default_factory=list)
    """Token ids, if the body asks for `return_token_ids`."""
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each token of a stream; without token ids, of each event with text."""
    text: str = ""
    reasoning: str = ""
    """The reasoning before the text, if the server sends it in a field of its own."""
    prompt_tokens: int = 0
    """From the response's usage. A stream has it only with `stream_options: {"include_usage": true}`."""
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in a prefix cache; None if the usage does not say."""
    finish: str = ""
    """The `finish_reason`: `length`, `stop`, `abort`."""
    error: str = ""
    reset: bool = False
    """The connection was refused, or closed before the response was complete."""
    hung: bool = False

    @property
    def outcome(self) -> Outcome:
        if not self.ended:
            return Outcome.UNFINISHED
        return Outcome.FAILED if self.error else Outcome.FINISHED

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0] - self.started if self.arrivals else None

    @property
    def output_tokens(self) -> int:
        """Counted by the usage, else by token ids, else by events with text."""
        return self.completion_tokens or len(self.tokens) or len(self.arrivals)

    @property
    def cut(self) -> str:
        """Why a response that ended is incomplete; empty if it is complete. With `ignore_eos`, a response of another
        length than asked is incomplete, too."""
        if self.finish not in ("length", "stop"):
            return f"the answer ended with finish_reason {self.finish or None!r}"
        count, asked = self.completion_tokens or len(self.tokens), self.body.get("max_tokens")
        if count and count != asked and self.body.get("ignore_eos"):
            return f"an answer of {count} tokens, not {asked}, with finish_reason {self.finish!r}"
        return ""

    @property
    def answer(self) -> str:
        """The assistant's message for the next round of a chat; the reasoning if the text is empty."""
        return self.text or self.reasoning

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second since the first token; None if unfinished, or before a second token."""
        took = self.ended - self.arrivals[0] if self.ended and len(self.arrivals) > 1 else 0.0
        return self.output_tokens / took if took > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens; 0 between tokens of one event."""
        return [after - before for before, after in pairwise(self.arrivals)]


def completion(model: str, prompt: Sequence[int] | str, tokens: int, **more: object) -> dict[str, object]:
    """Return the body of a greedy streamed request for exactly `tokens` output tokens, with token ids."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **more,
    }


class LoadClient:
    """Sends exchanges to the server at `url`, a base URL without `/v1`."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, source: str = "") -> None:
        """`source` is the local address to send from."""
        self._url = url
        self._headers = dict(headers or {})
        self._source = source

    async def ask(self, exchange: Exchange, timeout: float, path: str = COMPLETIONS) -> None:
        """Send the request and fill in the exchange, without raising. If cancelled, the exchange stays unfinished."""
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
            exchange.error = f"unreadable response: {error!r}"
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
                detail = f" to {moved}" if moved else f" {error_message(await connection.rest())}"
                raise BadAnswer(f"HTTP {exchange.status}{detail}")
            asked = bool(exchange.body.get("stream"))
            if asked and not connection.headers.get("content-type", "").startswith("application/json"):
                await _read_stream(exchange, connection)
            else:  # some servers do not stream
                answer = await connection.rest()
                if not _read(exchange, answer, time.monotonic() if asked else None).choices:
                    raise BadAnswer(f"no choices: {error_message(answer)}")
        finally:
            connection.abort()


_UNREADABLE = (ValueError, httptools.HttpParserError, httptools.HttpParserUpgrade)
"""ValueError comes from msgspec and from invalid host names."""


class _Message(msgspec.Struct):
    """A chat message, or a delta of one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    """The decoded fields of a response or a stream event."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    """If a server sends it with each event, the last one counts."""
    error: Any = None
    object: str | None = None


_decode = msgspec.json.Decoder(_Answer).decode
_NOTHING = _Message()


def _read(exchange: Exchange, raw: bytes, now: float | None) -> _Answer:
    """Decode a response or event into the exchange. Reasoning counts as tokens; an event with only the role has
    none."""
    answer = _decode(raw)
    if answer.error or answer.object == "error":
        raise BadAnswer(error_message(raw))
    for choice in answer.choices or ():
        message = choice.delta or choice.message or _NOTHING
        text = choice.text or message.content or ""
        reasoning = message.reasoning_content or message.reasoning or ""
        tokens = choice.token_ids or ()
        exchange.text += text
        exchange.reasoning += reasoning
        exchange.tokens += tokens
        exchange.finish = choice.finish_reason or exchange.finish
        if now is not None:
            exchange.arrivals += [now] * (len(tokens) or bool(text or reasoning))
    if usage := answer.usage:
        exchange.prompt_tokens = usage.prompt_tokens or 0
        exchange.completion_tokens = usage.completion_tokens or 0
        details = usage.prompt_tokens_details
        exchange.cached_tokens = details.cached_tokens if details else None
    return answer


async def _read_stream(exchange: Exchange, connection: "HttpConnection") -> None:
    """Read server-sent events until `[DONE]`, or the end of the stream after a `finish_reason`. Ignore lines without
    data, such as comments that keep the connection open."""
    finished = False

    def take(line: bytes) -> bool:
        nonlocal finished
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            finished = True
            return True
        if data:
            choices = _read(exchange, data, time.monotonic()).choices or ()
            finished = finished or any(choice.finish_reason for choice in choices)
        return False

    try:
        await connection.lines(take)
    except BadAnswer as error:
        raise BadAnswer(f"in the stream: {error}") from None
    if not finished:
        raise BadAnswer("the stream ended without [DONE]")


def error_message(answer: bytes) -> str:
    """Return the message of an error object, the text of an HTML page, or the body itself, shortened to one line."""
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


class HttpConnection(asyncio.BufferedProtocol):
    """One request on its own connection, and its response. Reads raise EOFError or OSError if the connection closes
    before the response is complete.

    A protocol needs half the CPU time of asyncio's streams, because no task wakes for each event.
    """

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self._parser = httptools.HttpResponseParser(self)
        self._buffer = memoryview(bytearray(1 << 14))
        self._body = bytearray()
        self._take: Callable[[bytes], bool] | None = None
        self._begun = self._over = self._enough = self._line_ended = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None

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
        return await cls.sent(url, post(url, body, path, headers), source)

    @classmethod
    async def sent(cls, url: str, request: bytes, source: str = "") -> Self:
        """Connect and send raw bytes, valid HTTP or not. Raises OSError."""
        target = urlsplit(url)
        assert target.hostname, url
        secure = target.scheme == "https"
        transport, connection = await asyncio.get_running_loop().create_connection(
            cls,
            target.hostname,
            target.port or (443 if secure else 80),
            ssl=trusted() if secure else None,
            local_addr=(source, 0) if source else None,
        )
        transport.write(request)
        return connection

    @property
    def port(self) -> int:
        return int(self._transport.get_extra_info("sockname")[1])

    async def status(self) -> int:
        await self._until(lambda: self._begun)
        return int(self._parser.get_status_code())

    async def lines(self, take: Callable[[bytes], bool]) -> None:
        """Call `take` with each line that is not empty, until it returns True or the response is complete. Raises what
        `take` raises."""
        self._take = take
        self._split()
        await self._until(lambda: self._enough or self._over)

    async def rest(self, despite_reset: bool = False) -> bytes:
        """Return the rest of the body. `despite_reset`: return what arrived before a reset."""
        with suppress(*([ConnectionResetError] if despite_reset else [])):
            await self._until(lambda: self._over)
        return bytes(self._body)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            if self._error:
                raise self._error
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def _split(self) -> None:
        if self._take is None or self._enough or not (self._line_ended or self._over):
            return
        self._line_ended = False
        *lines, self._body = self._body.split(b"\n")
        if self._over:
            lines.append(self._body)  # the last line may lack a newline
        for line in lines:
            if line and self._take(bytes(line)):
                self._enough = True
                return

    def _tell(self) -> None:
        if self._news and not self._news.done():
            self._news.set_result(None)

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._error:
            return
        try:
            self._parser.feed_data(self._buffer[:nbytes])
            self._split()
        except Exception as error:  # the pending read raises it
            self._error, self._over = error, False
            self.abort()
        if self._take is None or self._enough or self._over:
            self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._begun and not {"content-length", "transfer-encoding"} & self.headers.keys():
            self._over = True  # the connection's end is the response's end
            self.buffer_updated(0)
        self._error = self._error or exc or EOFError("closed before the response was complete")
        self._tell()

    # httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_body(self, body: bytes) -> None:
        self._body += body
        self._line_ended = self._line_ended or b"\n" in body

    def on_message_complete(self) -> None:
        self._over = True


def send_unread(url: str, request: bytes, source: str = "") -> socket.socket:
    """Send a request on a socket with a tiny receive buffer, and return the socket unread. Raises OSError."""
    target = urlsplit(url)
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.settimeout(_CONNECT_WITHIN)
        sock.bind((source, 0))
        sock.connect((target.hostname, target.port or 80))
        if target.scheme == "https":
            sock = trusted().wrap_socket(sock, server_hostname=target.hostname)
        sock.sendall(request)
    except BaseException:
        sock.close()
        raise
    return sock


def trusted() -> ssl.SSLContext:
    """Return an SSL context for the certificates in SSL_CERT_FILE (for a self-signed server), else the system's."""
    return _trusting(os.environ.get("SSL_CERT_FILE"))


@cache
def _trusting(file: str | None) -> ssl.SSLContext:
    """Cached, because loading certificates takes milliseconds."""
    return ssl.create_default_context(cafile=file)


def post(
    url: str,
    body: Mapping[str, object] | bytes,
    path: str = COMPLETIONS,
    headers: Mapping[str, str] | None = None,
) -> bytes:
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
