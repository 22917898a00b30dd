"""The registry on etcd: the only place that imports aetcd.

An EtcdSession is one connection with one lease. When anything about it fails, or the server is silent, the session is
over and a new one is made, with the same lease if that still lives. The new session then writes each key that is not
there under its lease. There is no other way to recover, hence none to get wrong. A key that is there is not written
again, since each write goes to all that watch: after a short stall of the host, a thousand processes would write to a
thousand, and keep the host slow.

Each own key is watched as long as this process has it: one that somebody else deletes or changes is written again.

Of aetcd only the channel, the stubs and the message types are used. Its watcher loses compaction errors and deadlocks
when its stream breaks, so watches and keep-alives are gRPC streams of this module.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import cycle
from typing import Any

from pdserve.credentials import NAME, Credentials
from pdserve.errors import ConfigError, RegistryUnavailable
from pdserve.registry.base import Change, Registry, apply, difference
from pdserve.tasks import Owner, asked_to_stop

# gRPC's fork handlers only get in the way of a supervisor that starts processes
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import aetcd
import aetcd.rpc as rpc
import grpc
from aetcd.utils import prefix_range_end

log = logging.getLogger(__name__)

LEASE_TTL = 10
"""seconds after which others see that this process is gone"""
CONNECT_WITHIN = 10.0
SAY_AFTER = 1.0
"""seconds after which a patient registry logs that it waits for a server"""
SETTLE = 2.0
"""seconds that other processes get to register again after an outage before they count as gone"""
RETRY = 0.3
AGAIN = 1.0
"""seconds between two writes of a key that others keep on changing"""
CALL_TIMEOUT = 2.0
_CHANNEL = {
    "grpc.max_receive_message_length": -1,
    "grpc.enable_http_proxy": 0,
    # a channel of one session must not inherit the back-off of the session that failed before it
    "grpc.use_local_subchannel_pool": 1,
}


class SessionLost(Exception):
    """The session, or the watch that raised this, cannot be used any more."""


class TlsClient(aetcd.Client):  # type: ignore[misc]
    """An aetcd client with a TLS channel, which aetcd cannot make, and only the stubs that a session uses."""

    def __init__(self, host: str, port: int, tls: grpc.ChannelCredentials) -> None:
        super().__init__(host, port, timeout=CALL_TIMEOUT)
        # all certificates of a graph have this name; the host's own name proves nothing
        options = _CHANNEL | {"grpc.ssl_target_name_override": NAME}
        self.channel = rpc.secure_channel(f"{host}:{port}", tls, options=list(options.items()))
        self.kvstub, self.leasestub = rpc.KVStub(self.channel), rpc.LeaseStub(self.channel)

    async def connect(self) -> None:
        """aetcd calls this before each operation. The client is connected until it is closed."""
        if self.channel is None:
            raise aetcd.ClientError("the session was closed")


class EtcdSession:
    """One channel and one lease. Every method raises SessionLost, after which the session is over."""

    def __init__(
        self, endpoint: tuple[str, int], ttl: int, tls: grpc.ChannelCredentials | None = None
    ) -> None:
        self.target = "{}:{}".format(*endpoint)
        self.lost = asyncio.Event()
        self.lease = 0
        self._ttl = ttl
        self.reason = ""
        """why it was lost"""
        self._client = (
            TlsClient(*endpoint, tls)
            if tls is not None
            else aetcd.Client(*endpoint, timeout=CALL_TIMEOUT, options=_CHANNEL)
        )

    async def open(self, lease: int) -> None:
        """Keep this lease if it still lives (0: there is none), else take a new one."""
        if lease and getattr(await self._call(self._client.refresh_lease(lease)), "TTL", 0) > 0:
            self.lease = lease
        else:
            self.lease = (await self._call(self._client.lease(self._ttl))).id

    async def close(self) -> None:
        self.lost.set()
        await self._client.close()

    async def revoke(self) -> None:
        await self._call(self._client.revoke_lease(self.lease))

    async def put(self, key: str, value: bytes, *, leased: bool) -> None:
        await self._call(self._client.put(key.encode(), value, lease=self.lease if leased else None))

    async def holds(self, key: str, value: bytes) -> bool:
        """Return whether the key has this value, under the session's lease."""
        found = await self._call(self._client.get(key.encode()))
        return found is not None and (found.value, found.lease) == (value, self.lease)

    async def delete(self, key: str) -> None:
        await self._call(self._client.delete(key.encode()))

    async def read(self, root: str, *prefixes: str) -> tuple[dict[str, bytes], int]:
        """Return the keys without the root, and the revision at which they were read; some may be newer."""
        values, revisions = dict[str, bytes](), []
        for prefix in prefixes:
            found = await self._call(self._client.get_prefix((root + prefix).encode()))
            values |= {_name(root, kv.key): kv.value for kv in found.kvs}
            revisions.append(found.header.revision)
        return values, min(revisions)

    async def keep_alive(self) -> None:
        """Keep the lease alive until SessionLost is raised.

        A read always waits on the stream, so that a broken connection is noticed at once. A server that hangs is
        noticed by its missing answer.
        """
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

    async def watch(self, root: str, prefixes: Iterable[str], revision: int) -> AsyncIterator[list[Change]]:
        """Raises SessionLost also if only this watch is over (compacted, or cancelled by the server)."""
        if self.lost.is_set():  # a closed session has no channel any more
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
        """Write within a bounded time: if the channel closes before the stream's header is sent, grpc.aio waits for
        ever."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                await self._call(stream.write(request))
        except TimeoutError:
            raise self._fail(f"nothing could be sent within {CALL_TIMEOUT:g} s") from None

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except (aetcd.ClientError, rpc.AioRpcError, rpc.BaseError, asyncio.InvalidStateError) as error:
            raise self._fail(_say(error)) from error
        except asyncio.CancelledError:
            # grpc.aio also raises this when the channel is closed during a call; then this task was not cancelled
            if self.lost.is_set() and not asked_to_stop():
                raise self._fail("the session was closed") from None
            raise

    def _fail(self, reason: str) -> SessionLost:
        self.reason = self.reason or reason
        self.lost.set()
        return SessionLost(f"{self.target}: {self.reason}")


class EtcdRegistry(Registry):
    def __init__(
        self,
        etcd: str,
        namespace: str,
        ttl: int = LEASE_TTL,
        patient: bool = False,
        credentials: Credentials | None = None,
    ) -> None:
        self.patient = patient
        self._tls = _channel_credentials(credentials) if credentials else None
        self._endpoints = cycle(_endpoints(etcd))
        self._address = etcd
        self._root = f"/{namespace}/"
        self._ttl = ttl
        self._lease = 0
        """the lease of the last session; 0: there was none"""
        self._leased: dict[str, bytes] = {}
        self._deleted: set[str] = set()
        self._guards: dict[str, asyncio.Task[None]] = {}
        """by leased key, what writes it again"""
        self._tasks = Owner()
        self._writing = asyncio.Lock()
        self._session: EtcdSession | None = None
        self._session_made = asyncio.Condition()
        self._cause = ""
        """why the last session could not be made, in parentheses"""

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        try:
            async with self._tasks as tasks:
                tasks.forever(self._keep_session, "etcd session", again_after=0)
                await self._first_session()
                yield
        finally:
            if (session := self._session) is not None:
                try:
                    with suppress(SessionLost):
                        await session.revoke()
                finally:
                    await self._end(session)

    async def _first_session(self) -> None:
        try:
            async with asyncio.timeout(SAY_AFTER if self.patient else CONNECT_WITHIN):
                await self._live_session()
        except TimeoutError:
            if not self.patient:
                raise RegistryUnavailable(f"no etcd answers at {self._address}{self._cause}") from None
            log.warning("no etcd answers at %s; waiting for it%s", self._address, self._cause)
            await self._live_session()

    @property
    def connected(self) -> bool:
        return self._session is not None and not self._session.lost.is_set()

    # writing

    async def put(self, key: str, value: bytes, *, leased: bool = True) -> None:
        async with self._writing:
            if leased:
                self._leased[key] = value
                self._deleted.discard(key)
                if key not in self._guards:
                    self._guards[key] = self._tasks.forever(partial(self._guard, key), f"own key: {key}")
            try:
                await self._now().put(self._root + key, value, leased=leased)
            except SessionLost as error:
                if not leased:
                    raise RegistryUnavailable(str(error)) from error

    async def delete(self, key: str) -> None:
        async with self._writing:
            ours = self._leased.pop(key, None) is not None
            if ours:
                self._guards.pop(key).cancel()
            try:
                await self._now().delete(self._root + key)
            except SessionLost as error:
                if not ours:
                    raise RegistryUnavailable(str(error)) from error
                self._deleted.add(key)

    async def _guard(self, key: str) -> None:
        """Compare an own key with what this process wrote, now and after each change; never returns. A key that two
        processes claim is written once in `AGAIN` seconds by each."""
        async for _ in self.watch(key):
            if await self._restored(key):
                await asyncio.sleep(AGAIN)

    async def _restored(self, key: str) -> bool:
        async with self._writing:
            with suppress(SessionLost):  # the next session compares all keys
                session = self._now()
                if key in self._leased and not await session.holds(self._root + key, self._leased[key]):
                    log.warning("%s was deleted or changed in etcd by somebody; writing it again", key)
                    await session.put(self._root + key, self._leased[key], leased=True)
                    return True
        return False

    async def read(self, prefix: str) -> dict[str, bytes]:
        try:
            return (await self._now().read(self._root, prefix))[0]
        except SessionLost as error:
            raise RegistryUnavailable(str(error)) from error

    def _now(self) -> EtcdSession:
        if self._session is None or self._session.lost.is_set():
            raise SessionLost(f"etcd at {self._address} is away")
        return self._session

    # sessions

    async def _keep_session(self) -> None:
        """Make a session, and keep its lease alive until it is lost."""
        session = EtcdSession(next(self._endpoints), self._ttl, self._tls)
        try:
            await session.open(self._lease)
            await self._register(session)
            await session.keep_alive()
        except SessionLost as error:
            worked = self._session is session
            await self._end(session)
            if worked:
                log.warning("etcd is away (%s); the last known topology stands", error)
            else:
                self._cause = f" ({session.reason})"
                await asyncio.sleep(RETRY)
        except BaseException:
            if self._session is not session or not asked_to_stop():  # else `_lifetime` revokes its lease
                await self._end(session)
            raise

    async def _end(self, session: EtcdSession) -> None:
        self._session = None
        await session.close()

    async def _register(self, session: EtcdSession) -> None:
        """Write every leased key that is missing under the session's lease. Keys that an earlier lease of this process
        holds run out with that lease."""
        async with self._writing:
            for key in self._deleted:
                await session.delete(self._root + key)
            for key, value in self._leased.items():
                if not await session.holds(self._root + key, value):
                    await session.put(self._root + key, value, leased=True)
            self._deleted.clear()
            self._session, self._lease = session, session.lease
        log.info("etcd at %s answers, %d keys registered", session.target, len(self._leased))
        async with self._session_made:
            self._session_made.notify_all()

    async def _live_session(self) -> EtcdSession:
        async with self._session_made:
            await self._session_made.wait_for(lambda: self.connected)
        return self._now()

    # watching

    async def watch(self, *prefixes: str) -> AsyncIterator[list[Change]]:
        known: dict[str, bytes] | None = None
        while True:
            try:
                session = await self._live_session()
                now, revision = await session.read(self._root, *prefixes)
                if known is not None and not known.keys() <= now.keys():
                    # etcd lost its data, or leases ran out while it was away: live processes are about to register
                    await asyncio.sleep(SETTLE)
                    now, revision = await session.read(self._root, *prefixes)
                changes = difference(known or {}, now)
                if changes or known is None:
                    known = now
                    yield changes
                async for changes in session.watch(self._root, prefixes, revision + 1):
                    apply(changes, known)
                    yield changes
            except SessionLost as error:
                log.debug("watch of %s: %s; reading it anew", " ".join(prefixes) or "all", error)


def _endpoints(etcd: str) -> list[tuple[str, int]]:
    """Parse `host:port,host:port`. A leading `http://` or `https://` means nothing: credentials alone mean TLS."""
    endpoints = []
    for address in etcd.split(","):
        host, colon, port = (
            address.strip().removeprefix("http://").removeprefix("https://").rstrip("/").rpartition(":")
        )
        if not colon or not host or not port.isdecimal():
            raise ConfigError([f"etcd: {address.strip()!r} is not host:port."])
        endpoints.append((host, int(port)))
    return endpoints


def _channel_credentials(of: Credentials) -> grpc.ChannelCredentials:
    read = [path.read_bytes() for path in (of.authority, of.key, of.certificate)]
    return grpc.ssl_channel_credentials(*read)


def _say(error: BaseException) -> str:
    details = error.details() if isinstance(error, rpc.AioRpcError) else str(error)
    return (details or type(error).__name__).partition("\n")[0]


def _name(root: str, key: bytes) -> str:
    """Return the key without the root. pdserve's keys are UTF-8; others must not end a watch."""
    return key.decode(errors="replace").removeprefix(root)


def _change(root: str, event: Any) -> Change:
    return Change(_name(root, event.kv.key), None if event.type == rpc.Event.DELETE else event.kv.value)
