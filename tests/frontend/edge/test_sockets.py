"""The listening socket, and clients that do not read or do not write, with and without TLS, on real sockets."""

import asyncio
import errno
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, suppress

import pytest
from starlette.types import Receive, Scope, Send

from pdserve.frontend.edge import connections
from pdserve.frontend.edge.certificate_reload import RenewedCertificate
from pdserve.frontend.edge.connections import RESET_WITHIN, ClientConnections
from pdserve.frontend.edge.sockets import accept_all, bind, ignore_new_clients
from pdserve.security.certificate import ServerCertificate
from pdserve.util.errors import ConfigError
from tests.conditions import until
from tests.frontend.conftest import Graph, address_of, in_session, serve, trusting
from tests.frontend.test_generate import completion

Address = tuple[str, int]

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout: %b\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)

_WITHOUT_SERVE = (
    "import os, sys\n"
    "from pdserve.frontend.edge.sockets import bind\n"
    "if os.fork(): sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    "s = bind('127.0.0.1', int(sys.argv[1])); s.listen()\n"
    "print(s.getsockname()[1], os.getpid(), flush=True)\n"
    "sys.stdin.read()\n"
)


def test_roles_that_one_process_started_share_a_port() -> None:
    """So systemd can start a frontend's successor. A role that another process starts gets an error with both pids."""
    holders, pids, port = [], list[str](), "0"
    for _ in range(2):
        command = [sys.executable, "-c", _WITHOUT_SERVE, port]
        holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout is not None
        port, pid = holders[-1].stdout.readline().split()
        pids.append(pid)
    with pytest.raises(ConfigError, match=rf"{port} is in use by process \d+ .*python") as refused:
        bind("127.0.0.1", int(port))
    assert all(f"process {pid} (" in str(refused.value) for pid in pids)
    assert [holder.communicate("")[0] for holder in holders] == ["", ""]
    assert [holder.returncode for holder in holders] == [0, 0]


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        bind("203.0.113.1", 0)


def test_an_ipv6_address_is_listened_on() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    with bind("::1", 0) as sock:
        assert sock.family == socket.AF_INET6


def test_a_bound_port_gets_no_connections_yet() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname())


def connecting(address: Address) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    assert sock.connect_ex(address) == errno.EINPROGRESS
    return sock


def test_clients_that_a_socket_ignores_reach_its_sibling() -> None:
    """The kernel would reset connections that only the closed socket has."""
    with ExitStack() as stack:
        one = stack.enter_context(bind("127.0.0.1", 0))
        other = stack.enter_context(bind(*one.getsockname()))
        for sock in (one, other):
            sock.listen()
        ignore_new_clients(one)
        clients = [stack.enter_context(connecting(one.getsockname())) for _ in range(16)]
        one.close()
        for client in clients:
            assert select.select([], [client], [], 10)[1]
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        for connection in (accepted := list(accept_all([other]))):
            stack.enter_context(connection)
        assert len(accepted) == len(clients)


async def silent(scope: Scope, receive: Receive, send: Send) -> None: ...


@in_session
async def test_many_connections_are_accepted_in_each_turn_of_the_event_loop() -> None:
    """A busy loop's turns are long, and uvloop itself accepts only one connection in each."""

    connections, count, turns = ClientConnections(30.0, 30.0), 100, 0
    async with AsyncExitStack() as stack:
        address = address_of(await serve(silent, stack, connections))
        for _ in range(count):
            stack.enter_context(socket.create_connection(address))
        while len(connections.open) < count and turns < 2 * count:
            await asyncio.sleep(0)
            turns += 1
    assert turns < 20


@asynccontextmanager
async def server(
    graph: Graph, certificate: ServerCertificate | None = None, connections: ClientConnections | None = None
) -> AsyncIterator[Address]:
    """Serve the graph's frontend on another port, too."""
    async with AsyncExitStack() as stack:
        renewed = RenewedCertificate(certificate) if certificate else None
        yield address_of(await serve(graph.app, stack, connections, renewed))


