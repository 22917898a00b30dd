"""The decode workers of one model: a link to each that the registry lists, and the choice among them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from heapq import nlargest
from typing import TYPE_CHECKING, Protocol

from pdserve.config.schema import POLICIES
from pdserve.errors import PeerGone, ProtocolError, leaves
from pdserve.frontend.admission.capacity import Capacity, worker_capacity
from pdserve.frontend.model import Connect
from pdserve.frontend.model.candidates import WINDOW, Candidates
from pdserve.frontend.model.prefix_index import PrefixIndex
from pdserve.frontend.model.router import RouterState, choose
from pdserve.messages import (
    Failed,
    Hello,
    Load,
    PrefixesChanged,
    Refused,
    Submit,
    ToDecode,
    ToFrontend,
    WorkerLoad,
)
from pdserve.observe.metrics import IN_FLIGHT, ROUTER_DECISIONS
from pdserve.records import Instance
from pdserve.stream.base import StreamClient
from pdserve.tasks import Owner
from pdserve.watch import LinkState

if TYPE_CHECKING:
    from pdserve.frontend.model.generation import Generation

logger = logging.getLogger(__name__)

FIRST_RETRY = 0.5
LAST_RETRY = 5.0
"""seconds between attempts to reach a worker that the registry still lists"""


class Link:
    """A connection to one decode worker, for as long as it holds, and what this frontend has there."""

    def __init__(self, instance: str, changed: Callable[["Link"], None], block_size: int = 0) -> None:
        """`changed` is called when what the worker has from this frontend changes, or what it says."""
        self.instance = instance
        self.block_size = block_size
        self._changed = changed
        self.generations: dict[str, Generation] = {}
        """by attempt id: those that this worker has from this frontend"""
        self.tokens = 0.0
        """of KV that these will need"""
        self.load = Load()
        """as the worker said last"""
        self.placed = 0.0
        """tokens of KV that what it got from this frontend since then will need"""
        self._others = 0
        """tokens that it had of other frontends then"""
        self.refused = False
        """the worker takes no requests from this frontend"""
        self.round_trip: Callable[[], float | None] = lambda: None
        """seconds, as the stream has it"""
        self._outbox: asyncio.Queue[ToDecode] = asyncio.Queue()

    def touch(self) -> None:
        """To be called after each change of what counts for the worker's capacity."""
        self._changed(self)

    @property
    def requests(self) -> int:
        return len(self.generations)

    def take_load(self, load: Load) -> None:
        ours = sum(
            len(generation.prompt) + len(generation.tokens) for generation in self.generations.values()
        )
        self.load, self.placed, self._others = load, 0.0, max(0, load.tokens - ours)
        self.touch()

    def outstanding(self, frontends: int) -> float:
        """Tokens of KV that all requests at the worker need, about. What this frontend has there it knows exactly; each
        of the others has seen the same report and has chosen alike since: without that they would all choose the same
        worker."""
        return self.tokens + self._others + (frontends - 1) * self.placed

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
        self._policy = policy
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
        self._failures: dict[str, tuple[int, str]] = {}
        """by instance id, of those that the registry lists: how often a link was lost or could not be made; the last
        reason"""
        self._candidates = Candidates()
        self._touched: set[str] = set()
        """ids of those that have changed since `_candidates` was asked"""
        self._prefixes = PrefixIndex()
        """empty but for the policy `kv`"""
        self._tasks = Owner()
        self._last = ""

    async def close(self) -> None:
        """Leave all workers."""
        self._touched |= self._instances.keys()
        self._instances = {}
        await self._tasks.stop()

    @property
    def policy(self) -> str:
        """May be changed at any time."""
        return self._policy

    @policy.setter
    def policy(self, policy: str) -> None:
        before, self._policy = self._policy, policy
        if (before == "kv") != (policy == "kv"):
            for link in self._links.values():
                self._prefixes.forget(link.instance)
                link.post(self._hello)

    @property
    def _hello(self) -> Hello:
        return Hello(self._version, follow_cache=self._policy == "kv", follow_load=True)

    # which workers there are

    def update(self, instances: Iterable[Instance], frontends: int) -> None:
        """Take over what the registry has now: this model's decode workers, and how many frontends share them."""
        if frontends != self._frontends:
            self._frontends = frontends
            self._touched |= self._links.keys()
        now = {instance.id: instance for instance in instances if self._has_our_vllm(instance)}
        for gone in self._instances.keys() - now.keys():
            self._failures.pop(gone, None)
            for policy in POLICIES:
                with suppress(KeyError):
                    ROUTER_DECISIONS.remove(policy, gone)
        back = now.keys() - self._instances.keys()
        before, self._instances = self._instances, now
        self._touched |= {id for id in before.keys() | back if before.get(id) != now.get(id)}
        for instance in now.values():
            if instance.id not in self._linking:
                self._linking.add(instance.id)
                self._tasks.start(self._keep_link(instance), f"link: to {instance.id}")
        for link in [self._links[id] for id in back if id in self._links]:
            self._listener.link_up(link)  # it lost its lease and not its link: requests may be waiting

    @property
    def live(self) -> int:
        """Workers that would take a request now."""
        return len(self._ready())

    def links(self) -> list[LinkState]:
        """To all workers that the registry lists, and to those that left it and still work."""
        return [self._link_state(id) for id in sorted(self._instances.keys() | self._links.keys())]

    def _link_state(self, id: str) -> LinkState:
        link, (failures, failure) = self._links.get(id), self._failures.get(id, (0, ""))
        if link is None:
            return LinkState(id, "requests", up=False, failures=failures, failure=failure)
        return LinkState(
            id,
            "requests",
            up=not link.refused,
            requests=link.requests,
            round_trip=link.round_trip(),
            failures=failures,
            failure=failure,
        )

    @property
    def capacity(self) -> Capacity:
        """For further requests, at all workers."""
        return self._ready().capacity

    def _ready(self) -> Candidates:
        """The workers that are registered, connected, not draining, and have not refused this frontend."""
        while self._touched:
            id = self._touched.pop()
            instance, link = self._instances.get(id), self._links.get(id)
            if instance is None or link is None or instance.draining or link.refused:
                self._candidates.set(id, None)
            else:
                self._candidates.set(id, worker_capacity(instance, link, self._frontends))
        return self._candidates

    def _touch(self, link: Link) -> None:
        self._touched.add(link.instance)

    def _has_our_vllm(self, instance: Instance) -> bool:
        if instance.vllm_version == self._version:
            return True
        if instance.id not in self._instances:
            ours, theirs = self._version, instance.vllm_version or "an unknown version"
            logger.debug("%s is not used: it runs vLLM %s, this frontend %s", instance.id, theirs, ours)
        return False

    # the choice

    def pick(self, generation: "Generation", *, only_others: bool) -> Link | None:
        """A worker for it, with capacity where there is one; None while there is none. The workers that lost it are
        the last resort, or never chosen with `only_others`."""
        cached = self._prefixes.cached(generation.prompt, generation.request.cache_salt)
        ready, avoid = self._ready(), generation.lost_by
        ids = ready.next(self._last, avoid, only_others=only_others)
        ids += [id for id in nlargest(WINDOW, cached, cached.__getitem__) if id in ready and id not in ids]
        outstanding = {id: self._links[id].outstanding(self._frontends) for id in ids}
        state = RouterState(self._last, outstanding, cached, {id for id in ids if ready.full(id)})
        instances = [self._instances[id] for id in ids]
        chosen = choose(self.policy, instances, state, avoid, only_others=only_others)
        if chosen is None:
            return None
        self._last = chosen.id
        logger.debug(
            "%s: %s for a prompt of %d; cached %s, outstanding %s",
            self.policy,
            chosen.id,
            len(generation.prompt),
            cached,
            outstanding,
        )
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
                    self._note_failure(instance.id, f"{instance.id} is gone")
                    logger.warning("%s is gone; trying again in %g s while it is listed", instance.id, pause)
                except* Exception as failed:
                    self._note_failure(instance.id, str(leaves(failed)[0]))
                    logger.exception("the link to %s failed; trying again in %g s", instance.id, pause)
                await asyncio.sleep(pause)
                held = time.monotonic() - started > 2 * LAST_RETRY
                pause = FIRST_RETRY if held else min(2 * pause, LAST_RETRY)
        finally:
            self._linking.discard(instance.id)

    async def _hold_link(self, instance: Instance) -> None:
        """Until the worker is gone; then raises PeerGone, perhaps in a group. The listener is told however it ends."""
        link, client = Link(instance.id, self._touch, instance.block_size), self._connect(instance.address)
        reason = f"the connection to {instance.id} was closed"
        try:
            async with client, asyncio.TaskGroup() as tasks:
                tasks.create_task(link.send(client, self._listener), name=f"to {instance.id}")
                logger.info("connected to %s", instance.id)
                link.round_trip = lambda: client.round_trip
                self._links[instance.id] = link
                IN_FLIGHT.labels(instance.id).set_function(lambda: link.requests)
                link.touch()
                link.post(self._hello)
                self._listener.link_up(link)
                await client.deliver(partial(self._received, link))
        except* PeerGone:
            reason = f"{instance.id} is gone"
            raise
        finally:
            if self._links.get(instance.id) is link:
                del self._links[instance.id]
                with suppress(KeyError):
                    IN_FLIGHT.remove(instance.id)
                link.touch()
                self._prefixes.forget(instance.id)
            self._listener.link_lost(link, reason)

    def _note_failure(self, id: str, why: str) -> None:
        if id in self._instances:
            self._failures[id] = self._failures.get(id, (0, ""))[0] + 1, why

    def _received(self, link: Link, message: ToFrontend) -> None:
        if isinstance(message, Refused):
            link.refused = True
            self._note_failure(link.instance, f"it refuses this frontend: {message.message}")
            link.touch()
            logger.warning("%s refuses this frontend: %s", link.instance, message.message)
        elif isinstance(message, PrefixesChanged):
            if self._policy == "kv":
                self._prefixes.apply(link.instance, message)
        else:
            if isinstance(message, WorkerLoad):
                link.take_load(message.load)
            self._listener.received(link, message)
