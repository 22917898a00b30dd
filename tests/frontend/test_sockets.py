"""The listening socket; clients that do not read, and clients that do not write. All on real sockets."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress

import httpx
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from pdserve.errors import ConfigError
from pdserve.frontend.connections import ClientConnections
from pdserve.frontend.server import QuietServer, http_config
from pdserve.frontend.sockets import bind
from tests.conditions import until
from tests.frontend.conftest import Graph, serve
from tests.frontend.test_generate import completion
from tests.frontend.test_overload import NAME, PLACES, worker

in_session = pytest.mark.asyncio(loop_scope="session")

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout: 100\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)

_HOLD = (
    "import socket, os\n"
    "if os.fork(): os._exit(0)\n"  # orphaned: not a child of our own parent
    "s = socket.socket()\n"
    "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
    "s.bind(('127.0.0.1', 0)); s.listen()\n"
    "print(s.getsockname()[1], os.getpid(), flush=True)\n"
    "input()\n"
)


def test_processes_share_a_port() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert second.getsockname()[1] == port


def test_another_process_on_the_port_is_named() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    port, pid = map(int, holder.stdout.readline().split())
    try:
        with pytest.raises(ConfigError, match=rf"{port} is in use by process {pid} .*python"):
            bind("127.0.0.1", port)
    finally:
        holder.stdin.close()
        holder.stdout.close()
        holder.wait()


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        bind("203.0.113.1", 0)


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    with bind("::1", 0) as sock:
        assert sock.family == socket.AF_INET6


def test_a_bound_port_gets_no_connections_yet() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname())


def test_connections_are_not_accepted_in_a_turn_each() -> None:
    """Turns of a busy event loop are long, and uvloop alone accepts a single connection in each."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    async def turns_until_all_are_open(count: int) -> int:
        connections = ClientConnections(30.0, 30.0)
        with bind("127.0.0.1", 0) as sock, ExitStack() as clients:
            server = QuietServer(http_config(app, connections, 1.0), connections)
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            await until(lambda: server.started)
            for _ in range(count):
                clients.enter_context(socket.create_connection(sock.getsockname()))
            turns = 0
            while len(connections.open) < count and turns < 2 * count:
                await asyncio.sleep(0)
                turns += 1
            server.should_exit = True
            await serving
        return turns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(turns_until_all_are_open(100)) < 20


@asynccontextmanager
async def server(graph: Graph, connections: ClientConnections) -> AsyncIterator[tuple[str, int]]:
    """The same frontend on another port."""
    async with AsyncExitStack() as stack:
        url = httpx.URL(await serve(graph.app, stack, connections))
        assert url.port is not None
        yield url.host, url.port


@contextmanager
def client(address: tuple[str, int], source: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A socket that holds next to nothing unread."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.bind((source, 0))
        sock.connect(address)
        sock.setblocking(False)
        yield sock


async def ask(sock: socket.socket, **changes: object) -> None:
    body = json.dumps(completion(**{"model": NAME, "stream": True, **changes})).encode()
    await asyncio.get_running_loop().sock_sendall(sock, HEAD % len(body) + body)


@in_session
async def test_unread_streams_end_and_free_everything(graph: Graph) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(worker(graph))
        address = await stack.enter_async_context(server(graph, ClientConnections(30.0, 0.4)))
        admission = graph.models.find(NAME).admission
        unread = [stack.enter_context(client(address)) for _ in range(20)]
        for sock in unread:
            await ask(sock, max_tokens=3500)
        await until(lambda: len(admission) == 20 - PLACES, within=10)
        with client(address, "127.0.0.2") as other:
            await ask(other, max_tokens=2)
            answer = b""
            async with asyncio.timeout(20):
                while b"[DONE]" not in answer:
                    answer += await asyncio.get_running_loop().sock_recv(other, 4096)
        assert len(admission) > 0  # it did not wait for all of them
        await until(lambda: not len(admission) and not engine.usage.running, within=20)
        assert await engine.all_blocks_free()
        await until(lambda: not admission.queue.running)


@in_session
async def test_unread_streams_make_way_and_go_on(graph: Graph) -> None:
    """Long before their end: others get their places, and a client that reads again gets everything."""
    async with AsyncExitStack() as stack:
        decode = await stack.enter_async_context(graph.worker(at_once=4, pace=0.001))
        address = await stack.enter_async_context(
            server(graph, ClientConnections(60.0, 60.0, pause_after=0.2))
        )
        await until(lambda: bool(graph.models.live().get("demo")))
        unread = [stack.enter_context(client(address)) for _ in range(6)]
        for sock in unread:
            await ask(sock, model="demo", max_tokens=2500, stream_options={"include_usage": True})
        await decode.until(lambda: len(decode.jobs) == PLACES)
        with client(address, "127.0.0.2") as other:
            await ask(other, model="demo", max_tokens=2)
            await read(other)
        assert decode.cancelled
        for sock in unread[1:]:
            sock.close()
        answer = await read(unread[0])
        assert b'"completion_tokens":2500' in answer
        admission = graph.models.find("demo").admission
        await until(lambda: not admission.queue.running)


async def read(sock: socket.socket) -> bytes:
    answer = b""
    async with asyncio.timeout(60):
        while b"[DONE]" not in answer:
            part = await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
            assert part, "the connection was closed"
            answer += part
    return answer


@in_session
async def test_a_slow_reader_that_moves_is_served_to_the_end(graph: Graph) -> None:
    connections = ClientConnections(30.0, 0.5)
    async with graph.worker(), server(graph, connections) as address:
        with client(address) as sock:
            await ask(sock, model="demo", max_tokens=2000, logprobs=5)
            answer, slow = b"", time.monotonic() + 1.5
            while b"[DONE]" not in answer:
                if time.monotonic() < slow:  # ten times a second, a little
                    await asyncio.sleep(0.1)
                part = await asyncio.get_running_loop().sock_recv(sock, 4096)
                assert part, "the connection was closed"
                answer += part
        assert len(answer) > 150_000


@in_session
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("begin", [b"", b"GET /version HTTP/1.1\r\nhost", b"\r\n"])
async def test_a_head_that_does_not_end_ends_the_connection(graph: Graph, begin: bytes, again: bool) -> None:
    """Also when a byte comes now and then, and on a connection that was used before."""
    async with server(graph, ClientConnections(0.4, 30.0)) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        if again:
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"vllm" in await reader.read(4096)
            begin = begin or b"G"
        writer.write(begin)
        started = time.monotonic()
        dribble = asyncio.create_task(_dribble(writer)) if begin.startswith(b"GET") else None
        async with asyncio.timeout(5):
            answer = await reader.readline()
            with suppress(ConnectionError):  # a byte may have come after the end
                await reader.read()
        assert answer.startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started < 3
        if dribble is not None:
            dribble.cancel()
        writer.close()


async def _dribble(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(0.05)
        writer.write(b"a")


@in_session
async def test_a_slow_body_is_no_slow_head(graph: Graph) -> None:
    body = json.dumps(completion()).encode()
    async with graph.worker(), server(graph, ClientConnections(0.3, 30.0)) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD % len(body))
        for byte in range(0, len(body), 10):
            await asyncio.sleep(0.1)
            writer.write(body[byte : byte + 10])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
