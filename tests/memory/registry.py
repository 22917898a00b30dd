"""The registry in memory: the registries of a test share a MemoryServer, whose failures the test simulates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.registry.base import Change, Registry, difference
from pdserve.util.errors import RegistryUnavailable


class MemoryServer:
    """Simulates etcd. Each live client has its own leased keys, which no other client can remove."""

    def __init__(self) -> None:
        self.alive = True
        self.clients: list[MemoryRegistry] = []
        self.version = 0
        self._unleased: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    @property
    def data(self) -> dict[str, bytes]:
        found = dict(self._unleased)
        for client in self.clients:
            found |= client.leased
        return found

    async def write(self, key: str, value: bytes | None) -> None:
        """Write or remove a key without a lease. Keys that a live client holds by a lease do not change."""
        self._unleased.pop(key, None)
        if value is not None and key not in self.data:
            self._unleased[key] = value
        await self.notify()

    async def down(self) -> None:
        self.alive = False
        await self.notify()

    async def up(self, lose_data: bool = False) -> None:
        """Come back with the leased keys of all live clients. (At a real server, the clients write them again.)"""
        self.alive = True
        if lose_data:
            self._unleased.clear()
        await self.notify()

    async def kill(self, client: "MemoryRegistry") -> None:
        """Let the client's process die, and its lease run out."""
        self.clients.remove(client)
        await self.notify()

    async def notify(self) -> None:
        self.version += 1
        async with self._changed:
            self._changed.notify_all()

    async def newer_than(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version != version)


class MemoryRegistry(Registry):
    def __init__(self, server: MemoryServer, namespace: str = "pdserve") -> None:
        self.leased: dict[str, bytes] = {}
        self._server = server
        self._root = f"/{namespace}/"

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        if not self._server.alive:
            raise RegistryUnavailable("the server is down")
        self._server.clients.append(self)
        try:
            yield
        finally:
            if self in self._server.clients:
                await self._server.kill(self)

    @property
    def connected(self) -> bool:
        return self._server.alive and self in self._server.clients

    def _check(self) -> None:
        if not self.connected:
            raise RegistryUnavailable("the server is down")

    async def put(self, key: str, value: bytes, *, leased: bool = True, holding: str = "") -> None:
        if holding and self._root + holding not in self.leased:
            raise RegistryUnavailable(f"{holding} is not this process's")
        if leased:
            self.leased[self._root + key] = value
            await self._server.write(self._root + key, None)
        else:
            self._check()
            await self._server.write(self._root + key, value)

    async def create(self, key: str, value: bytes) -> bool:
        self._check()
        if created := self._root + key not in self._server.data:
            await self.put(key, value)
        return created

    async def delete(self, key: str) -> None:
        if self.leased.pop(self._root + key, None) is None:
            self._check()
        await self._server.write(self._root + key, None)

    async def read(self, prefix: str) -> dict[str, bytes]:
        self._check()
        return self._read(prefix)

    def _read(self, prefix: str) -> dict[str, bytes]:
        data = sorted(self._server.data.items())
        return {
            key.removeprefix(self._root): value for key, value in data if key.startswith(self._root + prefix)
        }

    async def watch(self, *prefixes: str) -> AsyncIterator[list[Change]]:
        known: dict[str, bytes] | None = None
        while True:
            version = self._server.version
            if self.connected:
                now = {key: value for prefix in prefixes for key, value in self._read(prefix).items()}
                changes = difference(known or {}, now)
                if changes or known is None:
                    known = now
                    yield changes
            await self._server.newer_than(version)
