"""Shutdown of the HTTP server: open connections and clients in their handshake, on real sockets."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from ssl import SSLContext
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.frontend import server as frontend_server
from pdserve.frontend.edge import connections
from pdserve.frontend.edge.certificate_reload import RenewedCertificate
from pdserve.frontend.edge.connections import LINGER, ClientConnections
from pdserve.frontend.edge.sockets import ACK, SYN, bind, drop_packets
from pdserve.frontend.server import QuietServer, http_config
from pdserve.security.certificate import ServerCertificate
from tests.conditions import until
from tests.frontend.conftest import Graph, address_of, in_session, serve, trusting

SO_DETACH_FILTER = 27


@asynccontextmanager
async def shutting_down(
    app: ASGIApp, certificate: ServerCertificate | None
) -> AsyncIterator[tuple[tuple[str, int], SSLContext | None, Callable[[], Coroutine[Any, Any, None]]]]:
    """Serve the app. Yield the address, a client's TLS context, and a function that begins the shutdown and waits
    until the server no longer listens. On exit, the server must end within 5 s."""
    connections = ClientConnections(30.0, 30.0)
    with bind("127.0.0.1", 0) as sock:
        renewed, tls = (
            (RenewedCertificate(certificate), trusting(certificate)) if certificate else (None, None)
        )
        http = QuietServer(http_config(app, connections, 5.0), connections, renewed)
        serving = asyncio.create_task(http.serve(sockets=[sock]))
        await until(lambda: http.started)

        async def shut_down() -> None:
            connections.draining = http.should_exit = True
            await until(lambda: sock.fileno() < 0)

        yield sock.getsockname(), tls, shut_down
        await asyncio.wait_for(serving, 5)


@in_session
async def test_open_connections_are_answered_during_shutdown(either: ServerCertificate | None) -> None:
    """One connection is not accepted yet, one is idle, one has a running request."""
    working, release = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        working.set()
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    async with shutting_down(app, either) as (address, tls, shut_down):
        at_work = asyncio.create_task(get(*await asyncio.open_connection(*address, ssl=tls)))
        await working.wait()
        idle = await asyncio.open_connection(*address, ssl=tls)
        fresh = socket.create_connection(address)
        await shut_down()
        await asyncio.sleep(2 * LINGER)  # a busy client may need this long for its handshake or its request
        late = await asyncio.open_connection(
            sock=fresh, ssl=tls, server_hostname="localhost" if tls else None
        )
        asking = [asyncio.create_task(get(*each)) for each in (idle, late)]
        await asyncio.sleep(0)
        release.set()
        for answer in await asyncio.gather(at_work, *asking):
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"ok")


@in_session
async def test_a_client_in_its_handshake_is_answered_during_shutdown(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client drops the server's first SYN-ACK, so that the handshake takes a second."""
    monkeypatch.setattr(frontend_server, "HANDSHAKE_WITHIN", 2.0)
    async with shutting_down(graph.app, None) as (address, _, shut_down):
        with socket.socket() as client:
            drop_packets(client, SYN | ACK)
            client.setblocking(False)
            connecting = asyncio.create_task(asyncio.get_running_loop().sock_connect(client, address))
            await asyncio.sleep(0.3)
            client.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
            assert not connecting.done()
            stopping = asyncio.create_task(shut_down())
            await connecting
            reader, writer = await asyncio.open_connection(sock=client)
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
        await stopping


@in_session
@pytest.mark.parametrize("kept", [False, True])
async def test_a_request_whose_head_has_begun_is_answered_during_shutdown(
    graph: Graph, either: ServerCertificate | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kept`: the connection has had a request before."""
    monkeypatch.setattr(connections, "FIRST_REQUEST_WITHIN", LINGER)
    head = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    async with shutting_down(graph.app, either) as (address, tls, shut_down):
        reader, writer = await asyncio.open_connection(*address, ssl=tls)
        if kept:
            writer.write(head)
            assert b"vllm" in await reader.read(4096)
        writer.write(head[:10])
        await shut_down()
        await asyncio.sleep(3 * LINGER)
        writer.write(head[10:])
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer
        writer.close()


@in_session
async def test_a_kept_connection_is_answered_once_more_during_shutdown(
    either: ServerCertificate | None,
) -> None:
    """The first response begins before the shutdown, so its head does not say that the connection closes."""
    started, release = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        started.set()
        await release.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async def answer() -> tuple[bytes, bytes]:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        return head, await reader.readexactly(2)

    async with shutting_down(app, either) as (address, tls, shut_down):
        reader, writer = await asyncio.open_connection(*address, ssl=tls)
        first = asyncio.create_task(answer())
        await started.wait()
        await shut_down()
        release.set()
        head, body = await first
        assert (b"connection: close" in head, body) == (False, b"ok")
        head, body = await answer()
        assert (b"connection: close" in head, body) == (True, b"ok")
        assert await reader.read() == b""
        writer.close()


@in_session
async def test_a_late_event_loop_reads_before_it_closes_an_idle_connection(graph: Graph) -> None:
    connections = ClientConnections(30.0, 30.0)
    async with AsyncExitStack() as stack:
        address = address_of(await serve(graph.app, stack, connections))
        client = stack.enter_context(socket.create_connection(address))
        await until(lambda: bool(connections.open))
        (connection,) = connections.open
        connection.shutdown()
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(2 * LINGER)  # noqa: ASYNC251  # the connection is due to close before the loop reads
        answer = await asyncio.to_thread(client.recv, 4096)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
