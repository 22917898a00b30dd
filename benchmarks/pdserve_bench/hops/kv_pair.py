"""A lender and a borrower of KV (`kv_ends.py`), as the benchmark that started them sees the two."""

import asyncio
import contextlib
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

import msgspec

from pdserve.errors import Unavailable
from pdserve.kv.pool import PoolShape
from pdserve_bench.hops.kv_ends import Connect, Lent, Load, Taken
from pdserve_bench.hops.link import DEVICE, NetNamespace

_LOOPBACK = {"UCX_NET_DEVICES": "lo"}
_OVER_LINK = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
_QUIET = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "PYTHONWARNINGS": "ignore"}
_LONGEST_LINE = 16 << 20
_PATIENCE = 120.0
"""seconds for any answer, beside those of the load"""

Answer = TypeVar("Answer")


class EndLost(Unavailable):
    """A process of a pair ended, or did not answer; the text has its last words."""


@dataclass(frozen=True)
class Measured:
    taken: Taken
    lender_cpu: float
    """seconds, meanwhile"""


class KvPair:
    def __init__(self, lender: "_End", borrower: "_End", handshake: float) -> None:
        self._lender, self._borrower = lender, borrower
        self.handshake = handshake
        """seconds from the lender's metadata in hand to a first block that had arrived"""

    async def measure(self, load: Load) -> Measured:
        """Raises EndLost, also where the wrong bytes arrived."""
        await self._borrower.ask(msgspec.json.encode(load), bool)
        before = await self._lender.ask(b"", float)
        taken = await self._borrower.ask(b"", Taken, _PATIENCE + load.seconds)
        return Measured(taken, await self._lender.ask(b"", float) - before)


@asynccontextmanager
async def kv_pair(
    shape: PoolShape, seed: int, link: tuple[NetNamespace, NetNamespace] | None = None
) -> AsyncIterator[KvPair]:
    """Two new processes that have just connected, on this host or at the two ends of a link. Raises EndLost."""
    address = link[0].address if link else "127.0.0.1"
    variables = _OVER_LINK if link else _LOOPBACK
    argv = (msgspec.json.encode(shape).decode(), address, str(seed))
    async with AsyncExitStack() as stack:
        lender = await stack.enter_async_context(_end("lend", argv, variables, link[0] if link else None))
        borrower = await stack.enter_async_context(_end("borrow", argv, variables, link[1] if link else None))
        lent = await lender.answer(Lent)
        await borrower.answer(bool)
        handshake = await borrower.ask(msgspec.json.encode(Connect(lent, address)), float)
        yield KvPair(lender, borrower, handshake)


class _End:
    def __init__(self, part: str, process: asyncio.subprocess.Process, log: BinaryIO) -> None:
        self._part, self._process, self._log = part, process, log

    async def ask(self, line: bytes, kind: type[Answer], patience: float | None = None) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()
        return await self.answer(kind, patience)

    async def answer(self, kind: type[Answer], patience: float | None = None) -> Answer:
        patience = patience or _PATIENCE
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(patience):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise EndLost(f"the process that {self._part}s KV is silent for {patience:g} s") from None
        if not line:
            self._log.seek(0)
            words = self._log.read().decode(errors="replace").strip().splitlines()
            raise EndLost(
                f"the process that {self._part}s KV ended: {words[-1] if words else 'without a word'}"
            )
        return msgspec.json.decode(line, type=kind)


@asynccontextmanager
async def _end(
    part: str, argv: tuple[str, ...], variables: Mapping[str, str], place: NetNamespace | None
) -> AsyncIterator[_End]:
    """In a process group of its own: Ctrl-C is for this process, which ends it."""
    command = (sys.executable, "-m", "pdserve_bench.hops.kv_ends", part, *argv)
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(place.command(*command) if place else command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=log,
            env={**_QUIET, **os.environ, **variables},
            limit=_LONGEST_LINE,
            process_group=0,
        )
        try:
            yield _End(part, process, log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
