"""The processes between which a hop is measured, as the benchmark that starts them sees them: each is asked with a line
of JSON on its stdin, and answers with one on its stdout. They end when their stdin does."""

import asyncio
import contextlib
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

import msgspec

from pdserve.errors import Unavailable

PATIENCE = 120.0
"""seconds for any answer, beside those of the load"""
_LONGEST_LINE = 16 << 20

Answer = TypeVar("Answer")


class EndLost(Unavailable):
    """A process ended, or did not answer; the text has its last words."""


@dataclass(frozen=True)
class End:
    name: str
    process: asyncio.subprocess.Process
    log: BinaryIO

    async def ask(self, question: object, kind: type[Answer], patience: float | None = None) -> Answer:
        """`patience` in seconds. Raises EndLost."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(question) + b"\n")
        with contextlib.suppress(ConnectionError):
            await self.process.stdin.drain()
        return await self.answer(kind, patience)

    async def answer(self, kind: type[Answer], patience: float | None = None) -> Answer:
        """What it says without being asked. Raises EndLost."""
        patience = patience or PATIENCE
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(patience):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise EndLost(f"{self.name} is silent for {patience:g} s") from None
        if not line:
            self.log.seek(0)
            words = self.log.read().decode(errors="replace").strip().splitlines()
            raise EndLost(f"{self.name} ended: {words[-1] if words else 'without a word'}")
        return msgspec.json.decode(line, type=kind)


@asynccontextmanager
async def end(
    module: str,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[End]:
    """The program `module`, in a process group of its own: Ctrl-C is for this process, which ends it."""
    command = (sys.executable, "-m", module, *arguments)
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=log,
            env={**os.environ, **(variables or {})},
            limit=_LONGEST_LINE,
            process_group=0,
        )
        try:
            yield End(f"{module} {arguments[0]}", process, log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
