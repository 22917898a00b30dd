"""The two processes between which KV is moved: `lend` has a pool full of known bytes, `borrow` reads it and takes the
time. `python -m pdserve_bench.hops.kv_ends lend|borrow SHAPE ADDRESS SEED` speaks JSON in lines over stdin and stdout
and ends when stdin does; `kv_pair.py` is the other side of that.

No word of the lender's pool is there twice. Each measurement begins with reads that are in no figure: what must have
arrived is compared with what did, and nothing else may have been written. What the last of the timed reads brought is
compared too."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve.kv.pool import LOOK_EVERY, KvPool, KvRead, PoolOffer, PoolShape, RemotePool, host_memory

Blocks = NDArray[np.int32]
Say = Callable[[object], None]
Place = TypeVar("Place")
_PLACES = 8
"""different places that each transfer in flight goes through, so that what it moves is in no cache"""
AT_LEAST = 4
"""transfers of each that is in flight, also where the time is over before"""
_AT_ONCE = 1 << 20
"""bytes per call of plain TCP"""


class Lent(msgspec.Struct, frozen=True):
    """What the lender says first."""

    offer: PoolOffer
    port: int
    """where it sends bytes over plain TCP"""


class Connect(msgspec.Struct, frozen=True, tag=True):
    lent: Lent
    address: str
    """of the lender, for plain TCP"""


class PullBlocks(msgspec.Struct, frozen=True, tag=True):
    blocks: int
    seconds: float
    in_flight: int = 1
    """reads of so many blocks each at any time: one that is done is followed by the next"""
    look_every: float = LOOK_EVERY


class CopyBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy with one thread inside the process, a block in one layer at a time, as the reads do it."""

    blocks: int
    seconds: float


class ReceiveBytes(msgspec.Struct, frozen=True, tag=True):
    """Over plain TCP."""

    size: int
    seconds: float


class Taken(msgspec.Struct, frozen=True):
    samples: list[list[float]]
    """seconds of each transfer, for each place in flight"""
    wall: float
    """seconds that all of it took"""
    cpu: float
    """seconds that this process used meanwhile"""
    held: list[float] = []
    """seconds until the call returned that began a transfer: an engine that makes it does nothing else meanwhile"""


Load = PullBlocks | CopyBlocks | ReceiveBytes
Command = Connect | Load
_COMMANDS = msgspec.json.Decoder(Command)


def lend(shape: PoolShape, address: str, say: Say) -> None:
    pool = KvPool("lender", shape)
    for layer in range(shape.layers):
        pool.memory[layer] = _content(shape, layer, np.arange(shape.blocks, dtype=np.int32))
    listener = socket.create_server((address, 0))
    threading.Thread(target=_serve_bytes, args=(listener, pool.memory.data.cast("B")), daemon=True).start()
    say(Lent(pool.offer(), listener.getsockname()[1]))
    for _ in sys.stdin:
        pool.forget_notifications()
        say(time.process_time())


def borrow(shape: PoolShape, seed: int, say: Say) -> None:
    def prepared() -> None:
        """The other side takes the lender's CPU time before it answers with a line: the clock starts now."""
        say(True)
        sys.stdin.readline()

    borrower = Borrower(shape, seed, prepared)
    say(True)
    for line in sys.stdin:
        match _COMMANDS.decode(line):
            case Connect(lent, address):
                say(borrower.connect(lent, address))
            case PullBlocks() as command:
                say(borrower.read(command))
            case CopyBlocks(blocks, seconds):
                say(borrower.copy(blocks, seconds))
            case ReceiveBytes(size, seconds):
                say(borrower.receive(size, seconds))


