"""The registry seam in one process: several registries share a MemoryServer, of which tests act out the failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.errors import RegistryUnavailable
from pdserve.registry.base import Change, Registry, difference


class MemoryServer:
    """Stands in for etcd."""

    def __init__(self) -> None:
        self.alive = True
        self.data: dict[str, bytes] = {}
        self.owners: dict[str, MemoryRegistry | None] = {}
        self.clients: list[MemoryRegistry] = []
        self.version = 0
        self._changed = asyncio.Condition()

    async def down(self) -> None:
        self.alive = False
        await self.notify()

    async def up(self, lose_data: bool = False) -> None:
        """Come back; all live processes register again, as they do with a real server."""
        self.alive = True
        if lose_data:
            self.data.clear()
            self.owners.clear()
        for client in self.clients:
            client.register()
        await self.notify()

    async def expire(self, client: "MemoryRegistry") -> None:
        """Let the client's lease run out although it lives (it was cut off, or slept); it takes a new one."""
        self.forget(client)
        await self.notify()
        await asyncio.sleep(0)
        client.register()
        await self.notify()

    async def kill(self, client: "MemoryRegistry") -> None:
        """Let the client's process die, and its lease run out."""
        self.clients.remove(client)
        self.forget(client)
        await self.notify()

    def forget(self, client: "MemoryRegistry") -> None:
        for key in [key for key, owner in self.owners.items() if owner is client]:
            del self.data[key], self.owners[key]

    def write(self, key: str, value: bytes, owner: "MemoryRegistry | None") -> None:
        self.data[key], self.owners[key] = value, owner

    def remove(self, key: str) -> None:
        self.data.pop(key, None)
        self.owners.pop(key, None)

    def read(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in sorted(self.data.items()) if key.startswith(prefix)}

    async def changed_by(self, client: "MemoryRegistry") -> None:
        """Let the others write again what this client deleted or overwrote of theirs."""
        for other in self.clients if self.alive else ():
            if other is not client:
                other.register()
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
        self._server = server
        self._root = f"/{namespace}/"
        self._leased: dict[str, bytes] = {}
        self._deleted: set[str] = set()

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

    async def put(self, key: str, value: bytes, *, leased: bool = True) -> None:
        if leased:
            self._leased[key] = value
            self._deleted.discard(key)
        elif not self.connected:
            raise RegistryUnavailable("the server is down")
        if self.connected:
            self._server.write(self._root + key, value, self if leased else None)
            await self._server.changed_by(self)

    async def delete(self, key: str) -> None:
        if self._leased.pop(key, None) is None and not self.connected:
            raise RegistryUnavailable("the server is down")
        self._deleted.add(key)
        if self.connected:
            self.register()
            await self._server.changed_by(self)

    def register(self) -> None:
        """Bring the server up to date with what this process wrote while it was away."""
        for key in self._deleted:
            self._server.remove(self._root + key)
        self._deleted.clear()
        for key, value in self._leased.items():
            self._server.write(self._root + key, value, self)

    async def read(self, prefix: str) -> dict[str, bytes]:
        if not self.connected:
            raise RegistryUnavailable("the server is down")
        return self._read(prefix)

    def _read(self, prefix: str) -> dict[str, bytes]:
        values = self._server.read(self._root + prefix)
        return {key.removeprefix(self._root): value for key, value in values.items()}

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
