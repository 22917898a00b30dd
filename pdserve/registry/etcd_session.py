"""One connection to etcd with one lease: the only place that imports aetcd.

Of aetcd we use the channel, the stubs and the message types. Its own watcher loses compaction errors and
deadlocks when its stream breaks, so watches and keep-alives here are gRPC streams of their own.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from pdserve.registry.base import Change

# gRPC's fork handlers only get in the way of a supervisor that starts processes
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import aetcd
import aetcd.rpc as rpc
from aetcd.utils import prefix_range_end

CALL_TIMEOUT = 2.0
_CHANNEL = {
    "grpc.max_receive_message_length": -1,
    "grpc.enable_http_proxy": 0,
    # a channel of one session must not inherit the back-off of the session that failed before it
    "grpc.use_local_subchannel_pool": 1,
}


class Lost(Exception):
    """The session, or the watch that raised it, cannot be used any more."""


class Session:
    """One channel and one lease. Every method raises Lost, after which the session is over for everybody."""

    def __init__(self, endpoint: tuple[str, int], ttl: int) -> None:
        self.target = "{}:{}".format(*endpoint)
        self.lost = asyncio.Event()
        self._ttl = ttl
        self._lease = 0
        self._reason = ""
        self._client = aetcd.Client(*endpoint, timeout=CALL_TIMEOUT, options=_CHANNEL)

    async def open(self) -> None:
        self._lease = (await self._call(self._client.lease(self._ttl))).id

    async def close(self) -> None:
        self.lost.set()
        await self._client.close()

    async def revoke(self) -> None:
        await self._call(self._client.revoke_lease(self._lease))

    async def put(self, key: str, value: bytes, *, leased: bool) -> None:
        await self._call(self._client.put(key.encode(), value, lease=self._lease if leased else None))

    async def delete(self, key: str) -> None:
        await self._call(self._client.delete(key.encode()))

    async def read(self, root: str, prefix: str) -> tuple[dict[str, bytes], int]:
        """Keys without the root, and the revision at which they were read."""
        found = await self._call(self._client.get_prefix((root + prefix).encode()))
        values = {_name(root, kv.key): kv.value for kv in found.kvs}
        return values, found.header.revision

    async def keep_alive(self) -> None:
        """Ends only with Lost.

        A read is always waiting on the stream, so that a broken connection is noticed at once; a server that
        hangs is noticed by its missing answer.
        """
        call = self._client.leasestub.LeaseKeepAlive()
        failed = asyncio.create_task(self.lost.wait())
        answer = asyncio.create_task(self._call(call.read()))
        try:
            while True:
                await self._call(call.write(rpc.LeaseKeepAliveRequest(ID=self._lease)))
                await asyncio.wait(
                    {answer, failed}, timeout=CALL_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
                )
                if not answer.done():
                    raise self._fail(f"no answer within {CALL_TIMEOUT:g} s")
                if getattr(answer.result(), "TTL", 0) <= 0:
                    raise self._fail("the lease has run out")
                answer = asyncio.create_task(self._call(call.read()))
                await asyncio.wait(
                    {answer, failed}, timeout=self._ttl / 3, return_when=asyncio.FIRST_COMPLETED
                )
                if answer.done() or failed.done():
                    raise self._fail("the connection broke")
        finally:
            call.cancel()
            for task in (answer, failed):
                task.cancel()
            await asyncio.gather(answer, failed, return_exceptions=True)

    async def watch(self, root: str, prefix: str, revision: int) -> AsyncIterator[list[Change]]:
        """Raises Lost also where only this watch is over (compacted, cancelled by the server)."""
        if self.lost.is_set():  # closed, it has no channel any more
            raise self._fail("the session was closed")
        start = (root + prefix).encode()
        create = rpc.WatchCreateRequest(key=start, range_end=prefix_range_end(start), start_revision=revision)
        call = rpc.WatchStub(self._client.channel).Watch()
        try:
            await self._call(call.write(rpc.WatchRequest(create_request=create)))
            while True:
                response = await self._call(call.read())
                if not isinstance(response, rpc.WatchResponse):
                    raise Lost("the server ended the watch")
                if response.canceled or response.compact_revision:
                    raise Lost(f"the server ended the watch: {response.cancel_reason or 'compacted'}")
                if changes := [_change(root, event) for event in response.events]:
                    yield changes
        finally:
            call.cancel()

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except (aetcd.ClientError, rpc.AioRpcError, rpc.BaseError, asyncio.InvalidStateError) as error:
            raise self._fail(_say(error)) from error
        except asyncio.CancelledError:
            # grpc.aio also says so when the channel is closed under a call; then nobody cancelled this task
            if self.lost.is_set() and not _cancelled():
                raise self._fail("the session was closed") from None
            raise

    def _fail(self, reason: str) -> Lost:
        self._reason = self._reason or reason
        self.lost.set()
        return Lost(f"{self.target}: {self._reason}")


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _say(error: BaseException) -> str:
    details = error.details() if isinstance(error, rpc.AioRpcError) else str(error)
    return (details or type(error).__name__).partition("\n")[0]


def _name(root: str, key: bytes) -> str:
    """Without the root. Keys of ours are UTF-8; others must not end a watch."""
    return key.decode(errors="replace").removeprefix(root)


def _change(root: str, event: Any) -> Change:
    return Change(_name(root, event.kv.key), None if event.type == rpc.Event.DELETE else event.kv.value)
