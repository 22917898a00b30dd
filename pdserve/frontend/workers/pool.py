"""The worker pool of one model: a link to each decode worker that the registry lists, and the routing of requests.

While no decode worker is usable, prefill workers stand in: they get links, and keep them until a decode worker is back
and has taken over their requests (docs/decisions/0050-prefill-workers-stand-in.md). Stalled workers get requests only
if there is no other worker (docs/decisions/0098-stalled-workers.md).
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from heapq import nlargest
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from pdserve.contract.live_settings import POLICIES
from pdserve.contract.messages import Hello, PrefixesChanged, Refused, ToFrontend, WorkerLoad
from pdserve.contract.prefix_index import PrefixIndex
from pdserve.contract.prefixes import PromptNames, prompt_images
from pdserve.contract.records import Adapter, Instance
from pdserve.contract.reports import LinkState
from pdserve.frontend.admission.capacity import Capacity, worker_capacity
from pdserve.frontend.sequence.generation import Generation, WorkerLink
from pdserve.frontend.sequence.migration import promise_left
from pdserve.frontend.workers import Connect
from pdserve.frontend.workers.candidates import WINDOW, Candidates
from pdserve.frontend.workers.link import Link, LinkListener
from pdserve.frontend.workers.router import Forecast, choose, likely_to_keep
from pdserve.observe.metrics import IN_FLIGHT, ROUTER_DECISIONS
from pdserve.runtime.tasks import TaskOwner, reraise_fatal
from pdserve.util.errors import BadRequest, PeerGone, error_text, leaf_errors

logger = logging.getLogger(__name__)

MIN_RETRY_DELAY = 0.5
MAX_RETRY_DELAY = 5.0
"""Minimum and maximum of seconds between two attempts to connect to a worker that the registry lists."""
HAND_OVER_AFTER = 5.0
"""Seconds after a decode worker is back until it takes over a stand-in's requests that have tokens. Short requests end
before; long ones would delay prompts at the prefill worker."""
HAND_OVER_POLL = 0.5
"""Seconds between two checks whether a stand-in is still needed."""
SILENCE_CHECK_INTERVAL = 0.25
"""Seconds between two checks whether a worker has sent bytes."""
MAX_SILENT_CHECKS = 9
"""Checks in a row that find no bytes, after which a worker counts as stalled: a healthy one answers heartbeats."""


class HandedOver(Exception):
    """Decode workers have taken over a stand-in's requests."""