@asynccontextmanager
async def client(
    address: Address, certificate: ServerCertificate | None, source: str = "127.0.0.1"
) -> AsyncIterator[socket.socket]:
    """Yield a blocking socket, to be read in another thread. Its receive buffer is tiny."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.bind((source, 0))
        sock.settimeout(60)
        sock.connect(address)
        if certificate is None:
            yield sock
            return
        wrap = trusting(certificate).wrap_socket
        with await asyncio.to_thread(wrap, sock, server_hostname=address[0]) as wrapped:
            yield wrapped


def ask(sock: socket.socket, *, close: bool = False, within: bytes = b"100", **changes: object) -> None:
    body = json.dumps(completion(stream=True, **changes)).encode()
    head = HEAD % (within, len(body))
    sock.sendall((head.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost") if close else head) + body)


def read(sock: socket.socket) -> bytes:
    answer = b""
    while b"[DONE]" not in answer:
        part = sock.recv(1 << 16)
        assert part, "the connection was closed"
        answer += part
    return answer


@in_session
async def test_unread_streams_pause_and_continue(graph: Graph, either: ServerCertificate | None) -> None:
    """Other requests get the slots of unread streams. A client that reads again gets everything."""
    async with AsyncExitStack() as stack:
        decode = await stack.enter_async_context(graph.worker(at_once=4, pace=0.001))
        connections = ClientConnections(60.0, 60.0, pause_after=0.2)
        address = await stack.enter_async_context(server(graph, either, connections))
        await until(lambda: bool(graph.models.usable_workers().get("demo")))
        unread = []
        for _ in range(5):
            unread.append(await stack.enter_async_context(client(address, either)))
            ask(unread[-1], max_tokens=1500, stream_options={"include_usage": True})
        await decode.until(lambda: len(decode.jobs) == 4)
        async with client(address, either, "127.0.0.2") as other:
            ask(other, max_tokens=2)
            await asyncio.to_thread(read, other)
        assert decode.cancelled
        for sock in unread[1:]:
            sock.close()  # over TLS: without close_notify
        assert b'"completion_tokens":1500' in await asyncio.to_thread(read, unread[0])
        admission = graph.models.find("demo").admission
        await until(lambda: not admission.queue.running)


@in_session
async def test_an_unread_stream_is_noticed_with_a_pipelined_request_behind_it(graph: Graph) -> None:
    connections = ClientConnections(60.0, 60.0, pause_after=0.2)
    async with graph.worker(), server(graph, None, connections) as address, client(address, None) as sock:
        await until(lambda: bool(graph.models.usable_workers().get("demo")))
        for _ in range(2):
            ask(sock, max_tokens=3500, logprobs=5)
        running = graph.context.running
        await until(lambda: any(one.state.admission and one.state.admission.unread for one in running))


@in_session
async def test_a_deadline_ends_the_request_of_a_slow_reader(graph: Graph) -> None:
    async with graph.worker(pace=0.0003) as decode, server(graph) as address, client(address, None) as sock:
        await until(lambda: bool(graph.models.usable_workers().get("demo")))
        ask(sock, within=b"1.5", max_tokens=3500, logprobs=5)
        await decode.until(lambda: decode.jobs)
        end = time.monotonic() + 5
        while graph.context.running and time.monotonic() < end:
            await asyncio.to_thread(sock.recv, 1000)
            await asyncio.sleep(0.1)
        assert not graph.context.running
        await decode.until(lambda: not decode.jobs)


@in_session
async def test_a_slow_but_steady_reader_gets_the_whole_answer(
    graph: Graph, either: ServerCertificate | None
) -> None:
    """After the server has closed the connection, it still sends what is unsent."""

    def slowly(sock: socket.socket) -> bytes:
        answer, slow = b"", time.monotonic() + 1.5
        while part := sock.recv(2048):
            answer += part
            if time.monotonic() < slow:
                time.sleep(0.02)
        return answer

    connections = ClientConnections(30.0, 0.8)
    async with graph.worker(), server(graph, either, connections) as address, client(address, either) as sock:
        ask(sock, close=True, max_tokens=1600, logprobs=5)
        started = time.monotonic()
        answer = await asyncio.to_thread(slowly, sock)
    assert b"[DONE]" in answer
    assert answer.endswith(b"0\r\n\r\n")
    assert time.monotonic() - started > 1.0, "longer than the write timeout"
    await until(lambda: not connections.open)


@in_session
async def test_an_unfinished_head_ends_the_connection(graph: Graph, either: ServerCertificate | None) -> None:
    """Bytes that trickle in, or an earlier request on the connection, do not prevent the 408."""
    tls = trusting(either) if either else None

    async def refused(address: Address, begin: bytes, again: bool) -> bool:
        reader, writer = await asyncio.open_connection(*address, ssl=tls)
        if again:
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"vllm" in await reader.read(4096)
        writer.write(begin)
        dribble = asyncio.create_task(_dribble(writer)) if begin.startswith(b"GET") else None
        answer = await reader.readline()
        with suppress(ConnectionError):  # the server may reset the connection: a byte came after it closed
            await reader.read()
        if dribble is not None:
            dribble.cancel()
        writer.close()
        return answer.startswith(b"HTTP/1.1 408")

    connections, head = ClientConnections(0.4, 30.0), b"GET /version HTTP/1.1\r\nhost"
    begun = [(b"", False), (head, False), (head, True), (b"\r\n", False), (b"\r\n", True)]
    async with server(graph, either, connections) as address, asyncio.timeout(30):
        assert all(await asyncio.gather(*(refused(address, *each) for each in begun)))
        await until(lambda: not connections.open)


async def _dribble(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(0.05)
        writer.write(b"a")


@in_session
async def test_idle_connections_stay_open_for_over_two_minutes(
    graph: Graph, either: ServerCertificate | None
) -> None:
    """httpx keeps idle connections for 5 s, Caddy for 120 s. If the server closes first, a request may be lost."""
    connections, tls = ClientConnections(0.4, 0.4), trusting(either) if either else None
    async with server(graph, either, connections) as address:
        reader, writer = await asyncio.open_connection(*address, ssl=tls)
        for _ in range(2):
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"vllm" in await reader.read(4096)
            (connection,) = connections.open
            closing = connection.timeout_keep_alive_task
            assert closing is not None
            assert closing.when() - asyncio.get_running_loop().time() > 120
            # an idle connection waits neither for a head nor for a reader
            connections._sweep(time.monotonic() + 100)
            assert not connection.transport.is_closing()
        writer.close()


@in_session
async def test_a_slow_body_does_not_count_as_a_slow_head(graph: Graph) -> None:
    body = json.dumps(completion()).encode()
    async with graph.worker(), server(graph, None, ClientConnections(0.3, 30.0)) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD % (b"100", len(body)))
        for byte in range(0, len(body), 10):
            await asyncio.sleep(0.06)
            writer.write(body[byte : byte + 10])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


@asynccontextmanager
async def asked(
    graph: Graph, times: int = 1, version: bytes = b"1.1", **fields: object
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address_of(graph.url))
    body = json.dumps(completion(**fields)).encode()
    writer.write(((HEAD % (b"20", len(body))).replace(b"HTTP/1.1", b"HTTP/" + version) + body) * times)
    with closing(writer):
        yield reader, writer


@in_session
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_client_that_closes_its_sending_side_gets_its_answers(
    graph: Graph, stream: bool, times: int
) -> None:
    async with graph.worker(pace=None) as worker, asked(graph, times, stream=stream) as (reader, writer):
        writer.write_eof()
        await worker.until(lambda: worker.jobs)
        await asyncio.sleep(2 * RESET_WITHIN)  # the connection does not count as closed
        assert worker.jobs
        worker.go()
        text = (await reader.read()).decode()
    assert text.startswith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert text.count("HTTP/1.1 200 OK\r\n") == times
    assert text.count("data: [DONE]") == (times if stream else 0)


@in_session
async def test_an_answer_before_the_check_for_a_reset_logs_no_error(
    graph: Graph, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "RESET_WITHIN", 1.0)
    async with graph.worker(), asked(graph) as (reader, writer):
        writer.write_eof()
        assert b"200 OK" in await reader.read()
        await asyncio.sleep(1.2)
    assert not [record for record in caplog.records if record.name == "asyncio"]


@in_session
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_closes_both_sides_ends_its_request(graph: Graph, begun: bool) -> None:
    """`begun`: the response has begun, and then pauses."""
    async with graph.worker(pace=None) as worker, asked(graph, stream=begun) as (reader, writer):
        await worker.until(lambda: worker.jobs)
        if begun:
            await worker.step()
            await reader.readuntil(b"data: ")
        writer.close()
        await worker.until(lambda: worker.cancelled)


@in_session
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_http_1_0_has_no_chunks(graph: Graph, stream: bool) -> None:
    async with graph.worker(), asked(graph, version=b"1.0", stream=stream) as (reader, _):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {") if stream else json.loads(body)
