"""The registry on etcd.

An EtcdSession is a connection with a lease (`etcd_session.py`). When a call fails or the server is silent, the session
ends and a new one connects, to the next member of a cluster, with the same lease if it is still alive. The new session
then writes those of this process's keys that are missing under the lease. It does not write existing keys again,
because every watcher gets every write.

Each process watches its own keys, and writes a key again that another client deletes or changes.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import cycle

from pdserve.registry.base import Change, Registry, apply_changes, difference
from pdserve.registry.etcd_session import FULL, UNMET, EtcdSession, SessionLost, channel_credentials
from pdserve.runtime.tasks import TaskOwner, is_cancelled
from pdserve.security.credentials import Credentials
from pdserve.util.errors import ConfigError, RegistryUnavailable
from pdserve.util.net import split_servers

logger = logging.getLogger(__name__)

LEASE_TTL = 10
"""Seconds from a process's last sign of life until its keys expire."""
CONNECT_TIMEOUT = 10.0
PATIENT_LOG_AFTER = 1.0
"""Seconds after which a patient registry logs that it waits for a server."""
SETTLE = 2.0
"""Seconds for other processes to register again after an outage, before their missing keys count as deleted."""
RETRY_INTERVAL = 0.3
REFUSED_INTERVAL = 3.0
"""Seconds between two writes of a value that etcd refuses, because it may be full or overloaded for a while."""
RESTORE_INTERVAL = 1.0
"""Seconds between two writes of a key that another client keeps changing."""


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
        self._tls = channel_credentials(credentials) if credentials else None
        endpoints = _endpoints(etcd)
        self._endpoints = cycle(random.sample(endpoints, len(endpoints)))
        """members of a cluster in random order, to spread processes over them"""
        self._address = etcd
        self._root = f"/{namespace}/"
        self._ttl = ttl
        self._lease = 0
        """lease of the last session; 0: none"""
        self._leased: dict[str, bytes] = {}
        self._refused: set[str] = set()
        """leased keys whose value the server refused"""
        self._created: set[str] = set()
        self._deleted: set[str] = set()
        """deleted own keys that etcd may still have"""
        self._guards: dict[str, asyncio.Task[None]] = {}
        """by leased key: the task that writes it again"""
        self._tasks = TaskOwner()
        self._writing = asyncio.Lock()
        self._session: EtcdSession | None = None
        self._session_made = asyncio.Condition()
        self._cause = ""
        """why the last session could not connect, in parentheses"""

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        try:
            async with self._tasks as tasks:
                tasks.forever(self._keep_session, "etcd session", again_after=0)
                tasks.forever(self._write_refused, "refused values", again_after=REFUSED_INTERVAL)
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
            async with asyncio.timeout(PATIENT_LOG_AFTER if self.patient else CONNECT_TIMEOUT):
                await self._live_session()
        except TimeoutError:
            if not self.patient:
                raise RegistryUnavailable(self._describe_outage(self._cause)) from None
            logger.warning("%s", self._describe_outage(f"; waiting for it{self._cause}"))
            await self._live_session()

    def _describe_outage(self, why: str) -> str:
        if self.refusal:
            return f"etcd at {self._address} accepts no new process: {self.refusal}"
        return f"no etcd answers at {self._address}{why}"

    @property
    def refusal(self) -> str:
        return FULL if FULL in self._cause else ""

    @property
    def connected(self) -> bool:
        return self._session is not None and not self._session.lost.is_set()

    # writing

    async def put(self, key: str, value: bytes, *, leased: bool = True, holding: str = "") -> None:
        async with self._writing:
            if leased:
                self._leased[key] = value
                self._deleted.discard(key)
                if key not in self._guards:
                    self._guards[key] = self._tasks.forever(partial(self._guard, key), f"own key: {key}")
            try:
                session = self._connected_session()
                if leased:
                    await self._write(session, key)
                else:
                    held = holding and self._root + holding
                    self._raise_refusal(
                        key, await session.put(self._root + key, value, leased=False, holding=held)
                    )
            except SessionLost as error:
                if not leased:
                    raise RegistryUnavailable(str(error)) from error

    async def create(self, key: str, value: bytes) -> bool:
        async with self._writing:
            if key in self._created:  # even if the key was lost: its creator does not know that yet
                return False
            self._created.add(key)
            try:
                why = await self._connected_session().put(self._root + key, value, leased=True, absent=True)
            except SessionLost as error:
                self._created.remove(key)
                self._deleted.add(key)
                raise RegistryUnavailable(str(error)) from error
            except asyncio.CancelledError:
                self._tasks.start(self.delete(key), f"key that may have been created: {key}")
                raise
            if why:
                self._created.remove(key)
            if why != UNMET:
                self._raise_refusal(key, why)
            return not why

    def _raise_refusal(self, key: str, why: str) -> None:
        if why:
            raise RegistryUnavailable(f"etcd refused {self._root}{key}: {why}")

    async def delete(self, key: str) -> None:
        async with self._writing:
            ours = key in self._leased or key in self._created
            if self._leased.pop(key, None) is not None:
                self._guards.pop(key).cancel()
            self._created.discard(key)
            self._refused.discard(key)
            try:
                session = self._connected_session()
                await (session.delete_own if ours else session.delete)(self._root + key)
            except SessionLost as error:
                if not ours:
                    raise RegistryUnavailable(str(error)) from error
                self._deleted.add(key)

    async def _guard(self, key: str) -> None:
        """Write an own key again whenever another client has changed it. If two processes claim one key, each writes
        it once in RESTORE_INTERVAL seconds."""
        async for _ in self.watch(key):
            if await self._restore(key):
                await asyncio.sleep(RESTORE_INTERVAL)

    async def _restore(self, key: str) -> bool:
        async with self._writing:
            with suppress(SessionLost):  # the next session checks all keys
                session = self._connected_session()
                if key in self._leased and not await session.holds(self._root + key, self._leased[key]):
                    if key not in self._refused:
                        logger.warning(
                            "etcd: %s was deleted or changed, or its lease expired; rewriting it", key
                        )
                    await self._write(session, key)
                    return True
        return False

    async def _write_refused(self) -> None:
        for key in list(self._refused):
            await self._restore(key)

    async def _write(self, session: EtcdSession, key: str) -> None:
        """Write a leased key. A refused value is retried and affects no other key."""
        why = await session.put(self._root + key, self._leased[key], leased=True)
        if why and key not in self._refused:
            logger.error("etcd refused %s%s: %s; retrying", self._root, key, why)
        (self._refused.add if why else self._refused.discard)(key)

    async def read(self, prefix: str) -> dict[str, bytes]:
        try:
            return (await self._connected_session().read(self._root, prefix))[0]
        except SessionLost as error:
            raise RegistryUnavailable(str(error)) from error

    def _connected_session(self) -> EtcdSession:
        if self._session is None or self._session.lost.is_set():
            raise SessionLost(f"etcd at {self._address} is unreachable")
        return self._session

    # sessions

    async def _keep_session(self) -> None:
        """Open a session and keep its lease alive until the session is lost."""
        session = EtcdSession(next(self._endpoints), self._ttl, self._tls)
        try:
            await session.open(self._lease)
            await self._register(session)
            await session.keep_alive()
        except SessionLost as error:
            worked = self._session is session
            await self._end(session)
            if worked:
                logger.warning("etcd is unreachable (%s); using the last known topology", error)
            else:
                self._cause = f" ({session.reason})"
                await asyncio.sleep(RETRY_INTERVAL)
        except BaseException:
            if self._session is not session or not is_cancelled():  # otherwise `_lifetime` revokes the lease
                await self._end(session)
            raise

    async def _end(self, session: EtcdSession) -> None:
        self._session = None
        await session.close()

    async def _register(self, session: EtcdSession) -> None:
        """Write every leased key that is missing under the session's lease. Keys under an earlier lease of this process
        expire with that lease."""
        async with self._writing:
            for key in self._deleted:
                await session.delete_own(self._root + key)
            for key, value in self._leased.items():
                if not await session.holds(self._root + key, value):
                    await self._write(session, key)
            self._deleted.clear()
            self._session = session
            self._lease = session.lease
            self._cause = ""
        logger.info("connected to etcd at %s, %d keys registered", session.target, len(self._leased))
        async with self._session_made:
            self._session_made.notify_all()

    async def _live_session(self) -> EtcdSession:
        async with self._session_made:
            await self._session_made.wait_for(lambda: self.connected)
        return self._connected_session()

    # watching

    async def watch(self, *prefixes: str) -> AsyncIterator[list[Change]]:
        known: dict[str, bytes] | None = None
        while True:
            try:
                session = await self._live_session()
                now, revision = await session.read(self._root, *prefixes)
                if known is not None and not known.keys() <= now.keys():
                    # etcd lost its data, or leases expired during its outage: live processes register again now
                    await asyncio.sleep(SETTLE)
                    now, revision = await session.read(self._root, *prefixes)
                changes = difference(known or {}, now)
                if changes or known is None:
                    known = now
                    yield changes
                async for changes in session.watch(self._root, prefixes, revision + 1):
                    apply_changes(changes, known)
                    yield changes
            except SessionLost as error:
                logger.debug("watch of %s: %s; reading all keys again", " ".join(prefixes) or "all", error)


def _endpoints(etcd: str) -> list[tuple[str, int]]:
    """Parse `host:port,host:port`. A leading `http://` or `https://` is ignored: only credentials decide about TLS."""
    endpoints = []
    for address in split_servers(etcd) or [etcd]:
        host, _, port = address.removeprefix("http://").removeprefix("https://").rstrip("/").rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError([f"etcd: {address!r} is not host:port."])
        endpoints.append((host, int(port)))
    return endpoints
