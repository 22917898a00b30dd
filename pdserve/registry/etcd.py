"""The registry on etcd.

An EtcdSession is one connection with one lease (`etcd_session.py`). When anything about it fails, or the server is
silent, the session is over and a new one is made, at the next member where there are several (one that has lost the
others answers nothing, either), with the same lease if that still lives. The new session then writes
each key that is not there under its lease. There is no other way to recover, hence none to get wrong. A key that is
there is not written again, since each write goes to all that watch: after a short stall of the host, a thousand
processes would write to a thousand, and keep the host slow.

Each own key is watched as long as this process has it: one that another client deletes or changes is written again.
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
"""seconds after which others see that this process is gone"""
CONNECT_WITHIN = 10.0
SAY_AFTER = 1.0
"""seconds after which a patient registry logs that it waits for a server"""
SETTLE = 2.0
"""seconds that other processes get to register again after an outage before they count as gone"""
RETRY = 0.3
REFUSED = 3.0
"""seconds between two writes of a value that etcd refuses: it may be full, or have too much to do, for a while"""
AGAIN = 1.0
"""seconds between two writes of a key that others keep on changing"""


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
        """members of a cluster in turn; another order in each process, so that each member has some"""
        self._address = etcd
        self._root = f"/{namespace}/"
        self._ttl = ttl
        self._lease = 0
        """the lease of the last session; 0: there was none"""
        self._leased: dict[str, bytes] = {}
        self._refused: set[str] = set()
        """of the leased keys, those whose value the server did not take"""
        self._created: set[str] = set()
        self._deleted: set[str] = set()
        """own keys that may be in etcd yet"""
        self._guards: dict[str, asyncio.Task[None]] = {}
        """by leased key, what writes it again"""
        self._tasks = TaskOwner()
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
                tasks.forever(self._write_refused, "refused values", again_after=REFUSED)
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
                raise RegistryUnavailable(self._silence(self._cause)) from None
            logger.warning("%s", self._silence(f"; waiting for it{self._cause}"))
            await self._live_session()

    def _silence(self, why: str) -> str:
        if self.refusal:
            return f"etcd at {self._address} serves no new process: {self.refusal}"
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
                session = self._now()
                if leased:
                    await self._write(session, key)
                else:
                    held = holding and self._root + holding
                    self._refuse(key, await session.put(self._root + key, value, leased=False, holding=held))
            except SessionLost as error:
                if not leased:
                    raise RegistryUnavailable(str(error)) from error

    async def create(self, key: str, value: bytes) -> bool:
        async with self._writing:
            if key in self._created:  # also where it was lost: the call that created it does not know yet
                return False
            self._created.add(key)
            try:
                why = await self._now().put(self._root + key, value, leased=True, absent=True)
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
                self._refuse(key, why)
            return not why

    def _refuse(self, key: str, why: str) -> None:
        if why:
            raise RegistryUnavailable(f"etcd refuses {self._root}{key}: {why}")

    async def delete(self, key: str) -> None:
        async with self._writing:
            ours = key in self._leased or key in self._created
            if self._leased.pop(key, None) is not None:
                self._guards.pop(key).cancel()
            self._created.discard(key)
            self._refused.discard(key)
            try:
                session = self._now()
                await (session.delete_own if ours else session.delete)(self._root + key)
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
                    if key not in self._refused:
                        logger.warning(
                            "%s was deleted or changed in etcd, or its lease ran out; writing it again", key
                        )
                    await self._write(session, key)
                    return True
        return False

    async def _write_refused(self) -> None:
        for key in list(self._refused):
            await self._restored(key)

    async def _write(self, session: EtcdSession, key: str) -> None:
        """Write a leased key. A value that the server refuses is tried again, and costs no other key."""
        why = await session.put(self._root + key, self._leased[key], leased=True)
        if why and key not in self._refused:
            logger.error("etcd refuses %s%s: %s; trying again", self._root, key, why)
        (self._refused.add if why else self._refused.discard)(key)

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
                logger.warning("etcd is away (%s); the last known topology stands", error)
            else:
                self._cause = f" ({session.reason})"
                await asyncio.sleep(RETRY)
        except BaseException:
            if self._session is not session or not is_cancelled():  # else `_lifetime` revokes its lease
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
                await session.delete_own(self._root + key)
            for key, value in self._leased.items():
                if not await session.holds(self._root + key, value):
                    await self._write(session, key)
            self._deleted.clear()
            self._session, self._lease, self._cause = session, session.lease, ""
        logger.info("etcd at %s answers, %d keys registered", session.target, len(self._leased))
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
                    apply_changes(changes, known)
                    yield changes
            except SessionLost as error:
                logger.debug("watch of %s: %s; reading it anew", " ".join(prefixes) or "all", error)


def _endpoints(etcd: str) -> list[tuple[str, int]]:
    """Parse `host:port,host:port`. A leading `http://` or `https://` means nothing: credentials alone mean TLS."""
    endpoints = []
    for address in split_servers(etcd) or [etcd]:
        host, _, port = address.removeprefix("http://").removeprefix("https://").rstrip("/").rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError([f"etcd: {address!r} is not host:port."])
        endpoints.append((host, int(port)))
    return endpoints
