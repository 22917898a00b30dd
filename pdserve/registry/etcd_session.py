"""A connection to etcd with a lease. No other module imports aetcd.

Of aetcd only the channel, the stubs and the message types are used. Its watcher loses compaction errors and deadlocks
when its stream breaks, so this module has its own gRPC streams for watches and keep-alives.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any

from pdserve.registry.base import Change
from pdserve.runtime.tasks import is_cancelled
from pdserve.security.credentials import CERTIFICATE_NAME, Credentials

# without gRPC's fork handlers, which disturb a supervisor that starts processes
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# without a line on stderr for each failed handshake: reasons are reported once
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import aetcd
import aetcd.rpc as rpc
import grpc
from aetcd.transactions import BaseCompare
from aetcd.utils import prefix_range_end

CALL_TIMEOUT = 2.0
_CHANNEL = {
    "grpc.max_receive_message_length": -1,
    "grpc.enable_http_proxy": 0,
    # a new session must not inherit the back-off of the failed one
    "grpc.use_local_subchannel_pool": 1,
}

_REFUSALS = (rpc.StatusCode.INVALID_ARGUMENT, rpc.StatusCode.RESOURCE_EXHAUSTED)
"""Status codes of a refused value: it is too large for etcd or gRPC, or etcd is full or overloaded."""
FULL = (
    "its database is full (alarm NOSPACE): make space by `etcdctl compact REVISION` and `etcdctl defrag`, then "
    "`etcdctl alarm disarm`"
)
"""Why etcd refuses writes and leases until the alarm is disarmed, even after space was freed."""
FOREIGN = "its certificate is not of this graph's credentials"
UNMET = "a key that it depends on has changed"
"""Why a conditional write was refused: its condition was false."""


class SessionLost(Exception):
    """The session, or the watch that raised this, cannot be used any more."""


class _Lease(BaseCompare):  # type: ignore[misc]
    """Transaction condition on the lease of a key (0: none), which aetcd lacks."""

    def build_compare(self, compare: rpc.Compare) -> None:
        compare.target, compare.lease = rpc.Compare.LEASE, self.value


class TlsClient(aetcd.Client):  # type: ignore[misc]
    """An aetcd client with a TLS channel, which aetcd cannot make."""

    def __init__(self, host: str, port: int, tls: grpc.ChannelCredentials) -> None:
        super().__init__(host, port, timeout=CALL_TIMEOUT)
        # all certificates of a graph have this name
        options = _CHANNEL | {"grpc.ssl_target_name_override": CERTIFICATE_NAME}
        self.channel = rpc.secure_channel(f"{host}:{port}", tls, options=list(options.items()))
        self.kvstub = rpc.KVStub(self.channel)
        self.leasestub = rpc.LeaseStub(self.channel)
        self.maintenancestub = rpc.MaintenanceStub(self.channel)

    async def connect(self) -> None:
        """Check that the client is open; aetcd calls this before each operation."""
        if self.channel is None:
            raise aetcd.ClientError("the session was closed")


class EtcdSession:
    """A channel and a lease. Any method may raise SessionLost. The session has then ended; after `watch`, not
    always."""

    def __init__(
        self, endpoint: tuple[str, int], ttl: int, tls: grpc.ChannelCredentials | None = None
    ) -> None:
        self.target = "{}:{}".format(*endpoint)
        self.lost = asyncio.Event()
        self.lease = 0
        self._ttl = ttl
        self.reason = ""
        """why the session was lost"""
        self._client = (
            TlsClient(*endpoint, tls)
            if tls is not None
            else aetcd.Client(*endpoint, timeout=CALL_TIMEOUT, options=_CHANNEL)
        )

    async def open(self, lease: int) -> None:
        """Refresh this lease (0: none), or take a new one if it has expired."""
        if lease and getattr(await self._call(self._client.refresh_lease(lease)), "TTL", 0) > 0:
            self.lease = lease
        else:
            self.lease = (await self._call(self._client.lease(self._ttl))).id

    async def close(self) -> None:
        self.lost.set()
        await self._client.close()

    async def revoke(self) -> None:
        await self._call(self._client.revoke_lease(self.lease))

    async def put(
        self, key: str, value: bytes, *, leased: bool, absent: bool = False, holding: str = ""
    ) -> str:
        """Write a key. Return why the server refused it; "": it is written. UNMET: the key exists but should be
        `absent`, or the key `holding` is not under the session's lease."""
        transactions = self._client.transactions
        when = [transactions.create(key.encode()) == 0] if absent else []
        when += [self._own(holding)] if holding else []
        put = transactions.put(key.encode(), value, self.lease if leased else None)
        why: str = await self._call(_refusal(self._client.transaction(when, [put], [])))
        return why

    async def holds(self, key: str, value: bytes) -> bool:
        """Return whether the key has this value, under the session's lease."""
        current = await self._call(self._client.get(key.encode()))
        return current is not None and (current.value, current.lease) == (value, self.lease)

    async def delete(self, key: str) -> None:
        await self._call(self._client.delete(key.encode()))

    async def delete_own(self, key: str) -> None:
        """Delete the key if it is under the session's lease."""
        delete = self._client.transactions.delete(key.encode())
        await self._call(self._client.transaction([self._own(key)], [delete], []))

    def _own(self, key: str) -> object:
        return _Lease(key.encode()) == self.lease

    async def read(self, root: str, *prefixes: str) -> tuple[dict[str, bytes], int]:
        """Return the values by key (without the root), and the revision after which a watch misses no change."""
        values, revisions = dict[str, bytes](), []
        for prefix in prefixes:
            read = await self._call(self._client.get_prefix((root + prefix).encode()))
            values |= {_name(root, kv.key): kv.value for kv in read.kvs}
            revisions.append(read.header.revision)
        return values, min(revisions)

    async def keep_alive(self) -> None:
        """Keep the lease alive until SessionLost. A pending read notices a broken connection at once. A missing reply
        reveals a server that hangs."""
        call = self._client.leasestub.LeaseKeepAlive()
        failed = asyncio.create_task(self.lost.wait())
        answer = asyncio.create_task(self._call(call.read()))
        try:
            while True:
                await self._write(call, rpc.LeaseKeepAliveRequest(ID=self.lease))
                await asyncio.wait(
                    {answer, failed}, timeout=CALL_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
                )
                if not answer.done():
                    raise self._fail(f"no reply within {CALL_TIMEOUT:g} s")
                if getattr(answer.result(), "TTL", 0) <= 0:
                    raise self._fail("the lease expired")
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

    async def watch(self, root: str, prefixes: Iterable[str], revision: int) -> AsyncIterator[list[Change]]:
        """Raises SessionLost also if only this watch ended: its revision was compacted, or the server cancelled it."""
        if self.lost.is_set():  # the channel is None
            raise self._fail("the session was closed")
        call = rpc.WatchStub(self._client.channel).Watch()
        try:
            for start in ((root + prefix).encode() for prefix in prefixes):
                create = rpc.WatchCreateRequest(
                    key=start, range_end=prefix_range_end(start), start_revision=revision
                )
                await self._write(call, rpc.WatchRequest(create_request=create))
            while True:
                response = await self._call(call.read())
                if not isinstance(response, rpc.WatchResponse):
                    raise SessionLost("the server ended the watch")
                if response.canceled or response.compact_revision:
                    raise SessionLost(f"the server ended the watch: {response.cancel_reason or 'compacted'}")
                if changes := [_change(root, event) for event in response.events]:
                    yield changes
        finally:
            call.cancel()

    async def _write(self, stream: Any, request: Any) -> None:
        """Write with a timeout, because grpc.aio waits for ever if the channel closes before the stream's header is
        sent."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                await self._call(stream.write(request))
        except TimeoutError:
            raise self._fail(f"cannot send within {CALL_TIMEOUT:g} s") from None

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except (aetcd.ClientError, rpc.AioRpcError, rpc.BaseError, asyncio.InvalidStateError) as error:
            raise self._fail(_describe(error)) from error
        except asyncio.CancelledError:
            # grpc.aio raises this also when the channel is closed during a call
            if self.lost.is_set() and not is_cancelled():
                raise self._fail("the session was closed") from None
            raise

    def _fail(self, reason: str) -> SessionLost:
        self.reason = self.reason or reason
        self.lost.set()
        return SessionLost(f"{self.target}: {self.reason}")


def channel_credentials(of: Credentials) -> grpc.ChannelCredentials:
    read = [path.read_bytes() for path in (of.authority, of.key, of.certificate)]
    return grpc.ssl_channel_credentials(*read)


async def _refusal(put: Awaitable[Any]) -> str:
    """Await a write. Return why the server refused the value; '' if it is written. Other errors are raised."""
    try:
        succeeded, _ = await put
    except aetcd.ClientError as error:
        if getattr(error.__context__, "code", lambda: None)() not in _REFUSALS:
            raise
        return _describe(error)
    return "" if succeeded else UNMET


def _describe(error: BaseException) -> str:
    details = error.details() if isinstance(error, rpc.AioRpcError) else str(error)
    if details and "database space exceeded" in details:
        return FULL
    if details and "CERTIFICATE_VERIFY_FAILED" in details:
        return FOREIGN
    return (details or type(error).__name__).partition("\n")[0]


def _name(root: str, key: bytes) -> str:
    """Return the key without the root. Invalid UTF-8 in foreign keys must not end a watch."""
    return key.decode(errors="replace").removeprefix(root)


def _change(root: str, event: Any) -> Change:
    return Change(_name(root, event.kv.key), None if event.type == rpc.Event.DELETE else event.kv.value)
