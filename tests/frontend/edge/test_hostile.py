"""Hostile clients, with and without TLS. Each is answered or cut off within limits, and leaves nothing behind."""

import asyncio
import json
import re
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from pdserve.config.api_keys import ApiKey
from pdserve.frontend.app import FrontendApp
from pdserve.frontend.edge.body import BodyReader
from pdserve.frontend.edge.certificate_reload import RenewedCertificate
from pdserve.frontend.edge.connections import MAX_FIELDS, MAX_HEAD, MAX_PIPELINED, ClientConnections
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.security.certificate import ServerCertificate
from tests.conditions import until
from tests.frontend.conftest import Graph, address_of, in_session, serve, trusting
from tests.frontend.test_generate import completion

pytestmark = in_session

KEY = "a-key-0123456789abcdef"
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
WITH_KEY = POST + b"authorization: Bearer " + KEY.encode() + b"\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
BODY = json.dumps(completion()).encode()


@dataclass
class Edge:
    address: tuple[str, int]
    tls: ssl.SSLContext | None
    app: FrontendApp
    connections: ClientConnections

    async def say(self, *parts: bytes, answers: int = 0) -> bytes:
        """Send the parts. Return what comes until the server closes or, given `answers`, until that many have come and
        nothing follows."""
        reader, writer = await asyncio.open_connection(*self.address, ssl=self.tls)
        answer = b""
        try:
            for part in parts:
                writer.write(part)
                with suppress(ConnectionError):
                    await writer.drain()
            with suppress(ConnectionError, TimeoutError):
                while True:
                    all_came = 0 < answers <= answer.count(b"HTTP/1.1 ")
                    part = await asyncio.wait_for(reader.read(1 << 16), 0.2 if all_came else 20)
                    if not part:
                        break
                    answer += part
        finally:
            writer.transport.abort()
        return answer

    async def statuses(self, *parts: bytes, answers: int = 0) -> list[int]:
        return [int(code) for code in re.findall(rb"HTTP/1.1 (\d+)", await self.say(*parts, answers=answers))]


@asynccontextmanager
async def guarded(
    graph: Graph, files: ServerCertificate | None = None, connections: ClientConnections | None = None
) -> AsyncIterator[Edge]:
    """Serve with one API key. On exit, wait until no connection, buffered body, task or request is left."""
    app = graph.app_with(ApiKeys([ApiKey.of(KEY)]))
    connections = connections or ClientConnections(30.0, 30.0)
    async with AsyncExitStack() as stack:
        certificate = RenewedCertificate(files) if files else None
        url = await serve(app, stack, connections, certificate)
        tls = trusting(files) if files else None
        yield Edge(address_of(url), tls, app, connections)
        await until(lambda: not connections.open and not connections._entered)
        await until(lambda: (app._bodies.budget.used, dict(app._bodies.budget.of_client)) == (0, {}))
    await until(
        lambda: not [task for task in asyncio.all_tasks() if _REQUEST_TASKS.search(str(task.get_coro()))]
    )
    for model in graph.models.listed():
        assert not len(graph.models.find(model.name).admission)


_REQUEST_TASKS = re.compile("RequestResponseCycle|_disconnected|run.<locals>|Server._take")


