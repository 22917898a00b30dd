"""How simulated engines hand KV over: a small TCP server beside each prefill engine, asked by decode engines.

As with RDMA, a read does not check whether the blocks are still those that were promised: the answer says what lies in
them now. A read that comes too late gets another prompt's KV, and wrong tokens.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from pdserve.engine.sim.model import Faults
from pdserve.errors import Unavailable
from pdserve.messages import KvHandle
from pdserve.tasks import Lifetime


class ReadBlocks(msgspec.Struct, frozen=True):
    engine_id: str
    """the boot that the decode engine means"""
    request_id: str
    done: bool = False
    """the decode engine has what it wanted, or wants nothing: free the blocks"""
    block_ids: list[int] = []


class BlockContents(msgspec.Struct, frozen=True):
    contents: list[int] = []
    refused: str = ""


@dataclass
class SideServer(Lifetime):
    engine_id: str
    host: str
    contents: Callable[[list[int]], list[int]]
    release: Callable[[str], None]
    faults: Faults
    port: int = 0

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._begin, self.host, 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="side channel")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())  # also where it is cancelled before it begins

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            if self.faults.silent():
                await reader.read()
            elif line and not self.faults.deaf:
                answer = self._answer(msgspec.json.decode(line, type=ReadBlocks))
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            pass  # a reader that went away, or is not an engine of ours

    def _answer(self, read: ReadBlocks) -> BlockContents:
        if read.engine_id != self.engine_id:
            return BlockContents(refused=f"this is {self.engine_id}")
        if read.done:
            self.release(read.request_id)
        return BlockContents(self.contents(read.block_ids))


class Unreachable(Unavailable):
    """The other engine is there, and its side channel is not."""


async def ask(handle: KvHandle, block_ids: list[int], timeout: float, *, done: bool = False) -> BlockContents:
    """Raises Unavailable when the other engine is gone, silent or of another boot."""
    read = ReadBlocks(handle.engine_id, handle.request_id, done, block_ids)
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(handle.host, handle.port)
            try:
                writer.write(msgspec.json.encode(read) + b"\n")
                line = await reader.readline()
                if not line:
                    raise Unreachable(f"{handle.engine_id} hangs up")
                found = msgspec.json.decode(line, type=BlockContents)
            finally:
                writer.close()
    except (OSError, TimeoutError, msgspec.MsgspecError) as error:
        raise Unavailable(f"no KV from {handle.engine_id}: {error!r}") from error
    if found.refused:
        raise Unavailable(f"no KV from {handle.engine_id}: {found.refused}")
    return found
