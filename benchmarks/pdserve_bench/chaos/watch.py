"""The graph, as etcd itself tells it: who is there, and what they still hold."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from typing import Self

from pdserve.errors import RegistryUnavailable
from pdserve.messages import Instance, decode_instance
from pdserve.registry import connect, keys
from pdserve.registry.base import Registry
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.chaos.score import Leftovers

log = logging.getLogger(__name__)

LOOK_EVERY = 0.25
TELL_EVERY = 15.0


class Watch:
    """Asks the server each time: a picture that an outage has frozen would say that nothing is amiss."""

    def __init__(self) -> None:
        self.registry: Registry
        self.whole: Mapping[str, int] = {}
        """how many of each role make the graph complete"""
        self._connection = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.aclose()

    async def move(self, graph: GraphRecord) -> None:
        """To the etcd of this graph, first of all and where it has another one. Raises RegistryUnavailable."""
        await self._connection.aclose()
        self.registry = await self._connection.enter_async_context(connect(graph.etcd, graph.namespace))

    async def instances(self) -> list[Instance]:
        """Empty while etcd does not answer."""
        try:
            found = await self.registry.read(keys.INSTANCES)
        except RegistryUnavailable as error:
            log.debug("%s", error)
            return []
        return [decode_instance(value) for value in found.values()]

    async def learn(self) -> list[Instance]:
        """What is there now is the whole graph."""
        instances = await self.instances()
        self.whole = _count(instances)
        return instances

    async def until_whole(self, but: Collection[str], say: Callable[[str], None]) -> None:
        """Until as many of each role are registered as at the beginning. `but` are the instances that were
        ended: their leases may outlive them. Says now and then what is still missing."""
        told_at = time.monotonic()
        while (there := _count([one for one in await self.instances() if one.id not in but])) != self.whole:
            if time.monotonic() - told_at > TELL_EVERY:
                say(f"waiting for {told(self.whole)}; there are {told(there) or 'none, or etcd is silent'}")
                told_at = time.monotonic()
            await asyncio.sleep(LOOK_EVERY)

    async def leftovers(self, within: float) -> Leftovers:
        """What is left when nothing is, or after so many seconds."""
        started = time.monotonic()
        while True:
            instances = await self.instances()
            seconds = time.monotonic() - started
            left = Leftovers(
                _held(instances), max((one.load.queue_depth for one in instances), default=0), seconds
            )
            clean = not left.blocks and not left.queued and not any(map(_busy, instances))
            if seconds >= within or (clean and _count(instances) == self.whole):
                return left
            await asyncio.sleep(LOOK_EVERY)


def told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))


def _count(instances: list[Instance]) -> Counter[str]:
    return Counter(one.role.value for one in instances if not one.draining)


def _busy(one: Instance) -> bool:
    return bool(one.load.running or one.load.waiting)


def _held(instances: list[Instance]) -> dict[str, int]:
    """At least one for each worker that holds anything: the share is rounded."""
    return {
        one.id: max(1, round(one.load.kv_usage * one.kv_blocks)) for one in instances if one.load.kv_usage
    }
