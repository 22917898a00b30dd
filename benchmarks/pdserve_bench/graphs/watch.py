"""Watch a graph through etcd and its processes: registered instances, held KV blocks, queued prefills."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import httpx

from pdserve.contract.messages import Load
from pdserve.contract.records import Instance, Role, decode_instance
from pdserve.observe.process_pages import read_watched
from pdserve.registry import connect, keys
from pdserve.registry.base import Registry
from pdserve.runtime.tasks import Lifetime
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import RegistryUnavailable

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.25
TELL_EVERY = 15.0


@dataclass(frozen=True)
class Leftovers:
    """What an idle graph still holds."""

    blocks: Mapping[str, int]
    """Held KV blocks by instance; instances without any are left out."""
    queued: int
    seconds: float
    amiss: tuple[str, ...] = ()
    """Sentences about busy instances and missing roles."""


class GraphWatch(Lifetime):
    """Reads etcd at each call, because a cached view would look healthy during an outage."""

    def __init__(self) -> None:
        self.registry: Registry
        self.whole: Mapping[str, int] = {}
        """Number of instances of each role in the complete graph."""
        self._connection = AsyncExitStack()

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with self._connection:
            yield

    async def move(self, graph: GraphRecord) -> None:
        """Connect to the etcd of `graph`; call this first. Raises RegistryUnavailable."""
        await self._connection.aclose()
        self.registry = await self._connection.enter_async_context(
            connect(graph.etcd, graph.namespace, graph.load_credentials())
        )

    async def instances(self, *roles: Role) -> list[Instance]:
        """Return the instances of these roles, or all; empty while etcd is unreachable."""
        try:
            found = await self.registry.read(keys.INSTANCES)
        except RegistryUnavailable as error:
            logger.debug("%s", error)
            return []
        instances = [decode_instance(value) for value in found.values()]
        return [found for found in instances if not roles or any(map(found.role.includes, roles))]

    async def learn(self) -> list[Instance]:
        """Take the current instances as the complete graph."""
        instances = await self.instances()
        self.whole = _count(instances)
        return instances

    async def until_whole(self, but: Collection[str], say: Callable[[str], None]) -> None:
        """Wait until each role has as many instances as when learned, without those in `but`: these were ended, but may
        still have leases. Log what is missing."""
        told_at = time.monotonic()
        while (there := _count([i for i in await self.instances() if i.id not in but])) != self.whole:
            if time.monotonic() - told_at > TELL_EVERY:
                say(
                    f"waiting for {listed(self.whole)}; now {listed(there) or 'none, or etcd is unreachable'}"
                )
                told_at = time.monotonic()
            await asyncio.sleep(POLL_INTERVAL)

    async def leftovers(self, within: float) -> Leftovers:
        """Wait until the graph holds nothing, up to `within` seconds, and return what it still holds."""
        started = time.monotonic()
        while True:
            instances = await self.instances()
            loads = await read_loads(instances)
            seconds = time.monotonic() - started
            queued = max((load.queue_depth for load in loads.values()), default=0)
            there = _count(instances)
            amiss = [
                f"{instance} has {load.running} running and {load.waiting} waiting requests"
                for instance, load in loads.items()
                if load.running or load.waiting
            ]
            if missing := Counter(self.whole) - there:
                amiss.append(f"missing: {listed(missing)}")
            left = Leftovers(held(instances, loads), queued, seconds, tuple(amiss))
            if seconds >= within or not (left.blocks or queued or amiss or there != self.whole):
                return left
            await asyncio.sleep(POLL_INTERVAL)

    async def metrics(self, *roles: Role) -> dict[str, dict[str, float]]:
        """Return the metrics of each instance, by instance id and series."""
        pages: dict[str, dict[str, float]] = {}
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:
            for instance in await self.instances(*roles):
                with suppress(httpx.HTTPError):
                    pages[instance.id] = series((await http.get(instance.metrics)).text)
        return pages


async def read_loads(instances: Iterable[Instance]) -> dict[str, Load]:
    """Return what each instance reports of its load, by instance id."""
    return {name: report.load for name, report in (await read_watched(instances)).items()}


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))


def series(page: str) -> dict[str, float]:
    """Parse Prometheus' text format; keys keep their labels."""
    lines = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def total(page: Mapping[str, float], name: str) -> float:
    """Sum a metric over its labels."""
    return sum(value for line, value in page.items() if line.partition("{")[0] == name)


def _count(instances: list[Instance]) -> Counter[str]:
    return Counter(instance.role.value for instance in instances if not instance.draining)


def held(instances: list[Instance], loads: Mapping[str, Load]) -> dict[str, int]:
    """Return held KV blocks by instance that holds any. An instance that does not reply counts as holding one."""
    found = {i.id: loads[i.id].kv_usage * i.kv_blocks if i.id in loads else 1 for i in instances}
    return {instance: max(1, round(blocks)) for instance, blocks in found.items() if blocks}
