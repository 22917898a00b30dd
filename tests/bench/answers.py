"""Tiny HTTP servers with scripted responses."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.tcp import tcp_server


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Any
    """None without a body."""


Respond = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class TinyServer:
    url: str
    asked: list[Asked] = field(default_factory=list)
    """In order of arrival."""


@asynccontextmanager
async def tiny_server(respond: Respond, secure: ssl.SSLContext | None = None) -> AsyncIterator[TinyServer]:
    """An HTTP server that closes each connection after one response. On exit, it does not wait for responses."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            asked = Asked(method, path, headers, json.loads(raw) if raw else None)
            server.asked.append(asked)
            await respond(asked, writer)
        writer.close()

    async with tcp_server(serve, secure) as port:
        server = TinyServer(f"{'https' if secure else 'http'}://127.0.0.1:{port}")
        yield server


def whole(body: bytes | object, status: int = 200, kind: str = "application/json", more: str = "") -> bytes:
    """Return a response that is not streamed."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(raw)}\r\n{more}\r\n"
    return head.encode() + raw


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(what: object) -> bytes:
    return chunk(b"data: " + (what if isinstance(what, bytes) else json.dumps(what).encode()) + b"\n\n")


def delta(**what: object) -> dict[str, object]:
    """Return a stream event of a chat."""
    return {"choices": [{"index": 0, "delta": what}]}


DONE = event(b"[DONE]") + b"0\r\n\r\n"


def fixed(answer: bytes) -> Respond:
    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return respond


class OpenAi:
    """A server of chats and completions that streams the tokens `t0 t1 ...`: the first after `ttft` seconds, then one
    every `gap` seconds. It counts each word of a prompt as a token."""

    def __init__(self, ttft: float = 0.0, gap: float = 0.0, usage: bool = True) -> None:
        self.ttft, self.gap, self.usage = ttft, gap, usage
        self.running = self.most = 0
        """Number of requests in progress now, and the highest number so far."""
        self.chats: list[Asked] = []

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.method == "GET":
            writer.write(whole({"data": [{"id": "tiny", "max_model_len": 1000}]}))
        else:
            self.chats.append(asked)
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self._stream(asked.body, writer)
            finally:
                self.running -= 1
        await writer.drain()

    async def _stream(self, body: Any, writer: asyncio.StreamWriter) -> None:
        chat = "messages" in body
        asked = " ".join(message["content"] for message in body["messages"]) if chat else body["prompt"]
        count = body.get("max_tokens") or body["max_completion_tokens"]
        writer.write(STREAM + (event(delta(role="assistant", content="")) if chat else b""))
        for number in range(count):
            await asyncio.sleep(self.gap if number else self.ttft)
            text, end = f"t{number} ", None if number < count - 1 else "length"
            said = {"delta": {"content": text}} if chat else {"text": text}
            writer.write(event({"choices": [{"index": 0, **said, "finish_reason": end}]}))
            await writer.drain()  # raises if the client has disconnected
        if self.usage and body.get("stream_options"):
            used = {"prompt_tokens": len(asked.split()), "completion_tokens": count}
            writer.write(event({"choices": [], "usage": used}))
        writer.write(DONE)
