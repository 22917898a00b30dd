"""Workers that span hosts: how leader and followers meet, and what becomes of one when the other is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType

import pytest

from pdserve.config.schema import WorkerConfig
from pdserve.engine.spec import EngineNode
from pdserve.errors import ConfigError, EngineDead
from pdserve.process import nodes
from pdserve.process.nodes import Follower, Leader, start_while_there
from pdserve.records import NodeFollower, NodeLeader
from tests.conditions import holds, until
from tests.decode.graph import config
from tests.memory.registry import MemoryRegistry, MemoryServer

SLOT = "decode-0"
ARGUMENTS: dict[str, object] = {"tensor-parallel-size": 4, "nnodes": 2}
SOON = 0.05
"""seconds after which a record that is away is lost"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "TICK", 0.005)
    monkeypatch.setattr(nodes, "AWAY_AT_START", SOON)


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


class Host:
    """A process on a host of its own. Leaving it is its end, as `MemoryServer.kill` is its death."""

    def __init__(self, server: MemoryServer) -> None:
        self.registry = MemoryRegistry(server)
        self._left = asyncio.Event()

    @asynccontextmanager
    async def entered(self, side: Leader | Follower) -> AsyncIterator[None]:
        """Enter it in a task of its own, since that waits for the other side."""
        entered = asyncio.Event()

        async def live() -> None:
            async with self.registry, side:
                entered.set()
                await self._left.wait()

        task = asyncio.create_task(live())
        self.entering = task
        self.met = entered
        try:
            yield
        finally:
            self._left.set()
            if not entered.is_set():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Leading(Host):
    def __init__(self, server: MemoryServer, name: str = "decode-0-a", count: int = 2) -> None:
        super().__init__(server)
        record = NodeLeader(name, "demo", count, "10.0.0.5", 20000, "0.32.0", ARGUMENTS)
        self.side = Leader(self.registry, SLOT, record)