class WorkerPool:
    """A worker that leaves the registry gets no new requests, but its link stays until the stream reports that the
    worker is gone."""

    def __init__(self, policy: str, vllm_version: str, connect: Connect, listener: LinkListener) -> None:
        """`vllm_version`: of this frontend; a worker with another version refuses it."""
        self._policy = policy
        self._version = vllm_version
        self._connect = connect
        self._listener = listener
        self._frontends = 1
        self._instances: dict[str, Instance] = {}
        """by id, as the registry lists them"""
        self._adapters: Mapping[str, Adapter] = {}
        self._links: dict[str, Link] = {}
        """by instance id: the links that are up"""
        self._linking: set[str] = set()
        """ids of the instances for which a task keeps a link"""
        self._renewing: set[str] = set()
        """ids of the instances that are reconnected without delay, because their last link held for a while"""
        self._failures: dict[str, tuple[int, str]] = {}
        """by id of a listed instance: number of lost links and failed attempts; the last reason"""
        self._decode = Candidates()
        self._stand_ins = Candidates()
        self._stalled = Candidates()
        self._touched: set[str] = set()
        """ids of the workers that changed since the last update of the candidates"""
        self._prefixes = PrefixIndex()
        """prefixes that the workers have cached; empty unless the policy is `kv`"""
        self._tasks = TaskOwner()
        self._watching: asyncio.Task[None] | None = None
        self._last = ""
        """id of the worker that was chosen last"""

    async def close(self) -> None:
        self.update((), self._frontends)
        await self._tasks.stop()

    @property
    def policy(self) -> str:
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

    def update(
        self, instances: Iterable[Instance], frontends: int, adapters: Mapping[str, Adapter] = {}
    ) -> None:
        """Apply the registry's state: the decode workers of this model and the prefill workers that may stand in for
        them, the number of frontends that share them, and the adapters that clients may name."""
        self._adapters = adapters
        self._watching = self._watching or self._tasks.forever(self._watch, "stalled workers")
        if frontends != self._frontends:
            self._frontends = frontends
            self._touched |= self._links.keys()
        now = {instance.id: instance for instance in instances}
        for left in self._instances.keys() - now.keys():
            self._failures.pop(left, None)
            for policy in POLICIES:
                with suppress(KeyError):
                    ROUTER_DECISIONS.remove(policy, left)
        before, self._instances = self._instances, now
        self._touched |= {id for id in before.keys() | now.keys() if before.get(id) != now.get(id)}
        self._make_links()
        self._cut_replaced()
        # requests may wait for a worker whose lease is back, that has other adapters, or is no longer stalled
        able = {id for id in now if id not in before or before[id].adapters != now[id].adapters}
        able |= {id for id in before.keys() & now.keys() if before[id].stalled > now[id].stalled}
        for link in [self._links[id] for id in able if id in self._links]:
            self._listener.link_up(link)
        self._leave_stalled()

    @property
    def usable(self) -> int:
        """Number of workers that accept requests now."""
        return len(self._ready())

    @property
    def usable_decode_workers(self) -> int:
        """Number of decode workers that accept requests now, without stalled ones."""
        return len(self._decode) if self._ready() is self._decode else 0

    def links(self) -> list[LinkState]:
        """The links to all listed workers, to workers that left the registry but are still connected, and to stand-ins
        while they are needed."""
        listed = {id for id, instance in self._instances.items() if not instance.is_stand_in}
        return [self._link_state(id) for id in sorted(listed | self._linking | self._links.keys())]

    def _link_state(self, id: str) -> LinkState:
        link, (failures, failure) = self._links.get(id), self._failures.get(id, (0, ""))
        state = LinkState(id, "requests", up=False, failures=failures, failure=failure)
        if link is None:
            return state
        return replace(state, up=not link.refused, requests=link.requests, round_trip=link.round_trip())

    def accepts_requests(self, link: WorkerLink | None) -> bool:
        """Whether the link's worker accepts further requests; false without a link."""
        return link is not None and link.instance in self._ready()

    @property
    def capacity(self) -> Capacity:
        """Capacity for further requests, of all usable workers together."""
        return self._ready().capacity

    def _ready(self) -> Candidates:
        """Return the usable decode workers; if there are none, the usable stand-ins; if there are none either, the
        stalled workers."""
        while self._touched:
            id = self._touched.pop()
            instance, link = self._instances.get(id), self._links.get(id)
            kind: Candidates | None = None
            if not (instance is None or link is None or instance.draining or link.refused):
                stalled = instance.stalled or link.silent_checks >= MAX_SILENT_CHECKS
                kind = self._stalled if stalled else self._stand_ins if instance.is_stand_in else self._decode
                kind.set(id, worker_capacity(instance, link, self._frontends))
            for other in self._kinds:
                if other is not kind:
                    other.set(id, None)
        return next((kind for kind in self._kinds if len(kind)), self._stalled)

    @property
    def _kinds(self) -> tuple[Candidates, ...]:
        """In order of preference."""
        return self._decode, self._stand_ins, self._stalled

    def _needs_stand_ins(self) -> bool:
        """Whether no decode worker is usable, and none is just being connected. (After this process froze, all links
        are lost although the workers are well.)"""
        return self._ready() is not self._decode and not any(
            instance.id not in self._links.keys() | self._failures.keys() or instance.id in self._renewing
            for instance in self._instances.values()
            if not (instance.is_stand_in or instance.draining)
        )

    def _lacking(self, generation: Generation) -> set[str]:
        """Ids of the listed workers without the generation's adapter."""
        adapter = generation.adapter
        return {id for id, worker in self._instances.items() if adapter and not worker.has_adapter(adapter)}

    def _check_adapter(self, lora: Any) -> None:
        """Raise BadRequest if this adapter, which no worker has, was unloaded or has other weights now."""
        if lora is not None:
            known = self._adapters.get(lora.lora_name)
            if known is None or known.id != lora.lora_int_id:
                message = f"The lora adapter '{lora.lora_name}' was unloaded, and no worker has it any more."
                raise BadRequest(message, "model")

    def has_capacity(self, generation: Generation, *, full: bool = False) -> bool:
        """Whether a usable worker has the generation's adapter and, unless `full`, capacity for one more request."""
        ready = self._ready()
        found = ready.next_in_turn(self._last, never=self._lacking(generation))
        return bool(found) and (full or not ready.is_full(found[0]))

    def _touch(self, link: Link) -> None:
        self._touched.add(link.instance)

    # routing

    def pick(self, generation: Generation, *, only_others: bool) -> Link | None:
        """Choose a worker, preferably one with capacity; None if there is no worker. Workers that lost this generation
        are the last resort; with `only_others`, they are never chosen. Raises BadRequest if its adapter was
        unloaded."""
        lacking, lost = self._lacking(generation), generation.lost_by
        images = prompt_images(generation.request.mm_features)
        names = PromptNames(generation.prompt, generation.request.cache_salt, generation.adapter, images)
        cached = self._prefixes.cached(names)
        never = lacking | lost if only_others else lacking
        preferred = nlargest(WINDOW, cached, cached.__getitem__)
        ids = self._ready().next_in_turn(self._last, never=never, avoid=lost, preferred=preferred)
        if not ids:
            if len(lacking) == len(self._instances):
                self._check_adapter(generation.request.lora_request)
            return None
        outstanding = {id: self._links[id].outstanding(self._frontends) for id in ids}
        candidates = [self._instances[id] for id in ids]
        if (promise := promise_left(generation)) is not UNSET:
            candidates = likely_to_keep(promise, candidates, self._forecasts(generation, ids, cached))
        chosen = choose(self.policy, candidates, outstanding, cached)
        self._last = chosen.id
        if self.policy == "kv":
            self._prefixes.expect(chosen.id, names, chosen.block_size or 1, chosen.kv_blocks)
        text = "%s: chose %s; tokens cached %s, outstanding %s"
        logger.debug(text, self.policy, chosen.id, cached, outstanding)
        ROUTER_DECISIONS.labels(self.policy, chosen.id).inc()
        return self._links[chosen.id]

    def _forecasts(
        self, generation: Generation, ids: Iterable[str], cached: Mapping[str, int]
    ) -> dict[str, Forecast]:
        """Forecasts by instance id, for the workers that have reported their speed. Assumes that each other frontend
        has sent as many prompt tokens as this one."""
        prompt = len(generation.prompt) + len(generation.tokens)
        known = {id: link for id in ids if (link := self._links[id]).load.token_seconds}
        return {
            id: Forecast.of(link.load, link.new_prompt_tokens * self._frontends, prompt - cached.get(id, 0))
            for id, link in known.items()
        }

    # stalled workers

    async def _watch(self) -> None:
        """Watch for stalled workers. Counts checks instead of measuring time, because this process may freeze."""
        while True:
            await asyncio.sleep(SILENCE_CHECK_INTERVAL)
            for link in list(self._links.values()):
                was = link.silent_checks >= MAX_SILENT_CHECKS
                link.check_silence()
                if was != (link.silent_checks >= MAX_SILENT_CHECKS):
                    link.notify_changed()
                    text = "sends bytes again" if was else "is stalled: it has sent nothing"
                    logger.warning("%s %s", link.instance, text)
                    self._make_links()
                    self._listener.link_up(link)  # requests may wait for it
            self._leave_stalled()

    def _leave_stalled(self) -> None:
        """Move requests away from stalled workers. A request with a token of its present attempt stays."""
        if self._ready() is not self._stalled and len(self._stalled):
            for link in [link for id, link in self._links.items() if id in self._stalled]:
                self._listener.hand_over(link, begun=False, stalled=True)

    # the links

    def _make_links(self) -> None:
        """Start a task for each wanted link that has no task."""
        needed = self._needs_stand_ins()
        for instance in self._instances.values():
            if instance.id not in self._linking and (needed or not instance.is_stand_in):
                self._linking.add(instance.id)
                self._tasks.start(self._keep_link(instance), f"link: to {instance.id}")

    def _cut_replaced(self) -> None:
        """End a killed worker's link that reconnected to the successor at the same address, as in a restarted pod."""
        taken = {instance.address for instance in self._instances.values()}
        for id, link in self._links.items():
            if id not in self._instances and link.address in taken:
                link.cut()

    def _wanted(self, instance: Instance) -> bool:
        return instance.id in self._instances and (not instance.is_stand_in or self._needs_stand_ins())

    async def _keep_link(self, instance: Instance) -> None:
        """Keep a link to the worker, and reconnect, while it is wanted."""
        pause = MIN_RETRY_DELAY
        try:
            while self._wanted(instance):
                started = time.monotonic()
                try:
                    await self._hold_link(instance)
                except Exception as failed:
                    reraise_fatal(failed)
                    causes = [cause for cause in leaf_errors(failed) if not isinstance(cause, PeerGone)]
                    why = error_text(causes[0]) if causes else f"{instance.id} is gone"
                    self._note_failure(instance.id, why)
                    say = logger.exception if causes else logger.warning
                    say("the link to %s ended; connecting again while it is listed", instance.id)
                if instance.id not in self._renewing:
                    await asyncio.sleep(pause)
                held = time.monotonic() - started > 2 * MAX_RETRY_DELAY
                pause = MIN_RETRY_DELAY if held else min(2 * pause, MAX_RETRY_DELAY)
        finally:
            self._linking.discard(instance.id)
            self._renewing.discard(instance.id)

    async def _hold_link(self, instance: Instance) -> None:
        """Hold one link. Returns when decode workers have taken over a stand-in's requests. Raises PeerGone, perhaps in
        an exception group, when the worker is gone. However the link ends, the listener's `link_lost` is called."""
        link = Link(instance.id, self._touch, instance.block_size, instance.address)
        reason = f"the connection to {instance.id} was closed"
        try:
            async with self._connect(instance.address) as client, asyncio.TaskGroup() as tasks:
                tasks.create_task(link.send(client, self._listener), name=f"to {instance.id}")
                if instance.is_stand_in:
                    tasks.create_task(self._hand_over(link), name=f"hand over: {instance.id}")
                logger.info("connected to %s", instance.id)
                link.round_trip, link.last_received = lambda: client.round_trip, lambda: client.heard
                self._links[instance.id] = link
                self._renewing.discard(instance.id)
                IN_FLIGHT.labels(instance.id).set_function(lambda: link.requests)
                link.notify_changed()
                link.post(self._hello)
                self._listener.link_up(link)
                await client.deliver(partial(self._received, link))
        except* HandedOver:
            logger.info("%s no longer stands in: decode workers are back", instance.id)
        except* PeerGone:
            reason = f"{instance.id} is gone"
            raise
        finally:
            if self._links.get(instance.id) is link:
                del self._links[instance.id]
                with suppress(KeyError):
                    IN_FLIGHT.remove(instance.id)
                link.notify_changed()
                self._prefixes.forget(instance.id)
                if time.monotonic() - link.created_at > MIN_RETRY_DELAY:
                    self._renewing.add(instance.id)
            else:
                self._renewing.discard(instance.id)
            self._listener.link_lost(link, reason)

    async def _hand_over(self, link: Link) -> None:
        """Once decode workers are back, let them take over a stand-in's requests. Raises HandedOver when that is
        done."""
        back = 0.0
        while back < HAND_OVER_AFTER or link.generations:
            await asyncio.sleep(HAND_OVER_POLL)
            back = back + HAND_OVER_POLL if self._ready() is self._decode else 0.0
            if back:
                self._listener.hand_over(link, begun=back >= HAND_OVER_AFTER)
        raise HandedOver

    def _note_failure(self, id: str, why: str) -> None:
        if id in self._instances:
            self._failures[id] = self._failures.get(id, (0, ""))[0] + 1, why
            self._make_links()

    def _received(self, link: Link, message: ToFrontend) -> None:
        if isinstance(message, Refused):
            link.refused = True
            link.notify_changed()
            self._note_failure(link.instance, f"it refuses this frontend: {message.message}")
            logger.warning("%s refuses this frontend: %s", link.instance, message.message)
        elif isinstance(message, PrefixesChanged):
            if self._policy == "kv":
                self._prefixes.apply(link.instance, message)
        else:
            if isinstance(message, WorkerLoad):
                link.update_load(message.load)
                link.pause_generations(message.make_way)
            self._listener.received(link, message)
