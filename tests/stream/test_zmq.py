"""What only the real thing can show: processes that die or hang, silence, slow readers."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from pdserve.errors import PeerGone
from pdserve.messages import Cancel, Failed, Hello, Outputs
from pdserve.stream.zmq.client import ZmqStreamClient
from pdserve.stream.zmq.server import ZmqStreamServer

_PEER = """
import asyncio, sys
from pdserve.messages import Failed, Hello
from pdserve.stream import connect, listen

async def server():
    async with listen("127.0.0.1") as server:
        print(server.address, flush=True)
        async for frontend, message in server.received():
            if message is not None:
                await server.send(frontend, Failed("r", "heard"))

async def client(address):
    async with connect(address, "other") as client:
        await client.send(Hello("1"))
        print("connected", flush=True)
        async for message in client.received():
            pass

asyncio.run(client(sys.argv[1]) if sys.argv[1:] else server())
"""


@asynccontextmanager
async def _peer(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PEER, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize(("how", "within"), [(signal.SIGKILL, 0.5), (signal.SIGSTOP, 3.0)])
async def test_a_worker_that_dies_or_hangs_is_noticed(how: signal.Signals, within: float) -> None:
    async with _peer() as (process, address), ZmqStreamClient(address, "f", silence=1.5) as client:
        received = client.received()
        await client.send(Hello("1"))
        assert await anext(received) == Failed("r", "heard")
        os.kill(process.pid, how)
        started = time.monotonic()
        with pytest.raises(PeerGone):
            await anext(received)
        assert time.monotonic() - started < within
        with pytest.raises(PeerGone):
            await client.send(Hello("2"))


@pytest.mark.parametrize(("how", "within"), [(signal.SIGKILL, 2.5), (signal.SIGSTOP, 4.0)])
async def test_a_frontend_that_dies_or_hangs_is_noticed(how: signal.Signals, within: float) -> None:
    async with ZmqStreamServer("127.0.0.1", silence=2) as server, _peer(server.address) as (process, _):
        received = server.received()
        assert await anext(received) == ("other", Hello("1"))
        os.kill(process.pid, how)
        started = time.monotonic()
        assert await anext(received) == ("other", None)
        assert time.monotonic() - started < within


async def test_a_frontend_that_was_given_up_is_told_when_it_wakes() -> None:
    async with ZmqStreamServer("127.0.0.1", silence=0.2) as server:
        received = server.received()
        entering = asyncio.ensure_future(anext(received))
        async with ZmqStreamClient(server.address, "f", silence=60) as client:
            assert await entering == ("f", None)
            reading = asyncio.ensure_future(anext(received))
            with pytest.raises(PeerGone):
                async with asyncio.timeout(5):
                    await anext(client.received())
            reading.cancel()


async def test_an_idle_connection_stays(caplog: pytest.LogCaptureFixture) -> None:
    async with ZmqStreamServer("127.0.0.1", silence=1.5) as server:
        received = server.received()
        waiting = asyncio.ensure_future(anext(received))
        async with ZmqStreamClient(server.address, "f", silence=1.5) as client:
            idle = asyncio.ensure_future(anext(client.received()))
            done, _ = await asyncio.wait({idle, waiting}, timeout=4)
            assert not done
            await client.send(Hello("1"))
            assert await waiting == ("f", Hello("1"))
            idle.cancel()
    assert "gone" not in caplog.text


async def test_a_frontend_that_stops_reading_costs_a_second_and_is_gone() -> None:
    async with ZmqStreamServer("127.0.0.1") as server, _peer(server.address) as (process, _):
        received = server.received()
        assert await anext(received) == ("other", Hello("1"))
        os.kill(process.pid, signal.SIGSTOP)
        longest, big = 0.0, Outputs([b"x" * 10_000])
        gone = False
        while not gone:
            before = time.monotonic()
            try:
                await server.send("other", big)
            except PeerGone:
                gone = True
            longest = max(longest, time.monotonic() - before)
        assert 0.9 < longest < 2.0
        assert await anext(received) == ("other", None)


async def test_a_worker_whose_message_cannot_be_decoded_is_gone_and_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ZmqStreamServer("127.0.0.1") as server:
        at_server = server.received()
        waiting = asyncio.ensure_future(anext(at_server))
        async with ZmqStreamClient(server.address, "f") as client:
            await client.send(Hello("1"))
            assert await waiting == ("f", Hello("1"))
            (peer,) = server._by_identity
            at_client = client.received()
            await server.send("f", Failed("r", "before"))
            server._socket.raw.send_multipart((peer, b"\xc1 not msgpack"))
            await server.send("f", Failed("r", "after"))
            assert await anext(at_client) == Failed("r", "before")
            with pytest.raises(PeerGone):
                await anext(at_client)
            with pytest.raises(PeerGone):
                await client.send(Hello("2"))
            assert await asyncio.wait_for(anext(at_server), 2) == ("f", None)
    assert "its message cannot be read" in caplog.text


async def test_a_frontends_message_that_cannot_be_decoded_is_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ZmqStreamServer("127.0.0.1") as server:
        received = server.received()
        waiting = asyncio.ensure_future(anext(received))
        async with ZmqStreamClient(server.address, "f") as client:
            client._socket.raw.send(b"\xc1 not msgpack")
            await client.send(Cancel(["a"]))
            assert await waiting == ("f", Cancel(["a"]))
    assert "message of frontend f skipped" in caplog.text


async def test_a_stranger_without_a_greeting_is_told_off() -> None:
    async with ZmqStreamServer("127.0.0.1") as server:
        reading = asyncio.ensure_future(anext(server.received()))
        stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        with stranger:
            stranger.linger = 0
            stranger.connect(server.address)
            stranger.send(b"x")
            assert await asyncio.to_thread(stranger.poll, 2000)
            assert stranger.recv() == b"-"
        reading.cancel()


async def test_throughput_is_far_above_what_a_frontend_needs() -> None:
    """20,000 messages a second is the aim on a quiet machine; this bound also holds on a busy one."""
    async with ZmqStreamServer("127.0.0.1") as server:
        received = server.received()
        waiting = asyncio.ensure_future(anext(received))
        async with ZmqStreamClient(server.address, "f") as client:
            await client.send(Hello("1"))
            await waiting
            before, message, count = time.process_time(), Outputs([b"x" * 300]), 20_000
            sending = asyncio.create_task(_send_many(server, message, count))
            replies = client.received()
            for _ in range(count):
                await anext(replies)
            await sending
            assert time.process_time() - before < 2.0


async def _send_many(server: ZmqStreamServer, message: Outputs, count: int) -> None:
    for number in range(count):
        await server.send("f", message)
        if number % 100 == 0:
            await asyncio.sleep(0)
