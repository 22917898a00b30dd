"""Streams on real TCP: cut networks, slow readers, bad greetings. (Chaos tests kill and stop processes.)"""

import asyncio
import socket
import struct
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec
import pytest

from pdserve.contract.messages import Cancel, Failed, Hello, Load, Outputs, WorkerLoad, encode
from pdserve.stream import framing, tcp
from pdserve.stream.framing import MAX_MESSAGE, FramedConnection
from pdserve.stream.tcp import GREETING, TcpStreamClient
from pdserve.util.errors import PeerGone
from tests.conditions import until
from tests.stream.conftest import Wire
from tests.stream.raw import client_hello, frame, raw, relay
from tests.tcp import tcp_server
from tests.test_malformed import GARBAGE

TLS = pytest.mark.parametrize("wire", ["tls"], indirect=True)
"""Runs a test only with TLS: for tests that take seconds and give the same result without TLS."""


# networks


@TLS
@pytest.mark.usefixtures("quick_beats")
async def test_a_cut_network_is_noticed_at_both_ends(wire: Wire) -> None:
    async with (
        wire.server(silence=1) as server,
        relay(server.address) as way,
        wire.client(way.address, "f", silence=1) as client,
    ):
        at_server, at_client = server.received(), client.received()
        await client.send(Hello("1"))
        assert await anext(at_server) == ("f", Hello("1"))
        way.cut.set()
        started = time.monotonic()
        assert await anext(at_server) == ("f", None)
        with pytest.raises(PeerGone):
            await anext(at_client)
        assert time.monotonic() - started > 0.5
        assert (client.round_trip or 0) > 0.5, "the wait for the missing reply counts"