class Borrower:
    def __init__(self, shape: PoolShape, seed: int, prepared: Callable[[], None]) -> None:
        self._shape = shape
        self._prepared = prepared
        self._pool = KvPool("borrower", shape)
        self._random = np.random.default_rng(seed)
        self._source = host_memory(shape)
        self._source[:] = 1
        self._remote: RemotePool
        self._stream: socket.socket

    def connect(self, lent: Lent, address: str) -> float:
        """Seconds from the lender's metadata in hand to a first block that has arrived."""
        began = time.perf_counter()
        self._remote = self._pool.connect(lent.offer)
        place = self._drawn(1), self._drawn(1)
        self._remote.read(*place).wait(0)
        taken = time.perf_counter() - began
        self._compare(*place)
        self._stream = socket.create_connection((address, lent.port))
        return taken

    def read(self, command: PullBlocks) -> Taken:
        """Raises TransferFailed, and ValueError where the bytes are not those that must be there."""
        flights = self._flights(command.in_flight, command.blocks)
        self._pool.memory[:] = 0
        for flight in flights:
            self._remote.read(*flight.place).wait(command.look_every)
            self._compare(*flight.place)
        self._compare_rest(command.in_flight * command.blocks)
        self._pool.memory[:] = 0
        self._prepared()
        held = []
        cpu, began = time.process_time(), time.perf_counter()
        busy = list(flights)
        for flight in flights:
            held.append(flight.begin())
        while busy:
            for flight in [*busy]:
                if not flight.landed():
                    continue
                if time.perf_counter() - began < command.seconds or len(flight.samples) < AT_LEAST:
                    held.append(flight.begin())
                else:
                    busy.remove(flight)
            if command.look_every and busy:
                time.sleep(command.look_every)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        for flight in flights:
            self._compare(*flight.place)
        return Taken([flight.samples for flight in flights], wall, cpu, held)

    def copy(self, blocks: int, seconds: float) -> Taken:
        size = self._shape.block_bytes
        source, target = self._source.reshape(-1, size), self._pool.memory.reshape(-1, size)
        count = blocks * self._shape.layers
        places = [
            (
                self._random.permutation(len(source))[:count],
                int(self._random.integers(len(target) - count + 1)),
            )
            for _ in range(_PLACES)
        ]

        def once(place: tuple[NDArray[np.int64], int]) -> None:
            rows, start = place
            np.take(source, rows, axis=0, out=target[start : start + count], mode="clip")

        return self._repeat(cycle(places), once, seconds)

    def receive(self, size: int, seconds: float) -> Taken:
        buffer = memoryview(bytearray(_AT_ONCE))

        def once(_: int) -> None:
            self._stream.sendall(size.to_bytes(8))
            left = size
            while left:
                if not (count := self._stream.recv_into(buffer[: min(left, _AT_ONCE)])):
                    raise ConnectionError("the lender closed the plain TCP connection")
                left -= count

        return self._repeat(cycle([0]), once, seconds)

    def _repeat(self, places: Iterator[Place], once: Callable[[Place], None], seconds: float) -> Taken:
        once(next(places))
        self._prepared()
        samples: list[float] = []
        cpu, began = time.process_time(), time.perf_counter()
        while len(samples) < AT_LEAST or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            once(next(places))
            samples.append(time.perf_counter() - start)
        return Taken([samples], time.perf_counter() - began, time.process_time() - cpu)

    def _drawn(self, count: int, of: Blocks | None = None) -> Blocks:
        """Draw blocks in random order, as an engine's free blocks are after a while: neighbours could be moved as
        one."""
        population = np.arange(self._shape.blocks) if of is None else of
        return self._random.permutation(population)[:count].astype(np.int32)

    def _flights(self, count: int, blocks: int) -> list["_Flight"]:
        """They write into different parts of the pool."""
        parts = np.array_split(self._drawn(self._shape.blocks), count)
        return [
            _Flight(self._remote, [(self._drawn(blocks, part), self._drawn(blocks)) for _ in range(_PLACES)])
            for part in parts
        ]

    def _compare(self, here: Blocks, there: Blocks) -> None:
        for layer in range(self._shape.layers):
            if not np.array_equal(self._pool.memory[layer, here], _content(self._shape, layer, there)):
                raise ValueError(f"the bytes that arrived in layer {layer} are not those that were read")

    def _compare_rest(self, blocks: int) -> None:
        words = self._pool.memory.view(np.uint64)
        if (written := int(words.any(axis=2).sum())) != blocks * self._shape.layers:
            raise ValueError(
                f"{blocks} blocks were read in {self._shape.layers} layers, {written} were written"
            )


class _Flight:
    """One read after the other."""

    def __init__(self, remote: RemotePool, places: list[tuple[Blocks, Blocks]]) -> None:
        self._remote, self._places = remote, cycle(places)
        self.place = places[0]
        """where the newest read goes, and from where it comes"""
        self._read: KvRead
        self._began = 0.0
        self.samples: list[float] = []

    def begin(self) -> float:
        """Seconds for which this call held its caller."""
        self.place = next(self._places)
        self._began = time.perf_counter()
        self._read = self._remote.read(*self.place)
        return time.perf_counter() - self._began

    def landed(self) -> bool:
        if self._read.done():
            self.samples.append(time.perf_counter() - self._began)
            return True
        return False


def _content(shape: PoolShape, layer: int, blocks: Blocks) -> NDArray[np.uint8]:
    """Content of the lender's blocks in this layer: a number for each word, none of them 0."""
    words = shape.block_bytes // 8
    first = (layer * shape.blocks + blocks.astype(np.uint64)) * np.uint64(words) + np.uint64(1)
    numbers = first[:, None] + np.arange(words, dtype=np.uint64)
    numbers *= np.uint64(0x9E3779B97F4A7C15)  # odd: no two of them become equal
    return numbers.view(np.uint8)


def _serve_bytes(listener: socket.socket, content: memoryview) -> None:
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := stream.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(asked)
        while left:
            piece = content[: min(left, _AT_ONCE)]
            stream.sendall(piece)
            left -= len(piece)


def _own_stdout() -> Say:
    """What libraries print goes to stderr instead."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(answer: object) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    return say


if __name__ == "__main__":
    part, shape_json, address, seed = sys.argv[1:]
    shape = msgspec.json.decode(shape_json, type=PoolShape)
    if part == "lend":
        lend(shape, address, _own_stdout())
    else:
        borrow(shape, int(seed), _own_stdout())
