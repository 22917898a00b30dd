"""The decode workers of one model: a link to each that the registry lists, and the choice among them."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from pdserve.config.schema import POLICIES
from pdserve.errors import PeerGone, ProtocolError
from pdserve.frontend.admission.capacity import Capacity, total_capacity, worker_capacity
from pdserve.frontend.model import Connect
from pdserve.frontend.model.router import RouterState, choose
from pdserve.messages import Failed, Hello, Refused, Submit, ToDecode, ToFrontend
from pdserve.observe.metrics import ROUTER_DECISIONS
from pdserve.records import Instance
from pdserve.stream.base import StreamClient
from pdserve.tasks import Owner

if TYPE_CHECKING:
    from pdserve.frontend.model.generation import Generation

logger = logging.getLogger(__name__)

FIRST_RETRY = 0.5
LAST_RETRY = 5.0
"""seconds between attempts to reach a worker that the registry still lists"""


class Link:
    """A connection to one decode worker, for as long as it holds, and what this frontend has there."""

    def __init__(self, instance: str, vllm_version: str) -> None:
        self.instance = instance
        self.generations: dict[str, Generation] = {}
        """by attempt id: those that this worker has from this frontend"""
        self.tokens = 0.0
        """of KV that these will need"""
        self.refused = False
        """the worker takes no requests from this frontend"""
        self._outbox: asyncio.Queue[ToDecode] = asyncio.Queue()
        self._outbox.put_nowait(Hello(vllm_version))

    @property
    def requests(self) -> int:
        return len(self.generations)

    @property
    def starting(self) -> bool:
        """At least one of its generations has no token yet."""
        return any(not generation.tokens for generation in self.generations.values())

    def post(self, message: ToDecode) -> None:
        """Send, in order; never waits and never fails: the listener is told of a lost link. What is posted is bounded
        by what is in flight, and that by the workers' capacity."""
        self._outbox.put_nowait(message)

    async def send(self, client: StreamClient, listener: "LinkListener") -> None:
        """Send what is posted, until the worker is gone: then `received` of the client ends, too, but after the
        worker's last messages, which say which requests its engine died of."""
        while True:
            message = await self._outbox.get()
            try:
                await client.send(message)
            except PeerGone:
                return
            except ProtocolError as error:
                if isinstance(message, Submit):
                    listener.received(self, Failed(message.request_id, str(error)))


class LinkListener(Protocol):
    """Is told what happens on the links; no call may raise."""

    def link_up(self, link: Link) -> None: ...

    def received(self, link: Link, message: ToFrontend) -> None: ...

    def link_lost(self, link: Link, reason: str) -> None:
        """What is still in `link.generations` will not be answered any more."""


