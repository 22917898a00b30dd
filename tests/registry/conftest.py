"""Fixtures of both registry implementations, etcd and memory. Each registry stands for a process."""

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from pdserve.registry.base import Change, Registry, apply_changes
from pdserve.registry.etcd import LEASE_TTL, EtcdRegistry
from pdserve.security.credentials import Credentials
from tests.conditions import until
from tests.memory.registry import MemoryRegistry, MemoryServer
from tests.servers import etcd_server, kill, restart

TTL = 2


class Stage(ABC):
    @abstractmethod
    def registry(self) -> Registry:
        """Return the registry of a new process."""


class Outage(Stage):
    """A stage whose server can be stopped and started again."""

    @abstractmethod
    async def down(self) -> None: ...

    @abstractmethod
    async def up(self, *, lose_data: bool = False) -> None: ...


class MemoryStage(Outage):
    def __init__(self) -> None:
        self.server = MemoryServer()

    def registry(self) -> Registry:
        return MemoryRegistry(self.server, "ns")

    async def down(self) -> None:
        await self.server.down()

    async def up(self, *, lose_data: bool = False) -> None:
        await self.server.up(lose_data)


class EtcdStage(Outage):
    """An etcd of one test. It uses TLS, as in most graphs; the etcd that all tests share does not."""

    def __init__(self, state_dir: Path, credentials: Credentials) -> None:
        self.server = etcd_server(state_dir, credentials=credentials)
        self.credentials = credentials

    def registry(self) -> EtcdRegistry:
        return EtcdRegistry(self.server.url, "ns", TTL, credentials=self.credentials)

    async def down(self) -> None:
        await kill(self.server)

    async def up(self, *, lose_data: bool = False) -> None:
        if lose_data:
            shutil.rmtree(self.server.data_dir)
        await restart(self.server)


class SharedEtcd(Stage):
    def __init__(self, url: str, namespace: str, ttl: int = LEASE_TTL) -> None:
        self.url, self.namespace, self._ttl = url, namespace, ttl

    def registry(self) -> EtcdRegistry:
        return EtcdRegistry(self.url, self.namespace, self._ttl)


@pytest.fixture(params=["memory", "etcd"])
def stage(request: pytest.FixtureRequest, namespace: str) -> Stage:
    """A registry in memory, or the etcd that all tests share."""
    if request.param == "memory":
        return MemoryStage()
    return SharedEtcd(request.getfixturevalue("etcd_url"), namespace)


@pytest.fixture
def shared(etcd_url: str, namespace: str) -> SharedEtcd:
    """The etcd that all tests share. A test may harm only its own keys and its leases, which last `TTL` seconds."""
    return SharedEtcd(etcd_url, namespace, TTL)


@pytest.fixture
async def etcd_stage(tmp_path: Path, credentials: Credentials) -> AsyncIterator[EtcdStage]:
    """An etcd of one test, which may stop it and delete its data."""
    real = EtcdStage(tmp_path, credentials)
    async with real.server:
        yield real


@pytest.fixture(params=["memory", "etcd"])
def outage(request: pytest.FixtureRequest) -> Outage:
    etcd: Outage | None = request.getfixturevalue("etcd_stage") if request.param == "etcd" else None
    return etcd or MemoryStage()


class Following:
    """A watch, followed in the background."""

    def __init__(self) -> None:
        self.state: dict[str, bytes] | None = None
        self.changes: list[Change] = []

    async def follow(self, registry: Registry, prefix: str) -> None:
        async for changes in registry.watch(prefix):
            self.state = self.state or {}
            apply_changes(changes, self.state)
            self.changes += changes

    async def until(self, state: dict[str, bytes], within: float = 30.0) -> None:
        await until(lambda: self.state == state, within)


@asynccontextmanager
async def following(registry: Registry, prefix: str = "") -> AsyncIterator[Following]:
    """Follow a prefix in the background. Entering waits until the prefix's present keys have been read."""
    followed = Following()
    task = asyncio.create_task(followed.follow(registry, prefix))
    try:
        await until(lambda: followed.state is not None or task.done())
        yield followed
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
