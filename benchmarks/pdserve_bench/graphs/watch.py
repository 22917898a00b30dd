"""The graph as etcd and its processes tell it: what is registered, and what is still held."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import httpx

from pdserve.contract.messages import Load
from pdserve.contract.records import Instance, Role, decode_instance
from pdserve.observe.process_pages import read_loads
from pdserve.registry import connect, keys
from pdserve.registry.base import Registry
from pdserve.runtime.tasks import Lifetime
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import RegistryUnavailable

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.25
TELL_EVERY = 15.0


@dataclass(frozen=True)
class Leftovers:
    """What a graph without requests still holds."""

    blocks: Mapping[str, int]
    """KV blocks by instance, of those that hold any"""
    queued: int
    seconds: float
    amiss: tuple[str, ...] = ()
    """instances that are busy, and roles that are missing, a sentence each"""


class GraphWatch(Lifetime):
    """Asks etcd each time: a picture that an outage has frozen would say that nothing is amiss."""

    def __init__(self) -> None:
        self.registry: Registry
        self.whole: Mapping[str, int] = {}
        """how many of each role make the graph complete"""
        self._connection = AsyncExitStack()

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with self._connection:
            yield

    async def move(self, graph: GraphRecord) -> None:
        """To the etcd of this graph, first of all and where it has another one. Raises RegistryUnavailable."""
        await self._connection.aclose()
        self.registry = await self._connection.enter_async_context(
            connect(graph.etcd, graph.namespace, graph.load_credentials())
        )

    async def instances(self, *roles: Role) -> list[Instance]:
        """Return the instances of these roles, else all; empty while etcd does not answer."""
        try:
            found = await self.registry.read(keys.INSTANCES)
        except RegistryUnavailable as error:
            logger.debug("%s", error)
            return []
        instances = [decode_instance(value) for value in found.values()]
        return [found for found in instances if not roles or any(map(found.role.includes, roles))]

    async def learn(self) -> list[Instance]:
        """What is there now is the whole graph."""
        instances = await self.instances()
        self.whole = _count(instances)
        return instances

    async def until_whole(self, but: Collection[str], say: Callable[[str], None]) -> None:
        """Wait until as many of each role are registered as at the beginning. `but` are the instances that were
        ended: their leases may outlive them. Says now and then what is still missing."""
        told_at = time.monotonic()
        while (there := _count([i for i in await self.instances() if i.id not in but])) != self.whole:
            if time.monotonic() - told_at > TELL_EVERY:
                say(
                    f"waiting for {listed(self.whole)}; there are {listed(there) or 'none, or etcd is silent'}"
                )
                told_at = time.monotonic()
            await asyncio.sleep(LOOK_EVERY)

    async def leftovers(self, within: float) -> Leftovers:
        """What is left when nothing is, or after so many seconds."""
        started = time.monotonic()
        while True:
            instances = await self.instances()
            loads = await read_loads(instances)
            seconds = time.monotonic() - started
            queued = max((load.queue_depth for load in loads.values()), default=0)
            there = _count(instances)
            amiss = [
                f"{instance} has {load.running} requests, and {load.waiting} that wait"
                for instance, load in loads.items()
                if load.running or load.waiting
            ]
            if missing := Counter(self.whole) - there:
                amiss.append(f"missing: {listed(missing)}")
            left = Leftovers(held(instances, loads), queued, seconds, tuple(amiss))
            if seconds >= within or not (left.blocks or queued or amiss or there != self.whole):
                return left
            await asyncio.sleep(LOOK_EVERY)

    async def metrics(self, *roles: Role) -> dict[str, dict[str, float]]:
        """The values of each instance's own page, by instance id and series."""
        pages: dict[str, dict[str, float]] = {}
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:
            for instance in await self.instances(*roles):
                with suppress(httpx.HTTPError):
                    pages[instance.id] = series((await http.get(instance.metrics)).text)
        return pages


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))


def series(page: str) -> dict[str, float]:
    """The values of a page in Prometheus' text format, labels as they are written."""
    lines = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def total(page: Mapping[str, float], name: str) -> float:
    """The sum over all labels."""
    return sum(value for line, value in page.items() if line.partition("{")[0] == name)


def _count(instances: list[Instance]) -> Counter[str]:
    return Counter(instance.role.value for instance in instances if not instance.draining)


def held(instances: list[Instance], loads: Mapping[str, Load]) -> dict[str, int]:
    """KV blocks, at least one for each worker that holds anything, since the share is rounded, or does not tell."""
    found = {i.id: loads[i.id].kv_usage * i.kv_blocks if i.id in loads else 1 for i in instances}
    return {instance: max(1, round(blocks)) for instance, blocks in found.items() if blocks}
