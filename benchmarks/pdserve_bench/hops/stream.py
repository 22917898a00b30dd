"""The TCP stream between a decode worker and a frontend, alone, with TLS: two processes, each on the event loop of the
real ones, and messages like the outputs of one engine step, each sent in a turn of the event loop of its own. Against a
bare TCP connection in the same two processes that carries as many bytes in the clear, unread."""

import asyncio
import signal
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from pdserve.credentials import Credentials, create
from pdserve.engine.sim import wire
from pdserve.errors import Unavailable
from pdserve.messages import Cancel, Outputs, encode
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from pdserve_bench.hops.turns import HopOptions, HopTurn, alternate, section
from pdserve_bench.progress import begin
from pdserve_bench.report import Column, Report
from pdserve_bench.systems.cpu import cpu_seconds

NAMES = OURS, BASELINE = "stream", "bare TCP"
HOST = "127.0.0.1"
SIZES = (1, 32, 128)
BURST = 200
COST = "CPU of both sides, us"
FRONTEND, SPEED = Column("of it the frontend, us", ".1f"), Column("messages/s", ",.0f")
_SHARE = 1 / 3
"""of the options' seconds: thousands of messages"""
_PATIENCE = 60.0


async def measure(options: HopOptions) -> AsyncIterator[Report]:
    turns: list[HopTurn] = []
    seconds = _SHARE * options.seconds
    async with AsyncExitStack() as stack:
        begin("stream: starting two processes", 3.0)
        worker, frontend = await stack.enter_async_context(_ends(options.folder))
        for name in NAMES:  # warms both processes up
            await _turn(worker, frontend, name, SIZES[0], 0.2)
        for size in SIZES:
            for number in range(options.rounds):
                phase = f"stream: outputs of {size} request{'s'[: size > 1]}, round {number + 1}"
                begin(phase, 2 * seconds)
                for name in alternate(NAMES, number):
                    turns.append(await _turn(worker, frontend, name, size, seconds))
                yield _section(turns)


def _section(turns: list[HopTurn]) -> Report:
    title = "Stream: CPU for each message from the decode worker to the frontend"
    note = f"As fast as they go, {BURST} at a time."
    report = section(turns, NAMES, title, "requests", COST, [FRONTEND, SPEED], note)
    size, cost, _, _, ratio, *_ = report.tables[0].rows[-1]
    assert isinstance(size, int)
    assert isinstance(cost, float)
    report.lead = (
        f"Stream: the outputs of {size} requests cost both sides {cost:.0f} us of CPU, {cost / size:.1f} for "
    )
    report.lead += f"each token, {ratio:.2f} times bare TCP." if ratio else "each token."
    return report


async def _turn(worker: "End", frontend: "End", system: str, size: int, seconds: float) -> HopTurn:
    before = [cpu_seconds(end.pid) for end in (frontend, worker)]
    messages, took = await frontend.ask((system == BASELINE, size, seconds))
    mine, theirs = (cpu_seconds(end.pid) - then for end, then in zip((frontend, worker), before, strict=True))
    per = 1e6 / messages
    costs = {COST: per * (mine + theirs), FRONTEND.name: per * mine, SPEED.name: messages / took}
    return HopTurn(system, size, costs)


# ── the two processes, as the benchmark sees them ────────────────────────────────────────────────────────────────────


class End:
    """A process that answers over a pipe, and ends with it."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    async def ask(self, *question: object) -> Any:
        """Send the question, if any, and return the next answer. Raises Unavailable where the process has ended, or
        does not answer."""
        for each in question:
            self._pipe.send(each)
        deadline = time.monotonic() + _PATIENCE
        while not self._pipe.poll():
            if time.monotonic() > deadline:
                raise Unavailable(f"process {self.pid} of the benchmark is silent for {_PATIENCE:g} s")
            await asyncio.sleep(0.01)
        try:
            return self._pipe.recv()
        except EOFError:
            raise Unavailable(f"process {self.pid} of the benchmark has ended") from None

    def close(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.join()


@asynccontextmanager
async def _ends(folder: Path) -> AsyncIterator[tuple[End, End]]:
    credentials = create(folder / "credentials").folder
    with closing(End(_worker, credentials)) as worker:
        addresses = await worker.ask()
        with closing(End(_frontend, credentials, *addresses)) as frontend:
            await frontend.ask()
            yield worker, frontend


# ── worker ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def outputs(size: int) -> Outputs:
    """One engine step's, of so many requests, a token for each."""
    ids = (f"cmpl-bench-{number:012x}-0-{number:08x}" for number in range(size))
    return Outputs(wire.write_outputs([wire.CoreOutput(request_id, [316]) for request_id in ids]))


@cache
def frame_bytes(size: int) -> int:
    """Size of such a message on the wire, with its length before it."""
    return len(encode(outputs(size))) + 4


def _worker(pipe: Connection, credentials: Path) -> None:
    """Serve the stream and the baseline, and send where both listen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which ends this process
    uvloop.run(_serve(pipe, Credentials(credentials)))


async def _serve(pipe: Connection, credentials: Credentials) -> None:
    messages = {size: outputs(size) for size in SIZES}
    bare = await asyncio.start_server(_serve_bare, HOST, 0)
    async with bare, TcpStreamServer(HOST, credentials) as server:
        pipe.send((server.address, bare.sockets[0].getsockname()[1]))
        async for frontend, message in server.received():
            if isinstance(message, Cancel):
                size, count = map(int, message.request_ids)
                for _ in range(count):
                    await server.send(frontend, messages[size])
                    await asyncio.sleep(0)


async def _serve_bare(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size, count = struct.unpack("!II", await reader.readexactly(8))
            message = bytes(frame_bytes(size))
            for _ in range(count):
                writer.write(message)
                await asyncio.sleep(0)


# ── frontend ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Bare(asyncio.Protocol):
    """Counts what arrives, and reads none of it."""

    missing = 0

    def __init__(self) -> None:
        self.all = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.missing -= len(data)
        if not self.missing:
            self.all.set()


def _frontend(pipe: Connection, credentials: Path, address: str, port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(_ask(pipe, Credentials(credentials), address, port))


async def _ask(pipe: Connection, credentials: Credentials, address: str, port: int) -> None:
    """Measure what comes over the pipe, until it ends."""
    transport, bare = await asyncio.get_running_loop().create_connection(Bare, HOST, port)
    async with TcpStreamClient(address, "bench", credentials) as stream:
        received = stream.received()

        async def burst(is_bare: bool, size: int) -> None:
            if is_bare:
                bare.all.clear()
                bare.missing = BURST * frame_bytes(size)
                transport.write(struct.pack("!II", size, BURST))
                await bare.all.wait()
            else:
                await stream.send(Cancel([str(size), str(BURST)]))
                for _ in range(BURST):
                    await anext(received)

        pipe.send("ready")
        with suppress(EOFError):
            while True:
                is_bare, size, seconds = await asyncio.to_thread(pipe.recv)
                began, bursts = time.perf_counter(), 0
                while time.perf_counter() < began + seconds:
                    await burst(is_bare, size)
                    bursts += 1
                pipe.send((BURST * bursts, time.perf_counter() - began))
    transport.close()