class Following(Host):
    def __init__(
        self,
        server: MemoryServer,
        name: str = "f1",
        rank: int = 1,
        model: str = "demo",
        other: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        super().__init__(server)
        expected = NodeLeader("", model, 2, "", 0, "0.32.0", {**ARGUMENTS, **other})
        self.side = Follower(self.registry, SLOT, expected, NodeFollower(name, "", rank))


@asynccontextmanager
async def living(*hosts: Leading | Following) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for host in hosts:
            await stack.enter_async_context(host.entered(host.side))
        yield


async def all_met(*hosts: Host) -> None:
    await asyncio.wait_for(asyncio.gather(*(host.met.wait() for host in hosts)), 30)


@pytest.mark.parametrize("leader_first", [True, False])
async def test_they_meet_in_whatever_order_they_start(server: MemoryServer, leader_first: bool) -> None:
    leader, follower = Leading(server), Following(server)
    async with living(*((leader, follower) if leader_first else (follower, leader))):
        await all_met(leader, follower)
        assert leader.side.record.followers == ["f1"]
        assert (follower.side.leader.host, follower.side.leader.port) == ("10.0.0.5", 20000)


async def test_a_leader_waits_for_each_rank(server: MemoryServer) -> None:
    leader, first, second = Leading(server, count=3), Following(server, "f1", 1), Following(server, "f2", 2)
    async with living(leader, first):
        await holds(lambda: not leader.met.is_set() and not first.met.is_set())
        async with living(second):
            await all_met(leader, first, second)
            assert leader.side.record.followers == ["f1", "f2"]


async def test_a_second_follower_of_a_rank_waits_for_another_leader(server: MemoryServer) -> None:
    leader, other = Leading(server), Leading(server, "decode-0-b")
    followers = [Following(server, "f1"), Following(server, "f2")]
    async with living(leader, *followers):
        await all_met(leader)
        await until(lambda: any(follower.met.is_set() for follower in followers))
        await holds(lambda: not all(follower.met.is_set() for follower in followers))
        async with living(other):
            await all_met(other, *followers)
            assert {follower.side.leader.id for follower in followers} == {"decode-0-a", "decode-0-b"}


async def test_a_follower_leaves_a_leader_that_died_while_it_waited(server: MemoryServer) -> None:
    dead, follower, leader = Leading(server, count=3), Following(server), Leading(server, "decode-0-b")
    async with living(follower):
        async with living(dead):
            await until(lambda: follower.side.record.leader == "decode-0-a")
        async with living(leader):
            await all_met(leader, follower)
            assert follower.side.leader.id == "decode-0-b"


async def test_followers_of_other_models_and_other_files_are_not_taken(server: MemoryServer) -> None:
    leader, strange = Leading(server), Following(server, model="another")
    async with living(leader, strange):
        await holds(lambda: not leader.met.is_set())
        other = Following(server, other={"max-model-len": 100, "chat-template": "x"})
        async with living(other):
            with pytest.raises(ConfigError, match=r"max-model-len \(100 here, not set there\)") as refused:
                await asyncio.wait_for(other.entering, 30)
            assert "chat-template" not in str(refused.value), "an engine has none"
            assert not leader.met.is_set()


def test_defaults_of_a_host_are_not_compared() -> None:
    arguments = {"nnodes": 2, "dtype": "float32", "long-prefill-token-threshold": 256}
    origins = {
        "nnodes": "VllmWorker",
        "dtype": "Common",
        "long-prefill-token-threshold": "pdserve (short gaps)",
    }
    section = WorkerConfig(engine_args=arguments, origins=origins)
    record = nodes.node_leader(config(), section, EngineNode(0, "10.0.0.5", 1), "decode-0-a")
    assert record.engine_args == {"nnodes": 2, "dtype": "float32"}


@pytest.mark.parametrize("lost", ["a follower is gone.*f1", "its leader is gone.*decode-0-a"])
async def test_a_lost_host_ends_the_others(server: MemoryServer, lost: str) -> None:
    leader, follower = Leading(server), Following(server)
    async with living(leader, follower):
        await all_met(leader, follower)
        followers = "follower" in lost
        watching = leader.side.watch(_never, SOON) if followers else follower.side.watch(SOON)
        watch = asyncio.create_task(watching)
        await holds(lambda: not watch.done())
        await server.kill((follower if followers else leader).registry)
        with pytest.raises(EngineDead, match=lost):
            await asyncio.wait_for(watch, 30)


async def test_an_outage_of_the_registry_ends_nothing(server: MemoryServer) -> None:
    leader, follower = Leading(server), Following(server)
    async with living(leader, follower):
        await all_met(leader, follower)
        both = leader.side.watch(_never, SOON), follower.side.watch(SOON)
        watches = [asyncio.create_task(watching) for watching in both]
        await server.down()
        await holds(lambda: not any(watch.done() for watch in watches), 0.2)
        await server.up(lose_data=True)
        await holds(lambda: not any(watch.done() for watch in watches), 0.2)
        for watch in watches:
            watch.cancel()


async def test_a_host_that_is_lost_while_the_engine_starts_ends_the_start(server: MemoryServer) -> None:
    leader, follower = Leading(server), Following(server)
    async with living(leader, follower):
        await all_met(leader, follower)
        start = asyncio.create_task(start_while_there(_for_ever(), follower.side))
        await server.kill(leader.registry)
        with pytest.raises(ExceptionGroup) as failed:
            await asyncio.wait_for(start, 30)
        assert failed.group_contains(EngineDead)
        assert await start_while_there(_at_once(), leader.side) == 1


async def test_a_follower_that_stops_lets_the_leader_drain(server: MemoryServer) -> None:
    leader, follower = Leading(server), Following(server)
    drains = asyncio.Event()
    async with living(leader, follower):
        await all_met(leader, follower)
        watch = asyncio.create_task(leader.side.watch(drains.set))
        stopping = asyncio.create_task(follower.side.stop())
        await asyncio.wait_for(drains.wait(), 30)
        await holds(lambda: not stopping.done())
        await server.kill(leader.registry)
        await asyncio.wait_for(stopping, 30)
        watch.cancel()


def _never() -> None:
    pytest.fail("nothing asked it to stop")


async def _for_ever() -> None:
    await asyncio.Event().wait()


def _at_once() -> Awaitable[int]:
    return asyncio.sleep(0, 1)
