"""The two processes of the stream's benchmark, each on the event loop that the real ones have.

    python -m pdserve_bench.hops.stream_ends worker CREDENTIALS      says where it listens, serves until its stdin ends
    python -m pdserve_bench.hops.stream_ends frontend CREDENTIALS ADDRESS PORT      measures what its stdin asks for

The worker serves the stream, with TLS as a graph does, and beside it a bare protocol that sends as many bytes back,
unread: the baseline. Asked for a number of messages it sends each in a turn of its event loop of its own, as steps of
an engine do.
"""

import asyncio
import sys
import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import msgspec
import uvloop

from pdserve.credentials import Credentials
from pdserve.engine.sim import wire
from pdserve.messages import Cancel, Outputs, encode, encode_to_decode
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from pdserve.tasks import Lifetime
from pdserve_bench.samples import percentile

HOST = "127.0.0.1"
SIZES = (1, 32, 128)
"""requests whose outputs are in a message"""
BURST = 200
"""messages that are asked for at a time where throughput is measured"""
_LENGTH = 4
"""bytes before each frame of the stream"""


class Listening(msgspec.Struct):
    address: str
    bare_port: int


class StreamTask(msgspec.Struct):
    bare: bool
    size: int
    burst: int
    seconds: float


class StreamFigures(msgspec.Struct):
    messages: int
    seconds: float
    p50: float
    """seconds, from asking until the last message of a burst"""
    p99: float


def outputs(size: int) -> Outputs:
    """One engine step's, of so many requests, a token for each."""
    ids = (f"cmpl-bench-{number:012x}-0-{number:08x}" for number in range(size))
    return Outputs(wire.write_outputs([wire.CoreOutput(request_id, [316]) for request_id in ids]))


@cache
def frame_bytes(size: int) -> int:
    """Size of such a message on the wire."""
    return len(encode(outputs(size))) + _LENGTH


def _request(size: int, count: int) -> Cancel:
    """What the frontend asks with: a small message of the stream."""
    return Cancel([f"{size:08}", f"{count:08}"])


_REQUEST_BYTES = len(encode_to_decode(_request(1, 1))) + _LENGTH


# ── worker ─────────────────────────────────────────────────────────────────────────────────────────────────


class BareWorker(asyncio.Protocol):
    def __init__(self) -> None:
        self._left = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._left += data
        while len(self._left) >= _REQUEST_BYTES:
            size, count = int(self._left[:8]), int(self._left[8:16])
            del self._left[:_REQUEST_BYTES]
            task = asyncio.ensure_future(self._answer(bytes(frame_bytes(size)), count))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: bytes, count: int) -> None:
        for _ in range(count):
            self._transport.write(message)
            await asyncio.sleep(0)


async def work(credentials: Credentials) -> None:
    messages = {size: outputs(size) for size in SIZES}
    loop = asyncio.get_running_loop()
    bare = await loop.create_server(BareWorker, HOST, 0)
    async with bare, TcpStreamServer(HOST, credentials) as server:
        _say(Listening(server.address, bare.sockets[0].getsockname()[1]))
        serving = asyncio.create_task(_serve(server, messages))
        async for _ in _lines():
            pass
        serving.cancel()


async def _serve(server: TcpStreamServer, messages: dict[int, Outputs]) -> None:
    async for frontend, message in server.received():
        if isinstance(message, Cancel):
            size, count = map(int, message.request_ids)
            for _ in range(count):
                await server.send(frontend, messages[size])
                await asyncio.sleep(0)


# ── frontend ───────────────────────────────────────────────────────────────────────────────────────────────


class Asker(Lifetime):
    """A connection to the worker."""

    @abstractmethod
    async def ask(self, size: int, count: int) -> None:
        """Ask for so many messages, and wait for all of them."""


class StreamAsker(Asker):
    def __init__(self, address: str, credentials: Credentials) -> None:
        self._client = TcpStreamClient(address, "bench", credentials)

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with self._client:
            self._received = self._client.received()
            yield

    async def ask(self, size: int, count: int) -> None:
        await self._client.send(_request(size, count))
        for _ in range(count):
            await anext(self._received)


class BareAsker(Asker, asyncio.Protocol):
    def __init__(self, port: int) -> None:
        self._port = port
        self._missing = 0
        self._done = asyncio.Event()

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, HOST, self._port)
        self._transport: asyncio.WriteTransport = transport
        try:
            yield
        finally:
            transport.close()

    async def ask(self, size: int, count: int) -> None:
        self._done.clear()
        self._missing = count * frame_bytes(size)
        self._transport.write(f"{size:08}{count:08}".encode().ljust(_REQUEST_BYTES))
        await self._done.wait()

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if not self._missing:
            self._done.set()


async def ask(credentials: Credentials, address: str, port: int) -> None:
    async with StreamAsker(address, credentials) as stream, BareAsker(port) as bare:
        async for line in _lines():
            task = msgspec.json.decode(line, type=StreamTask)
            _say(await _measured(bare if task.bare else stream, task))


async def _measured(asker: Asker, task: StreamTask) -> StreamFigures:
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() < begin + task.seconds:
        before = time.perf_counter()
        await asker.ask(task.size, task.burst)
        times.append(time.perf_counter() - before)
    seconds = time.perf_counter() - begin
    return StreamFigures(len(times) * task.burst, seconds, percentile(times, 0.5), percentile(times, 0.99))


# ── both ───────────────────────────────────────────────────────────────────────────────────────────────────


async def _lines() -> AsyncIterator[bytes]:
    """Yield the lines of stdin until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        yield line


def _say(message: msgspec.Struct) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        uvloop.run(work(Credentials(Path(sys.argv[2]))))
    else:
        uvloop.run(ask(Credentials(Path(sys.argv[2])), sys.argv[3], int(sys.argv[4])))
