"""Rendezvous and failure detection of the hosts of a worker that spans hosts.

Node rank 0 is the leader, which has the engine core and registers as the worker; followers only have ranks of the
engine. vLLM itself waits half an hour for a host that never starts, and for ever for a lost one (vllm#32136, #48720).

The leader registers and waits until a follower of each node rank has joined it. It then chooses the followers, and all
start their ranks. When a host is lost, the worker ends on all hosts. systemd, Slurm or Kubernetes restarts the
worker."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from pdserve.config.engine_args.arguments import for_engine
from pdserve.config.engine_args.installed import VLLM_VERSION, installed_vllm
from pdserve.config.schema import Config, WorkerConfig
from pdserve.contract.records import NodeFollower, NodeLeader, encode_record
from pdserve.engine.spec import EngineNode
from pdserve.plan.slots import Slot
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import Lifetime
from pdserve.util.errors import ConfigError, EngineDead

logger = logging.getLogger(__name__)
T = TypeVar("T")

GROUP_VARIABLE = "PDSERVE_NODE_GROUP"
"""Environment variable with a text that only the hosts of one worker share; without it, a leader takes any followers of
its slot."""
LOST_AFTER = 5.0
"""Seconds without a record after which a process counts as lost. A live process whose lease has expired registers again
within two or three seconds."""
LOST_AFTER_AT_START = 30.0
"""`LOST_AFTER` while engines start, because imports and forks may stop a process for many seconds."""
TICK = 0.5
"""Seconds between two checks. Time is counted in ticks, so that a pause of this process does not count."""


def node_leader(config: Config, section: WorkerConfig, node: EngineNode, instance_id: str) -> NodeLeader:
    """The leader's record, without pdserve's own defaults, which may differ by host."""
    given = {
        name: value
        for name, value in section.engine_args.items()
        if not section.origins.get(name, "").startswith("pdserve")
    }
    return NodeLeader(
        instance_id,
        config.served_model_name,
        section.nodes,
        node.host,
        node.port,
        installed_vllm().version or VLLM_VERSION,
        given,
    )


def meeting_place(slot: Slot) -> str:
    """The part of the registry keys under which the hosts of a worker meet."""
    group = os.environ.get(GROUP_VARIABLE, "")
    return f"{slot.worker}@{group}" if group else slot.worker


class Leader(Lifetime):
    """Enter it after the registry. Entering returns when a follower of each rank has been chosen."""

    def __init__(self, registry: Registry, place: str, record: NodeLeader) -> None:
        self.record = record
        self._registry = registry
        self._key = keys.leader(place, record.id)
        self._view = RegistryView(registry, keys.followers(place))

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with self._view:
            await self._write()
            taken = await self._joined()
            self.record = msgspec.structs.replace(self.record, followers=taken)
            await self._write()
            logger.info("this worker spans %d hosts; followers: %s", self.record.nodes, ", ".join(taken))
            yield

    async def watch(self, stop: Callable[[], None] = lambda: None, patience: float = LOST_AFTER) -> None:
        """Call `stop`, to drain, when a follower asks to stop. Raises EngineDead when a follower is lost; never
        returns."""
        async for present in _present(self._followers, self.record.followers, "a follower", patience):
            if any(follower.stopping for follower in present.values()):
                stop()

    async def _joined(self) -> list[str]:
        ranks, missing = range(1, self.record.nodes), list[int]()
        async for _ in self._view.changes():
            by_rank = {each.rank: each.id for each in self._followers().values() if not each.stopping}
            before, missing = missing, [rank for rank in ranks if rank not in by_rank]
            if not missing:
                return [by_rank[rank] for rank in ranks]
            if missing != before:
                logger.info("waiting for the hosts with --node-rank %s", ", ".join(map(str, missing)))
        raise AssertionError("a view's changes never end")

    def _followers(self) -> dict[str, NodeFollower]:
        return {each.id: each for each in self._view.followers() if each.leader == self.record.id}

    async def _write(self) -> None:
        await self._registry.put(self._key, encode_record(self.record))


class Follower(Lifetime):
    """Enter it after the registry. Entering returns when a leader has chosen this follower."""

    leader: NodeLeader

    def __init__(self, registry: Registry, place: str, expected: NodeLeader, record: NodeFollower) -> None:
        """`expected`: the leader's record that this host's file would give."""
        self.record = record
        self._expected = expected
        self._registry = registry
        self._key = keys.follower(place, record.id)
        self._view = RegistryView(registry, keys.leaders(place))

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with self._view:
            self.leader = await self._taken()
            leader = self.leader
            logger.info("joined leader %s on %s as node rank %d", leader.id, leader.host, self.record.rank)
            yield

    async def watch(self, patience: float = LOST_AFTER) -> None:
        """Raises EngineDead when the leader is lost; never returns."""
        async for _ in _present(self._leaders, [self.leader.id], "its leader", patience):
            pass

    async def stop(self) -> None:
        """Ask the leader to drain, and return when it has ended."""
        await self._join(msgspec.structs.replace(self.record, stopping=True))
        async for _ in self._view.changes():
            if self.leader.id not in self._leaders():
                return

    async def _taken(self) -> NodeLeader:
        """Wait until a leader chooses this follower. Raises ConfigError if the leader's engine arguments or vLLM
        version differ from this host's."""
        logger.info("waiting for a leader: start `pdserve` with the same file on the first host")
        async for _ in self._view.changes():
            leaders = self._leaders()
            ours = leaders.get(self.record.leader)
            if ours and self.record.id in ours.followers:
                return ours
            waiting = [each for each in leaders.values() if not each.followers]
            if waiting and ours not in waiting:
                _compare(waiting[0], self._expected)
                await self._join(msgspec.structs.replace(self.record, leader=waiting[0].id))
        raise AssertionError("a view's changes never end")

    def _leaders(self) -> dict[str, NodeLeader]:
        return {each.id: each for each in self._view.leaders() if each.model == self._expected.model}

    async def _join(self, record: NodeFollower) -> None:
        self.record = record
        await self._registry.put(self._key, encode_record(record))


