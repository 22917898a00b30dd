"""The decode workers of one model: a link to each that the registry knows, and the choice among them."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

from pdserve.config.schema import POLICIES
from pdserve.errors import PeerGone
from pdserve.frontend.admission.capacity import Capacity, total_capacity, worker_capacity
from pdserve.frontend.model import Connect
from pdserve.frontend.model.link import Link, LinkOwner
from pdserve.frontend.model.router import RouterState, choose, eligible
from pdserve.messages import Instance, ToFrontend
from pdserve.observe.metrics import ROUTER_DECISIONS
from pdserve.tasks import Owner

logger = logging.getLogger(__name__)


FIRST_RETRY = 0.5
LAST_RETRY = 5.0
"""seconds between attempts to reach a worker that the registry still lists"""


class Fleet:
    """A worker that leaves the registry gets nothing new, but its link stays until what it has is finished
    or the stream tells that it is gone."""

    def __init__(self, policy: str, vllm_version: str, connect: Connect, owner: LinkOwner) -> None:
        self.policy = policy
        """may be changed at any time"""
        self._version = vllm_version
        self._connect = connect
        self._owner = owner
        self._instances: dict[str, Instance] = {}
        self._links: dict[str, Link] = {}
        self._tasks = Owner()
        self._frontends = 1
        self._kept: set[str] = set()
        """instances to which a task holds a link"""
        self._last = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._instances = {}
        await self._tasks.stop()

    def update(self, instances: Iterable[Instance], frontends: int) -> None:
        """Take over what the registry has now: this model's decode workers, and how many frontends share them."""
        self._frontends = frontends
        now = {one.id: one for one in instances if self._fits(one)}
        for gone in self._instances.keys() - now.keys():
            for policy in POLICIES:
                with suppress(KeyError):
                    ROUTER_DECISIONS.remove(policy, gone)
        back = now.keys() - self._instances.keys()
        self._instances = now
        for instance in now.values():
            if instance.id not in self._kept:
                self._keep(instance)
        for link in [self._links[name] for name in back if name in self._links]:
            self._owner.link_up(link)  # it lost its lease and not its link: requests may be waiting

    def pick(self, avoid: Collection[str], only_others: bool) -> Link | None:
        """A connected worker for one request, with capacity where there is one; None while there is none. Those in
        `avoid` are the last resort, or none with `only_others`."""
        connected = [one for one in self._instances.values() if self._usable(one)]
        takers = eligible(connected, avoid, only_others=only_others)
        takers = [one for one in takers if self._capacity(one).available] or takers
        in_flight = {name: len(link.generations) for name, link in self._links.items()}
        chosen = choose(self.policy, takers, RouterState(self._last, in_flight))
        if chosen is None:
            return None
        self._last = chosen.id
        ROUTER_DECISIONS.labels(self.policy, chosen.id).inc()
        return self._links[chosen.id]

    @property
    def live(self) -> int:
        """Workers that would take a request now."""
        return sum(self._usable(one) and not one.draining for one in self._instances.values())

    @property
    def unreachable(self) -> list[str]:
        """Workers that the registry lists and that there is no connection to."""
        return sorted(self._instances.keys() - self._links.keys())

    @property
    def capacity(self) -> Capacity:
        """For further requests, at all workers."""
        return total_capacity(self._capacity(one) for one in self._instances.values() if self._usable(one))

    # LinkOwner

    def link_up(self, link: Link) -> None:
        logger.info("connected to %s", link.instance)
        self._links[link.instance] = link
        self._owner.link_up(link)

    def link_lost(self, link: Link, reason: str) -> None:
        if self._links.get(link.instance) is link:
            del self._links[link.instance]
        self._owner.link_lost(link, reason)

    def arrived(self, link: Link, message: ToFrontend) -> None:
        self._owner.arrived(link, message)

    # inside

    def _usable(self, instance: Instance) -> bool:
        link = self._links.get(instance.id)
        return link is not None and not link.refused

    def _capacity(self, instance: Instance) -> Capacity:
        return worker_capacity(instance, self._links[instance.id], self._frontends)

    def _fits(self, instance: Instance) -> bool:
        if instance.vllm_version == self._version:
            return True
        if instance.id not in self._instances:
            ours, theirs = self._version, instance.vllm_version or "an unknown version"
            logger.debug("%s is not used: it runs vLLM %s, this frontend %s", instance.id, theirs, ours)
        return False

    def _keep(self, instance: Instance) -> None:
        self._kept.add(instance.id)
        task = self._tasks.start(self._keep_link(instance), f"link: to {instance.id}")
        task.add_done_callback(lambda _: self._released(instance.id))

    def _released(self, instance: str) -> None:
        self._kept.discard(instance)
        if instance in self._instances:  # it came back in the very moment
            self._keep(self._instances[instance])

    async def _keep_link(self, instance: Instance) -> None:
        """Hold a link to the worker, again and again while the registry lists it."""
        pause = FIRST_RETRY
        while instance.id in self._instances:
            link = Link(instance.id, self._connect(instance.address), self, self._version)
            started = time.monotonic()
            try:
                await link.run()
            except PeerGone:
                logger.warning("%s is gone; trying again in %g s while it is listed", instance.id, pause)
            except Exception:
                logger.exception("the link to %s failed; trying again in %g s", instance.id, pause)
            await asyncio.sleep(pause)
            held = time.monotonic() - started > 2 * LAST_RETRY
            pause = FIRST_RETRY if held else min(2 * pause, LAST_RETRY)