def _flipped(chunk: bytes, at: int) -> bytes:
    return chunk[:at] + bytes([chunk[at] ^ 4]) + chunk[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the length": lambda chunk: _flipped(chunk, 1),
    "a bit of the body": lambda chunk: _flipped(chunk, len(chunk) // 2),
    "a bit of the checksum": lambda chunk: _flipped(chunk, len(chunk) - 1),
    "sent twice": lambda chunk: chunk * 2,
    "lost": lambda chunk: b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_frame_is_not_read(wire: Wire, damage: str) -> None:
    """The next intact frame is not read either, because one before it may be lost."""
    async with wire.server() as server, relay(server.address) as way, wire.client(way.address, "f") as client:
        received = server.received()
        await client.send(Cancel(["first"]))
        assert await anext(received) == ("f", Cancel(["first"]))
        passed: list[bytes] = []

        def change(chunk: bytes) -> bytes:
            passed.append(chunk)
            return DAMAGE[damage](chunk)

        way.change = change
        await client.send(Cancel(["second"]))
        await until(lambda: bool(passed))
        way.change = bytes
        with suppress(PeerGone):
            await client.send(Cancel(["third"]))
        if damage == "sent twice" and wire.credentials is None:
            assert await anext(received) == ("f", Cancel(["second"])), "read once"
        assert await anext(received) == ("f", None)


async def test_a_worker_of_the_previous_release_gets_no_checksums() -> None:
    """Such a worker reads ` crc32` in the greeting as a part of the frontend's name, and answers without ` crc32`."""
    said = frame(GREETING) + frame(encode(WorkerLoad(Load())))
    async with _saying(Wire(None), said) as address, TcpStreamClient(address, "f") as client:
        assert await anext(client.received()) == WorkerLoad(Load())


@pytest.mark.usefixtures("quick_beats")
async def test_a_silent_frontend_is_disconnected(wire: Wire) -> None:
    async with wire.server(silence=0.3) as server:
        received = server.received()
        async with wire.raw(server.address) as gone:
            await gone.greet("gone")
        assert await asyncio.wait_for(anext(received), 30) == ("gone", None)
        async with wire.raw(server.address) as silent:
            await silent.greet("silent")
            assert await asyncio.wait_for(anext(received), 30) == ("silent", None)
            assert await silent.closed()


@TLS
@pytest.mark.usefixtures("quick_beats")
async def test_neither_idling_nor_a_stall_of_the_process_ends_a_connection(wire: Wire) -> None:
    async with wire.server(silence=1) as server, wire.client(server.address, "f", silence=1) as client:
        received = server.received()
        first, idle = asyncio.ensure_future(anext(received)), asyncio.ensure_future(anext(client.received()))
        await asyncio.sleep(1.2)
        time.sleep(1.1)  # noqa: ASYNC251 (the stall)
        await asyncio.sleep(0.3)
        assert not idle.done()
        assert 0 < (client.round_trip or 0) < 1
        await client.send(Hello("1"))
        assert await first == ("f", Hello("1"))
        idle.cancel()


# back-pressure


@TLS
async def test_a_frontend_that_stops_reading_is_waited_for_and_then_disconnected(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many senders at once, unsent bytes stay below twice the bound."""
    monkeypatch.setattr(framing, "MAX_UNSENT", 100_000)
    async with wire.server() as server, wire.raw(server.address) as slow:
        await slow.greet("f")
        slow.stop_reading()
        connection, big = server._frontends["f"], Outputs([b"x" * 50_000])
        while _unsent(connection) <= 100_000:
            await server.send("f", big)
        waiting = [asyncio.create_task(server.send("f", big)) for _ in range(100)]
        await asyncio.sleep(0.1)
        assert _unsent(connection) < 200_000
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        reading = asyncio.create_task(slow.closed())
        await asyncio.gather(*waiting)  # it reads again in time: nothing is lost
        reading.cancel()
        await asyncio.wait({reading})
        slow.stop_reading()
        before = 0.0
        with suppress(PeerGone):
            while True:
                assert _unsent(connection) < 200_000
                before = time.monotonic()
                await server.send("f", big)
        assert time.monotonic() - before > 0.9 * framing.SEND_TIMEOUT
        assert await anext(server.received()) == ("f", None)


def _unsent(connection: FramedConnection) -> int:
    assert connection._transport
    return connection._transport.get_write_buffer_size()


@TLS
async def test_a_frontend_that_takes_a_burst_slowly_is_kept(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker sends such a burst when it gets the requests of a lost worker."""
    monkeypatch.setattr(framing, "MAX_UNSENT", 600_000)
    async with wire.server() as server, wire.raw(server.address) as slow:
        await slow.greet("slow")
        slow.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 10_000)
        transport = server._frontends["slow"]._transport
        assert transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)

        async def read() -> None:
            while True:  # 0.4 megabytes a second
                await slow.reader.readexactly(20_000)
                await asyncio.sleep(0.05)

        reading, big = asyncio.create_task(read()), Outputs([b"x" * 50_000])
        for _ in range(20):
            await server.send("slow", big)
        reading.cancel()


@TLS
@pytest.mark.usefixtures("quick_beats")
async def test_a_worker_that_does_not_read_holds_its_frontends_back(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MAX_UNREAD", (10_000, 1 << 20))
    monkeypatch.setattr(framing, "MAX_UNSENT", 1 << 20)
    count, big = 200, Cancel(["x" * 100_000])
    async with wire.server(silence=0.3) as server, wire.client(server.address, "f") as client:

        async def send() -> None:
            for _ in range(count):
                await client.send(big)

        sending = asyncio.create_task(send())
        await asyncio.sleep(0.5)
        assert not sending.done()
        assert server._unread._bytes < 2 << 20
        received = server.received()
        for _ in range(count):
            assert await anext(received) == ("f", big)
        await sending


# messages and greetings that cannot be read


async def test_an_undecodable_message_ends_the_workers_connection(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """A type of message that only a newer worker knows is skipped."""
    async with wire.server() as server:
        at_server = server.received()
        waiting = asyncio.ensure_future(anext(at_server))
        async with wire.client(server.address, "f") as client:
            await client.send(Hello("1"))
            assert await waiting == ("f", Hello("1"))
            at_client = client.received()
            for number in ("1", "2"):
                invented = {"type": "Invented", "request_id": number}
                server._frontends["f"].write(msgspec.msgpack.encode(invented))
            await server.send("f", Failed("r", "before"))
            server._frontends["f"].write(b"\xc1 not msgpack")
            await server.send("f", Failed("r", "after"))
            assert await anext(at_client) == Failed("r", "before")
            with pytest.raises(PeerGone):
                await anext(at_client)
            with pytest.raises(PeerGone):
                await client.send(Hello("2"))
            assert await anext(at_server) == ("f", None)
    assert caplog.text.count("skipped a message Invented of the newer worker") == 1
    assert "an undecodable message" in caplog.text


async def test_messages_of_a_frontend_that_cannot_be_decoded_are_skipped(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    async with wire.server() as server, wire.raw(server.address) as bad:
        await bad.greet("f")
        for garbage in GARBAGE:
            bad.send(frame(garbage) + frame(b"") + frame(garbage) * 2)
        bad.send(frame(encode(Hello("after garbage"))))
        assert await anext(server.received()) == ("f", Hello("after garbage"))
    assert caplog.text.count("skipped a message of frontend f") == 1


BAD_GREETINGS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 5000,
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32),  # ZeroMQ
    struct.pack(">I", 0xFFFFFFFF),
    frame(b"x"),
    frame(encode(Hello("1"))),
    frame(GREETING),
    frame(GREETING + b" "),
    frame(GREETING + b" \xff\xfe"),
    frame(GREETING + b" a\nb"),
    frame(b"pdserve-stream/2 f"),
    frame(GREETING + b" " + b"x" * 2000),
    *map(frame, GARBAGE[1:]),
]


async def test_connections_without_a_good_greeting_are_closed_and_logged_once(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    async with wire.server() as server, wire.client(server.address, "f") as client:
        for greeting in BAD_GREETINGS:
            async with wire.raw(server.address) as stranger:
                stranger.send(greeting)
                assert await stranger.closed(), greeting
        assert not server._ungreeted
        assert server._refused == {"127.0.0.1": len(BAD_GREETINGS)}
        await client.send(Hello("1"))
        assert await anext(server.received()) == ("f", Hello("1"))
    assert caplog.text.count("not of a frontend") == 1
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.usefixtures("quick_beats")
async def test_an_unfinished_greeting_times_out(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "GREETING_TIMEOUT", 0.5)
    started = time.monotonic()
    async with wire.server() as server, wire.raw(server.address) as slow, wire.raw(server.address) as mute:
        greeting = frame(GREETING + b" " + b"x" * 900)
        while not slow.reader.at_eof():
            slow.send(greeting[:1])
            greeting = greeting[1:]
            with suppress(TimeoutError, ConnectionResetError):
                await asyncio.wait_for(slow.reader.read(1), 0.05)
        assert await mute.closed()
        assert time.monotonic() - started > 0.4
        assert not server._ungreeted


async def test_a_flood_of_connections_leaves_the_worker_to_its_frontends(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest connection without a greeting is closed for a new one."""
    monkeypatch.setattr(tcp, "MAX_UNGREETED", 20)
    begun = client_hello(wire.credentials) if wire.credentials else frame(GREETING + b" f")[:9]
    async with (
        wire.server() as server,
        wire.client(server.address, "first") as first,
        AsyncExitStack() as stack,
    ):
        for number in range(100):
            flood = await stack.enter_async_context(raw(server.address))
            if number % 2:
                flood.send(begun)
        await until(lambda: server._refused == {"127.0.0.1": 80})
        assert len(server._ungreeted) == 20
        received = server.received()
        async with wire.client(server.address, "second") as second:
            for client, name in ((first, "first"), (second, "second")):
                await client.send(Hello(name))
                assert await anext(received) == (name, Hello(name))


async def test_a_frame_without_an_end_takes_no_more_memory_than_was_sent(wire: Wire) -> None:
    async with wire.server() as server, wire.raw(server.address) as liar:
        await liar.greet("liar")
        liar.send(struct.pack(">I", MAX_MESSAGE) + b"x" * 1000)
        connection = server._frontends["liar"]
        await until(lambda: len(connection._partial) == 1004)
        liar.send(b"x" * 1000)
        await until(lambda: len(connection._partial) == 2004)
        assert sys.getsizeof(connection._partial) < 100_000
        async with wire.raw(server.address) as worse:
            await worse.greet("worse")
            worse.send(struct.pack(">I", MAX_MESSAGE + 1))
            assert await worse.closed()


@pytest.mark.parametrize("chunk", [1, 1000])
async def test_frames_arrive_whole_however_they_are_cut(wire: Wire, chunk: int) -> None:
    messages = [Cancel(["a" * size]) for size in (0, 1, 300, 70_000 if chunk > 3 else 700)]
    data = b"".join(frame(encode(message)) + frame(b"") for message in messages)
    async with wire.server() as server, wire.raw(server.address) as end:
        await end.greet("f")
        received = server.received()
        for start in range(0, len(data), chunk):
            end.send(data[start : start + chunk])
            await asyncio.sleep(0)
        assert [await anext(received) for _ in messages] == [("f", message) for message in messages]


@asynccontextmanager
async def _saying(wire: Wire, answer: bytes) -> AsyncIterator[str]:
    async def talk(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(answer)
        await reader.read(1000)
        with suppress(ConnectionError):
            await reader.read(1000)
        writer.transport.abort()

    async with tcp_server(talk, wire.server_context()) as port:
        yield f"{wire.scheme}://127.0.0.1:{port}"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", frame(GREETING + b" f"), bytes(8)])
async def test_a_server_that_does_not_answer_with_the_greeting_is_no_worker(
    wire: Wire, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the answer has a name, it is a client's greeting: the client has connected to itself."""
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT", 0.5)
    async with _saying(wire, answer) as address:
        with pytest.raises(PeerGone):
            async with wire.client(address, "f"):
                pass


# leaving


async def test_a_process_whose_tasks_are_cancelled_leaves_nothing(wire: Wire) -> None:
    async with wire.server() as outer:
        async with wire.client(outer.address, "before"):
            pass  # the tasks of the server have begun
        before = asyncio.all_tasks()

        async def live() -> None:
            async with wire.server() as server, wire.client(server.address, "f") as client:
                addresses.append(server.address)
                async with wire.raw(server.address), wire.client(outer.address, "g"):
                    async for _ in client.received():
                        pass

        for patience in (0.0, 0.001, 0.01, 0.1, 0.3):
            addresses: list[str] = []
            life = asyncio.create_task(live())
            await asyncio.sleep(patience)
            life.cancel()
            with pytest.raises(asyncio.CancelledError):
                await life
            await until(lambda: not asyncio.all_tasks() - before)
            await until(lambda: not outer._frontends and not outer._ungreeted)
            for address in addresses:
                with pytest.raises(PeerGone):
                    async with wire.client(address, "f"):
                        pass


async def test_connections_that_come_while_a_worker_leaves_are_closed(wire: Wire) -> None:
    """Otherwise frontends whose connections the kernel has accepted would wait for heartbeats."""
    for turns in range(8):
        async with wire.server() as server:
            port = int(server.address.rpartition(":")[2])
            late = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
            for _ in range(turns % 4):
                await asyncio.sleep(0)
        for end in late:
            end.setblocking(False)
            with end, suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(end, 1) == b""


async def test_a_workers_last_messages_arrive_though_the_frontend_goes_on_sending(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "LINGER", 60.0)
    server, last = await wire.server().__aenter__(), Failed("r", "x" * 3_000_000)
    async with wire.client(server.address, "f") as client:
        client._connection.pause_reading()
        await server.send("f", last)
        leaving = asyncio.create_task(server.__aexit__(None, None, None))
        for _ in range(20):
            client._connection.write(b"")
            await asyncio.sleep(0.001)
        client._connection.resume_reading()
        assert await anext(client.received()) == last
    await leaving


@TLS
async def test_a_worker_leaves_though_a_frontend_does_not_read(wire: Wire) -> None:
    server = await wire.server().__aenter__()
    async with wire.raw(server.address) as stopped:
        await stopped.greet("f")
        stopped.stop_reading()
        for _ in range(1000):
            await server.send("f", Outputs([b"x" * 20_000]))
        async with asyncio.timeout(60):
            await server.__aexit__(None, None, None)
        assert not stopped.reader.at_eof()