async def start_with_hosts(start: Awaitable[T], others: Leader | Follower) -> T:
    """Start this host's ranks. Raises a group with EngineDead if another host is lost meanwhile."""
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(others.watch(patience=LOST_AFTER_AT_START))
        result = await start
        watching.cancel()
    return result


async def _present(
    registered: Callable[[], dict[str, T]], needed: Iterable[str], what: str, patience: float
) -> AsyncIterator[dict[str, T]]:
    """Yield the registered records every `TICK`. Raises EngineDead when one of `needed` (ids) has been missing for
    `patience` seconds."""
    missing = 0.0
    while True:
        found = registered()
        lost = [each for each in needed if each not in found]
        missing = missing + TICK if lost else 0.0
        if missing >= patience:
            raise EngineDead(f"lost {what} of an engine that spans hosts: {', '.join(lost)}")
        yield found
        await asyncio.sleep(TICK)


def _compare(leader: NodeLeader, ours: NodeLeader) -> None:
    theirs, own = for_engine(leader.engine_args), msgspec.json.decode(encode_record(ours), type=NodeLeader)
    mine = for_engine(own.engine_args)
    differ = [
        f"{name} ({mine.get(name, 'not set')} on this host, {theirs.get(name, 'not set')} at the leader)"
        for name in sorted(theirs.keys() | mine.keys())
        if theirs.get(name) != mine.get(name)
    ]
    if leader.vllm_version != ours.vllm_version:
        differ.append(f"vLLM ({ours.vllm_version} on this host, {leader.vllm_version} at the leader)")
    if differ:
        where = f"the leader {leader.id} on {leader.host}"
        text = f"This host's file or version differs from that of {where}: {', '.join(differ)}; use the same on both."
        raise ConfigError([text])
