"""How the leader and followers of a worker that spans hosts meet, and that the loss of one ends the others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import pytest

from pdserve.config.schema import WorkerConfig
from pdserve.contract.records import NodeFollower, NodeLeader
from pdserve.engine.spec import EngineNode
from pdserve.process import nodes
from pdserve.process.nodes import Follower, Leader, start_with_hosts
from pdserve.registry.base import Registry
from pdserve.util.errors import ConfigError, EngineDead
from tests.conditions import holds, until
from tests.decode.graph import config
from tests.memory.registry import MemoryRegistry, MemoryServer

SLOT = "decode-0"
ARGUMENTS: dict[str, object] = {"tensor-parallel-size": 4, "nnodes": 2}
SOON = 0.05
"""seconds after which a missing record counts as lost"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "TICK", 0.005)
    monkeypatch.setattr(nodes, "LOST_AFTER_AT_START", SOON)


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


Side = TypeVar("Side", Leader, Follower)


class Host(Generic[Side]):
    """A process on its own host. `left` ends it; `MemoryServer.kill` is its death."""

    def __init__(self, server: MemoryServer, side: Callable[[Registry], Side]) -> None:
        self.registry = MemoryRegistry(server)
        self.side: Side = side(self.registry)
        self.met, self.left = asyncio.Event(), asyncio.Event()

    async def live(self) -> None:
        async with self.registry, self.side:
            self.met.set()
            await self.left.wait()


def leading(server: MemoryServer, name: str = "decode-0-a", count: int = 2) -> Host[Leader]:
    record = NodeLeader(name, "demo", count, "10.0.0.5", 20000, "0.32.0", ARGUMENTS)
    return Host(server, lambda registry: Leader(registry, SLOT, record))


def following(
    server: MemoryServer,
    name: str = "f1",
    rank: int = 1,
    model: str = "demo",
    arguments: dict[str, object] = ARGUMENTS,
) -> Host[Follower]:
    expected = NodeLeader("", model, 2, "", 0, "0.32.0", arguments)
    record = NodeFollower(name, "", rank)
    return Host(server, lambda registry: Follower(registry, SLOT, expected, record))


@asynccontextmanager
async def living(*hosts: Host[Any]) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Run each host in a task, because hosts wait for each other."""
    lives = [asyncio.create_task(host.live()) for host in hosts]
    try:
        yield lives
    finally:
        for host, life in zip(hosts, lives, strict=True):
            host.left.set()
            if not host.met.is_set():
                life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)


async def all_met(*hosts: Host[Any]) -> None:
    await asyncio.wait_for(asyncio.gather(*(host.met.wait() for host in hosts)), 30)


async def test_a_leader_waits_for_each_rank(server: MemoryServer) -> None:
    leader, first, second = leading(server, count=3), following(server, "f1", 1), following(server, "f2", 2)
    async with living(leader, first):
        await holds(lambda: not leader.met.is_set() and not first.met.is_set())
        async with living(second):
            await all_met(leader, first, second)
            assert leader.side.record.followers == ["f1", "f2"]
            assert (first.side.leader.host, first.side.leader.port) == ("10.0.0.5", 20000)


async def test_a_second_follower_of_a_rank_waits_for_another_leader(server: MemoryServer) -> None:
    leader, other = leading(server), leading(server, "decode-0-b")
    followers = [following(server, "f1"), following(server, "f2")]
    async with living(leader, *followers):
        await all_met(leader)
        await until(lambda: any(follower.met.is_set() for follower in followers))
        await holds(lambda: not all(follower.met.is_set() for follower in followers))
        async with living(other):
            await all_met(other, *followers)
            assert {follower.side.leader.id for follower in followers} == {"decode-0-a", "decode-0-b"}


async def test_a_follower_leaves_a_leader_that_died_while_it_waited(server: MemoryServer) -> None:
    dead, follower, leader = leading(server, count=3), following(server), leading(server, "decode-0-b")
    async with living(follower):
        async with living(dead):
            await until(lambda: follower.side.record.leader == "decode-0-a")
        async with living(leader):
            await all_met(leader, follower)
            assert follower.side.leader.id == "decode-0-b"


async def test_followers_with_another_model_or_file_do_not_join(server: MemoryServer) -> None:
    leader, strange = leading(server), following(server, model="another")
    async with living(leader, strange):
        await holds(lambda: not leader.met.is_set())
        other = following(server, arguments=ARGUMENTS | {"max-model-len": 100, "chat-template": "x"})
        async with living(other) as (life,):
            with pytest.raises(
                ConfigError, match=r"max-model-len \(100 on this host, not set at the leader\)"
            ) as refused:
                await asyncio.wait_for(life, 30)
            assert "chat-template" not in str(refused.value), "an engine has no chat template"
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


async def test_a_lost_leader_ends_its_followers(server: MemoryServer) -> None:
    """tests/e2e/test_spans_hosts.py tests that a lost follower ends its leader."""
    leader, follower = leading(server), following(server)
    async with living(leader, follower):
        await all_met(leader, follower)
        assert await start_with_hosts(asyncio.sleep(0, 1), leader.side) == 1
        watch = asyncio.create_task(follower.side.watch(SOON))
        start = asyncio.create_task(start_with_hosts(asyncio.Event().wait(), follower.side))
        await holds(lambda: not watch.done() and not start.done())
        await server.kill(leader.registry)
        with pytest.raises(EngineDead, match=r"lost its leader.*decode-0-a"):
            await asyncio.wait_for(watch, 30)
        with pytest.raises(ExceptionGroup) as failed:
            await asyncio.wait_for(start, 30)
        assert failed.group_contains(EngineDead)


async def test_an_outage_of_the_registry_does_not_end_the_worker(server: MemoryServer) -> None:
    leader, follower = leading(server), following(server)
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


async def test_a_follower_that_stops_lets_the_leader_drain(server: MemoryServer) -> None:
    leader, follower = leading(server), following(server)
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
    pytest.fail("a follower stopped")
