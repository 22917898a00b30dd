"""KV transfer between simulated engines: each runs a small TCP server, which decode engines ask for blocks.

As with RDMA, a read does not check whether the blocks still hold the promised KV: a late read may get another prompt's.
So the prefill engine also says whether it held the blocks until now."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from pdserve.contract.messages import KvHandle
from pdserve.engine.sim.model import Faults
from pdserve.runtime.tasks import Lifetime, TaskOwner
from pdserve.util.errors import Unavailable

_MAX_LINE = 64 << 20
"""Bytes of a message; a block takes about 20."""


class ReadBlocks(msgspec.Struct, frozen=True):
    engine_id: str
    """Of the prefill engine that has the KV; new at each start."""
    request_id: str
    done: bool = False
    """Whether to free the blocks, which were read or will not be read."""
    block_ids: list[int] = []


class BlockContents(msgspec.Struct, frozen=True):
    contents: list[int] = []
    refused: str = ""
    held: bool = False
    """With `done`: whether the blocks were held for this request until now."""


@dataclass
class KvServer(Lifetime):
    engine_id: str
    host: str
    contents: Callable[[list[int]], list[int]]
    release: Callable[[str], bool]
    faults: Faults
    port: int = 0

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with TaskOwner() as tasks:

            def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = tasks.start(self._serve(reader, writer), "sim side channel")
                task.add_done_callback(lambda _: writer.close())  # even if it is cancelled before it begins

            server = await asyncio.start_server(begin, self.host, 0, limit=_MAX_LINE)
            self.port = server.sockets[0].getsockname()[1]
            try:
                yield
            finally:
                server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            if self.faults.is_silent():
                await reader.read()
            elif line and not self.faults.deaf:
                answer = self._answer(msgspec.json.decode(line, type=ReadBlocks))
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            pass  # the reader disconnected, or is no simulated engine

    def _answer(self, read: ReadBlocks) -> BlockContents:
        if read.engine_id != self.engine_id:
            return BlockContents(refused=f"{self.engine_id} runs there now")
        held = read.done and self.release(read.request_id)
        return BlockContents(self.contents(read.block_ids), held=held)


class Unreachable(Unavailable):
    """The other engine accepts connections, but closes them without an answer."""


async def ask(handle: KvHandle, block_ids: list[int], timeout: float, *, done: bool = False) -> BlockContents:
    """Raises Unavailable if the other engine has ended, does not answer or was restarted."""
    read = ReadBlocks(handle.engine_id, handle.request_id, done, block_ids)
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(handle.host, handle.port, limit=_MAX_LINE)
            try:
                writer.write(msgspec.json.encode(read) + b"\n")
                line = await reader.readline()
                if not line:
                    raise Unreachable(f"{handle.engine_id} closed the connection")
                answer = msgspec.json.decode(line, type=BlockContents)
            finally:
                writer.close()
    except (OSError, ValueError) as error:
        raise Unavailable(f"no KV from {handle.engine_id}: {error!r}") from error
    if answer.refused:
        raise Unavailable(f"no KV from {handle.engine_id}: {answer.refused}")
    return answer