class WorkerPool:
    """Holds a link to each worker that the registry lists. A worker that leaves the registry gets nothing
    new, but its link stays until what it has is finished or the stream tells that it is gone."""

    def __init__(self, policy: str, vllm_version: str, connect: Connect, listener: LinkListener) -> None:
        self.policy = policy
        """may be changed at any time"""
        self._version = vllm_version
        self._connect = connect
        self._listener = listener
        self._frontends = 1
        self._instances: dict[str, Instance] = {}
        """by id: those that the registry lists"""
        self._links: dict[str, Link] = {}
        """by instance id: those that hold now"""
        self._linking: set[str] = set()
        """ids of the instances to which a task keeps a link"""
        self._tasks = Owner()
        self._last = ""

    async def close(self) -> None:
        """Leave all workers."""
        self._instances = {}
        await self._tasks.stop()

    # which workers there are

    def update(self, instances: Iterable[Instance], frontends: int) -> None:
        """Take over what the registry has now: this model's decode workers, and how many frontends share them."""
        self._frontends = frontends
        now = {instance.id: instance for instance in instances if self._has_our_vllm(instance)}
        for gone in self._instances.keys() - now.keys():
            for policy in POLICIES:
                with suppress(KeyError):
                    ROUTER_DECISIONS.remove(policy, gone)
        back = now.keys() - self._instances.keys()
        self._instances = now
        for instance in now.values():
            if instance.id not in self._linking:
                self._linking.add(instance.id)
                self._tasks.start(self._keep_link(instance), f"link: to {instance.id}")
        for link in [self._links[id] for id in back if id in self._links]:
            self._listener.link_up(link)  # it lost its lease and not its link: requests may be waiting

    @property
    def live(self) -> int:
        """Workers that would take a request now."""
        return sum(not instance.draining for instance in self._usable())

    @property
    def unreachable(self) -> list[str]:
        """Workers that the registry lists and that there is no connection to."""
        return sorted(self._instances.keys() - self._links.keys())

    @property
    def capacity(self) -> Capacity:
        """For further requests, at all workers."""
        return total_capacity(self._capacity(instance) for instance in self._usable())

    def _usable(self) -> list[Instance]:
        """The workers that are connected and have not refused this frontend."""
        links = self._links
        return [
            instance
            for instance in self._instances.values()
            if instance.id in links and not links[instance.id].refused
        ]

    def _capacity(self, instance: Instance) -> Capacity:
        return worker_capacity(instance, self._links[instance.id], self._frontends)

    def _has_our_vllm(self, instance: Instance) -> bool:
        if instance.vllm_version == self._version:
            return True
        if instance.id not in self._instances:
            ours, theirs = self._version, instance.vllm_version or "an unknown version"
            logger.debug("%s is not used: it runs vLLM %s, this frontend %s", instance.id, theirs, ours)
        return False

    # the choice

    def pick(self, avoid: Collection[str], *, only_others: bool) -> Link | None:
        """A worker for one request, with capacity where there is one; None while there is none. The workers in `avoid`
        are the last resort, or never chosen with `only_others`."""
        usable = self._usable()
        in_flight = {id: link.requests for id, link in self._links.items()}
        full = {instance.id for instance in usable if not self._capacity(instance).available}
        state = RouterState(self._last, in_flight, full)
        chosen = choose(self.policy, usable, state, avoid, only_others=only_others)
        if chosen is None:
            return None
        self._last = chosen.id
        ROUTER_DECISIONS.labels(self.policy, chosen.id).inc()
        return self._links[chosen.id]

    # the links

    async def _keep_link(self, instance: Instance) -> None:
        """Hold a link to the worker, again and again while the registry lists it."""
        pause = FIRST_RETRY
        try:
            while instance.id in self._instances:
                started = time.monotonic()
                try:
                    await self._hold_link(instance)
                except* PeerGone:
                    logger.warning("%s is gone; trying again in %g s while it is listed", instance.id, pause)
                except* Exception:
                    logger.exception("the link to %s failed; trying again in %g s", instance.id, pause)
                await asyncio.sleep(pause)
                held = time.monotonic() - started > 2 * LAST_RETRY
                pause = FIRST_RETRY if held else min(2 * pause, LAST_RETRY)
        finally:
            self._linking.discard(instance.id)

    async def _hold_link(self, instance: Instance) -> None:
        """Until the worker is gone; then raises PeerGone, perhaps in a group. The listener is told however it ends."""
        link, client = Link(instance.id, self._version), self._connect(instance.address)
        reason = f"the connection to {instance.id} was closed"
        try:
            async with client, asyncio.TaskGroup() as tasks:
                tasks.create_task(link.send(client, self._listener), name=f"to {instance.id}")
                logger.info("connected to %s", instance.id)
                self._links[instance.id] = link
                self._listener.link_up(link)
                async for message in client.received():
                    if isinstance(message, Refused):
                        link.refused = True
                        logger.warning("%s refuses this frontend: %s", instance.id, message.message)
                    else:
                        self._listener.received(link, message)
                raise PeerGone(instance.id)
        except* PeerGone:
            reason = f"{instance.id} is gone"
            raise
        finally:
            if self._links.get(instance.id) is link:
                del self._links[instance.id]
            self._listener.link_lost(link, reason)