HEADS = {
    "too many fields": (GET + b"a: b\r\n" * MAX_FIELDS + b"\r\n", 431),
    "large field": (GET + b"a: " + b"b" * MAX_HEAD + b"\r\n\r\n", 431),
    "large name": (GET + b"a" * MAX_HEAD + b": b\r\n\r\n", 431),
    "endless field": (GET + b"a: " + b"b" * (4 * MAX_HEAD + (1 << 19)), 431),
    "large target": (b"GET /" + b"a" * MAX_HEAD + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
    "endless target": (b"GET /" + b"a" * (1 << 20), 431),
    "NUL in a value": (GET + b"a: b\0c\r\n\r\n", 400),
    "NUL in a name": (GET + b"a\0: b\r\n\r\n", 400),
    "NUL in the target": (b"GET /\0 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "CR in a value": (GET + b"a: b\rc: d\r\n\r\n", 400),
    "space before the colon": (GET + b"a : b\r\n\r\n", 400),
    "folded field": (GET + b"a: b\r\n c: d\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (GET + b"host: y\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "HTTP/1.0": (b"GET /v1/models HTTP/1.0\r\n\r\n", 401),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/9.9": (b"GET / HTTP/9.9\r\nhost: x\r\n\r\n", 400),
    "CONNECT": (b"CONNECT evil.example:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 401),
    "absolute target": (b"GET http://evil.example/v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 401),
    "empty authority": (b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "made-up method": (b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "lower case": (b"get / http/1.1\r\nhost: x\r\n\r\n", 400),
    # x-forwarded-for is ignored: from 10.0.0.7, /version would need a key
    "forwarded address": (
        b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\nx-forwarded-for: 10.0.0.7\r\n\r\n",
        200,
    ),
    "garbage": (bytes(range(65, 91)) * 20 + b"\r\n\r\n", 400),
    "WebSocket": (GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n", 401),
    "h2c": (GET + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n\r\n", 401),
}
SMUGGLED = {
    "both lengths": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, chunked first": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "a list of lengths": b"content-length: 5, 5\r\n\r\nhello",
    "negative length": b"content-length: -5\r\n\r\nhello",
    "length with a plus": b"content-length: +5\r\n\r\nhello",
    "length in hex": b"content-length: 0x5\r\n\r\nhello",
    "length too large": b"content-length: 99999999999999999999999\r\n\r\nhello",
    "unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "another coding after chunked": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunk without a size": b"transfer-encoding: chunked\r\n\r\nzzz\r\n\r\n",
    "negative chunk size": b"transfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    "chunk size too large": b"transfer-encoding: chunked\r\n\r\nfffffffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "chunk longer than its size": b"transfer-encoding: chunked\r\n\r\n1\r\nhello\r\n0\r\n\r\n",
}


async def test_odd_heads_are_refused_if_wrong_or_too_large(
    graph: Graph, either: ServerCertificate | None
) -> None:
    """A 401 means that the server has accepted the head: the request only lacks a key."""
    async with guarded(graph, either) as server:
        found = await asyncio.gather(*(server.statuses(said, answers=1) for said, _ in HEADS.values()))
    assert dict(zip(HEADS, found, strict=True)) == {name: [status] for name, (_, status) in HEADS.items()}


async def test_bodies_that_two_servers_may_read_differently_are_refused(graph: Graph) -> None:
    """Request smuggling: a proxy could see other requests in such bodies."""
    async with guarded(graph) as server:
        hidden = GET + b"x-hidden: 1\r\n\r\n"
        found = await asyncio.gather(
            *(server.statuses(WITH_KEY + said + hidden) for said in SMUGGLED.values())
        )
    assert dict(zip(SMUGGLED, found, strict=True)) == {name: [400] for name in SMUGGLED}


async def test_an_offer_to_upgrade_is_answered_in_http_1(graph: Graph) -> None:
    """Java's clients offer h2c with each request."""
    h2c = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n"
    async with graph.worker(), guarded(graph) as server:
        post = WITH_KEY + h2c + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        assert await server.statuses(post, GET + b"\r\n", answers=2) == [200, 401]
        hidden = GET + b"\r\n"
        inside = WITH_KEY + h2c + b"content-length: %d\r\n\r\n" % len(hidden)
        assert await server.statuses(inside, hidden, answers=1) == [400]  # taken as a body, which is no JSON


async def test_pipelined_requests_are_answered_in_order_and_bounded(graph: Graph) -> None:
    """A connection ends when more than MAX_PIPELINED requests wait."""
    async with graph.worker(), guarded(graph) as server:
        flood = await server.statuses((GET + b"\r\n") * 5000)
        assert set(flood) == {401}
        assert len(flood) <= MAX_PIPELINED + 1
        first = WITH_KEY + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        assert await server.statuses(first + (GET + b"\r\n") * 3, answers=4) == [200, 401, 401, 401]
        assert await server.statuses(first + b"no HTTP\r\n\r\n") == [200]


async def test_without_a_key_no_body_is_buffered(graph: Graph, either: ServerCertificate | None) -> None:
    async with guarded(graph, either) as server:
        server.app._bodies = BodyReader(bound=0)
        large = b" " * (1 << 20)
        declared, in_chunks, expecting = await asyncio.gather(
            server.statuses(POST + b"content-length: %d\r\n\r\n" % (1 << 40), *[large] * 10, answers=1),
            server.statuses(POST + CHUNKED + (b"%x\r\n%b\r\n" % (len(large), large)) * 10, answers=1),
            server.say(POST + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n", answers=1),
        )
    assert (declared, in_chunks) == ([401], [401])
    assert expecting.startswith(b"HTTP/1.1 401")  # no 100 came before the 401
    assert b"server:" not in expecting.lower()
    assert b"connection: close" in expecting


async def test_with_a_key_expect_100_continue_is_answered(graph: Graph) -> None:
    async with graph.worker(), guarded(graph) as server:
        head = WITH_KEY + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
        assert await server.statuses(head, BODY, answers=2) == [100, 200]


async def test_tiny_chunks_are_read_and_endless_ones_refused(graph: Graph) -> None:
    tiny = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in BODY + b" " * 50_000)
    async with graph.worker(), guarded(graph) as server:
        assert await server.statuses(WITH_KEY + CHUNKED + tiny + b"0\r\n\r\n", answers=1) == [200]
        trailers = b"0\r\nauthorization: Bearer nothing\r\nx-request-id: late\r\n\r\n"
        answer = await server.say(
            WITH_KEY + CHUNKED + b"%x\r\n%b\r\n" % (len(BODY), BODY) + trailers, answers=1
        )
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"late" not in answer
        for endless in (b"1;a=" + b"b" * (1 << 20), b"0\r\na: " + b"b" * (1 << 20)):
            assert await server.statuses(WITH_KEY + CHUNKED + endless) == [431]


async def test_a_body_that_comes_too_slowly_is_408(graph: Graph) -> None:
    async with guarded(graph) as server:
        server.app._bodies = BodyReader(grace=0.2)
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(WITH_KEY + b"content-length: 100000\r\n\r\n")
        answer = asyncio.create_task(reader.readuntil(b"}"))
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        assert b"slower than 1000 bytes a second" in await answer
        writer.transport.abort()


async def test_connections_beyond_the_limit_are_closed(
    graph: Graph, either: ServerCertificate | None
) -> None:
    connections = ClientConnections(30.0, 30.0, most=2)
    async with guarded(graph, either, connections) as server:
        ask = GET + b"\r\n"
        # these connections send nothing, not even a TLS handshake
        silent = [await asyncio.open_connection(*server.address) for _ in range(2)]
        await until(lambda: len(connections._entered) == 2)
        with suppress(ConnectionError, ssl.SSLError):
            assert await server.say(ask) == b""
        for _, writer in silent:
            writer.transport.abort()
        await until(lambda: not connections._entered)
        assert await server.statuses(ask, answers=1) == [401]


async def test_a_process_without_file_descriptors_recovers(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdserve.frontend.server.EXHAUSTED", 0.1)
    async with guarded(graph) as server:
        waiting = socket.socket()
        waiting.setblocking(False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            waiting.connect_ex(server.address)
            await until(lambda: "no connections for a second" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await server.statuses(GET + b"\r\n", answers=1) == [401]
        waiting.close()
