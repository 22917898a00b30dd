"""The registry on etcd.

A Session is one connection with one lease. When anything about it fails, or the server is silent, the
session is over and a new one is made: lease, then all keys again. There is no other way to recover, hence
none to get wrong.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import cycle
from types import TracebackType
from typing import Self

from pdserve.errors import ConfigError, RegistryUnavailable
from pdserve.registry.base import Change, Registry
from pdserve.registry.diff import apply, difference
from pdserve.registry.etcd_session import Lost, Session
from pdserve.tasks import Owner

log = logging.getLogger(__name__)

LEASE_TTL = 10
"""seconds after which others see that this process is gone"""
CONNECT_WITHIN = 10.0
SAY_AFTER = 1.0
SETTLE = 2.0
"""seconds that others get to register again after an outage before they count as gone"""
RETRY = 0.3


def connect(etcd: str, namespace: str, patient: bool = False) -> "EtcdRegistry":
    return EtcdRegistry(etcd, namespace, patient=patient)


class EtcdRegistry(Registry):
    def __init__(self, etcd: str, namespace: str, ttl: int = LEASE_TTL, patient: bool = False) -> None:
        self.patient = patient
        self._endpoints = cycle(_endpoints(etcd))
        self._address = etcd
        self._root = f"/{namespace}/"
        self._ttl = ttl
        self._leased: dict[str, bytes] = {}
        self._deleted: set[str] = set()
        self._writing = asyncio.Lock()
        self._session: Session | None = None
        self._session_made = asyncio.Condition()
        self._tasks = Owner()

    async def __aenter__(self) -> Self:
        self._tasks.forever(self._keep, "etcd session")
        try:
            await self._first_session()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _first_session(self) -> None:
        try:
            async with asyncio.timeout(SAY_AFTER if self.patient else CONNECT_WITHIN):
                await self._live_session()
        except TimeoutError:
            if not self.patient:
                raise RegistryUnavailable(f"no etcd answers at {self._address}") from None
            log.warning("no etcd answers at %s; waiting for it", self._address)
            await self._live_session()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()
        if self._session is not None:
            with suppress(Lost):
                await self._session.revoke()
            await self._session.close()
            self._session = None

    @property
    def connected(self) -> bool:
        return self._session is not None and not self._session.lost.is_set()

    # writing

    async def put(self, key: str, value: bytes, *, leased: bool = True) -> None:
        async with self._writing:
            if leased:
                self._leased[key] = value
                self._deleted.discard(key)
            try:
                await self._now().put(self._root + key, value, leased=leased)
            except Lost as error:
                if not leased:
                    raise RegistryUnavailable(str(error)) from error

    async def delete(self, key: str) -> None:
        async with self._writing:
            ours = self._leased.pop(key, None) is not None
            try:
                await self._now().delete(self._root + key)
            except Lost as error:
                if not ours:
                    raise RegistryUnavailable(str(error)) from error
                self._deleted.add(key)

    async def read(self, prefix: str) -> dict[str, bytes]:
        try:
            return (await self._now().read(self._root, prefix))[0]
        except Lost as error:
            raise RegistryUnavailable(str(error)) from error

    def _now(self) -> Session:
        if self._session is None or self._session.lost.is_set():
            raise Lost(f"etcd at {self._address} is away")
        return self._session

    # sessions

    async def _keep(self) -> None:
        """Owns the session: makes it, keeps its lease alive, replaces it."""
        while True:
            session = Session(next(self._endpoints), self._ttl)
            try:
                await session.open()
                await self._register(session)
                await session.keep_alive()
            except Lost as error:
                worked = self._session is session
                await self._end(session)
                if worked:
                    log.warning("etcd is away (%s); the last known topology stands", error)
                else:
                    await asyncio.sleep(RETRY)
            except Exception:
                await self._end(session)
                raise

    async def _end(self, session: Session) -> None:
        self._session = None
        await session.close()

    async def _register(self, session: Session) -> None:
        """Everything that is to be there, under the new lease. What an earlier lease of ours still holds
        beyond that runs out with it."""
        async with self._writing:
            for key in self._deleted:
                await session.delete(self._root + key)
            for key, value in self._leased.items():
                await session.put(self._root + key, value, leased=True)
            self._deleted.clear()
            self._session = session
        log.info("etcd at %s answers, %d keys registered", session.target, len(self._leased))
        async with self._session_made:
            self._session_made.notify_all()

    async def _live_session(self) -> Session:
        async with self._session_made:
            await self._session_made.wait_for(lambda: self.connected)
        return self._now()

    # watching

    async def watch(self, prefix: str) -> AsyncIterator[list[Change]]:
        known: dict[str, bytes] | None = None
        while True:
            try:
                session = await self._live_session()
                now, revision = await session.read(self._root, prefix)
                if known is not None and not known.keys() <= now.keys():
                    # etcd lost its data, or leases ran out while it was away: the living are about to
                    # register
                    await asyncio.sleep(SETTLE)
                    now, revision = await session.read(self._root, prefix)
                changes = difference(known or {}, now)
                if changes or known is None:
                    known = now
                    yield changes
                async for changes in session.watch(self._root, prefix, revision + 1):
                    apply(changes, known)
                    yield changes
            except Lost as error:
                log.debug("watch of %s: %s; reading it anew", prefix or "all", error)


def _endpoints(etcd: str) -> list[tuple[str, int]]:
    """`host:port,host:port`, each maybe with `http://` before it."""
    endpoints = []
    for one in etcd.split(","):
        host, colon, port = one.strip().removeprefix("http://").rstrip("/").rpartition(":")
        if not colon or not host or not port.isdecimal():
            raise ConfigError([f"etcd: {one.strip()!r} is not host:port."])
        endpoints.append((host, int(port)))
    return endpoints
