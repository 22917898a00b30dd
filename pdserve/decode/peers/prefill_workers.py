"""Prefill workers as a decode worker sees them: which are available, and which requests they will not answer."""

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from zlib import crc32

from pdserve.contract.records import MIN_KV_WIRE, Instance, Role
from pdserve.decode.policy import decision
from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.engine.base import Engine
from pdserve.process.presence import MAX_PAIRS
from pdserve.queue.base import PrefillQueue
from pdserve.registry.view import RegistryView
from pdserve.util.errors import QueueUnavailable
from pdserve.util.ticks import tick

logger = logging.getLogger(__name__)

LAST_ANSWERS = 0.2
"""Seconds to wait for the last answers of a lost prefill worker: they may be under way."""
AVOID_FOR = 30.0
"""Seconds for which a prefill worker is avoided after its side channel did not answer."""
POLL_INTERVAL = 0.5
"""Seconds between two checks with NATS whether a prefill worker is still subscribed."""
MAX_UNHEARD = 2
"""Failed checks in a row after which a worker counts as lost. After one it may be reconnecting."""
MAX_UNTAKEN = 2
"""After this many prompts in a row that no prefill worker pulled, prompts are prefilled locally for `RETRY_AFTER`."""
RETRY_AFTER = 30.0
"""Seconds of local prefill. Then remote prefill is tried again, because workers without prompts send no messages."""
GONE, ALONE, UNKNOWN = "prefill-worker-gone", "no-prefill-worker", "unknown-engine"
UNREACHABLE, LOST, STALLED = "unreachable", "queue-lost", "stalled"
"""Why no answer will come, as labels of the failure metric."""


class UntakenPrompts:
    """Detects that registered prefill workers neither pull prompts nor send messages. Pure: callers pass the time."""

    def __init__(self) -> None:
        self.last_message = 0.0
        self.count = 0
        self._last = 0.0
        """When the last untaken prompt was given up."""

    def heard(self, at: float) -> None:
        if at > self.last_message:
            self.last_message = at
            self.count = 0

    def untaken(self, asked: float, now: float) -> None:
        """Record that a prompt, asked for at `asked`, is given up because no worker pulled it."""
        if asked > self.last_message and now - asked >= decision.MIN_TIMEOUT:
            self.count += 1
            self._last = now

    def is_silent(self, now: float) -> bool:
        """Whether to prefill locally, until a worker sends a message or `RETRY_AFTER` is over."""
        return self.count >= MAX_UNTAKEN and now - self._last < RETRY_AFTER


@dataclass(eq=False)
class PrefillWorkers:
    """Prefill workers of this worker's model and fingerprint that confirm KV reads. The worker itself, if it is of role
    `both`, is not among them."""

    instance: str
    model: str
    engine: Engine
    queue: PrefillQueue
    view: RegistryView
    requests: DecodeRequests
    _avoided: dict[str, float] = field(default_factory=dict)
    """By prefill worker: monotonic time until which it is avoided."""
    _unheard: Counter[str] = field(default_factory=Counter)
    """By prefill worker: failed checks in a row; at least `MAX_UNHEARD` if it is subscribed but does not reply."""
    _untaken: UntakenPrompts = field(default_factory=UntakenPrompts)
    _registered: list[Instance] = field(default_factory=list)
    _newcomers: list[Instance] = field(default_factory=list)
    """Workers that are not ready yet."""
    _version: int = -1
    """The view's version when both lists were read from it. They are kept, because each request asks for them."""

    # which are available

    def available(self) -> list[Instance]:
        """Workers that pull prompts and whose KV can be read."""
        if self._is_silent():
            return []
        ready = [worker for worker in self.registered() if not worker.draining and self._reachable(worker)]
        return [worker for worker in ready if not self.is_avoided(worker.id)] if self._avoided else ready

    def to_warm_up(self) -> set[str]:
        """Ids of at most `MAX_PAIRS` workers, ready or not yet, to warm up with. They are chosen by rendezvous hashing,
        so that the choice hardly changes as workers come and go."""
        peers = [peer.id for peer in self.peers() if not peer.draining]
        return set(nsmallest(MAX_PAIRS, peers, key=lambda peer: crc32(f"{self.instance} {peer}".encode())))

    def is_known(self, worker: str) -> bool:
        """Whether the worker is one of `peers`. Answers of other workers are not trusted."""
        return any(peer.id == worker for peer in self.peers())

    def registered(self) -> list[Instance]:
        """Announced workers, draining ones included."""
        self._refresh()
        return self._registered

    def peers(self) -> list[Instance]:
        """Announced workers, draining ones included, and those that are not ready yet."""
        self._refresh()
        return self._registered + self._newcomers

    def _refresh(self) -> None:
        if self._version != self.view.version:
            before = _working(self._registered)
            self._version = self.view.version
            self._registered = self._compatible(self.view.instances(Role.PREFILL, self.model))
            if _working(self._registered) - before:
                self.heard()
            self._newcomers = self._compatible(self.view.newcomers(Role.PREFILL, self.model))

    def _compatible(self, workers: list[Instance]) -> list[Instance]:
        same = self.engine.facts.fingerprint
        others = [worker for worker in workers if worker.id != self.instance and worker.wire >= MIN_KV_WIRE]
        return [worker for worker in others if worker.fingerprint == same]

    # workers whose KV cannot be read

    def avoid(self, workers: list[str]) -> None:
        """Avoid workers whose KV cannot be read. Prompts that such a worker has are prefilled locally at once."""
        for worker in workers:
            if not self.is_avoided(worker):
                logger.error("KV of %s cannot be read: avoiding it for %g s", worker, AVOID_FOR)
            self._avoided[worker] = time.monotonic() + AVOID_FOR
            for request in self.requests:
                if request.prefiller == worker:
                    request.resolve(UNREACHABLE)

    def is_avoided(self, worker: str) -> bool:
        if (until := self._avoided.get(worker)) is None:
            return False
        if time.monotonic() >= until:
            del self._avoided[worker]
        return worker in self._avoided

    # registered workers that neither pull nor answer

    def heard(self) -> None:
        """Record that a prefill worker sent something."""
        self._untaken.heard(time.monotonic())

    def heard_since(self, when: float) -> bool:
        """Whether a prefill worker has answered, or pulled from the queue, since `when`."""
        self._untaken.heard(max((at for _, at in self.queue.loads.values()), default=0.0))
        return self._untaken.last_message > when

    def left_untaken(self, request: DecodeRequest) -> None:
        before = self._is_silent()
        self._untaken.untaken(request.asked, time.monotonic())
        if self._is_silent() and not before:
            logger.warning("no prefill worker pulls prompts: prefilling locally until one sends a message")
            self._give_up(list(self.requests))

    def _is_silent(self) -> bool:
        if self._untaken.count:  # a pull is reported to all decode workers
            self._untaken.heard(max((at for _, at in self.queue.loads.values()), default=0.0))
        return self._untaken.is_silent(time.monotonic())

    def _reachable(self, worker: Instance) -> bool:
        return worker.is_working and self._unheard[worker.id] < MAX_UNHEARD

    async def watch(self) -> None:
        """For ever, check with NATS whether the prefill workers that requests wait for are still connected. This is
        faster than the registry, where a lease must end first."""
        while True:
            await (tick if self._unheard else self.requests.pause)(POLL_INTERVAL)
            workers = [worker.id for worker in self.registered()]
            for gone in self._unheard.keys() - set(workers):
                del self._unheard[gone]
            before = time.monotonic() - POLL_INTERVAL
            waited_for = {
                request.prefiller or request.preferred
                for request in self.requests
                if request.awaits_answer and request.asked < before
            }
            first = [worker for worker in workers if worker in waited_for | self._unheard.keys()]
            ask = dict.fromkeys([*first, *(workers if "" in waited_for else ())])
            with suppress(QueueUnavailable):
                await asyncio.gather(*(self._check(worker) for worker in islice(ask, MAX_PAIRS)))
            self.give_up_gone()

    async def _check(self, worker: str) -> None:
        before = self._unheard[worker]
        try:
            self._unheard[worker] = 0 if await self.queue.listens(worker) else before + 1
        except TimeoutError:  # subscribed, but it does not reply
            self._unheard[worker] = max(before, MAX_UNHEARD)
        if before < MAX_UNHEARD <= self._unheard[worker]:
            logger.warning("%s does not answer on NATS: sending it no prompts until it does", worker)
        if not self._unheard[worker]:
            del self._unheard[worker]

    # requests that no prefill worker will answer

    def give_up_lost(self) -> None:
        """Prefill locally the prompts that were queued and not pulled yet when NATS lost its queue."""
        for request in self.requests:
            queued = request.published and request.awaits_answer
            queued = queued and not (request.prefiller or request.preferred)
            if queued and request.losses != self.queue.losses:
                request.resolve(LOST)

    def give_up_gone(self) -> None:
        """Prefill locally the prompts that a lost or stalled worker has, and those that no worker is left to pull.
        First wait `LAST_ANSWERS`, because a worker's last message may say that its engine died of a request. A prompt
        that was sent to an unavailable worker because of its prefix may go to any worker at once."""
        usable = {worker.id for worker in self.available()}
        for request in self.requests:
            if request.preferred and request.preferred not in usable:
                request.preferred_begun(False)
        if lost := [request for request, _ in self._gone(self.requests)]:
            asyncio.get_running_loop().call_later(LAST_ANSWERS, self._give_up, lost)

    def _give_up(self, requests: list[DecodeRequest]) -> None:
        for request, reason in self._gone(requests):
            request.resolve(reason)

    def _gone(self, requests: Iterable[DecodeRequest]) -> Iterator[tuple[DecodeRequest, str]]:
        """Requests that no prefill worker will answer, with the reason. A draining worker finishes what it has and
        pulls no more."""
        peers = {peer.id for peer in self.peers() if self._reachable(peer)}
        registered = [worker for worker in self.registered() if worker.id in peers]
        answering = {worker.id for worker in registered}
        stalled = {worker.id for worker in self.registered() if worker.stalled}
        pulling = any(not worker.draining for worker in registered) and not self._is_silent()
        for request in requests:
            if not request.awaits_answer:
                continue
            if request.prefiller in stalled:
                yield request, STALLED
            elif not request.warm_up_with and not pulling and request.prefiller not in answering:
                yield request, ALONE
            elif request.prefiller and request.prefiller not in peers:
                yield request, GONE


def longest_prompt(workers: Iterable[Instance]) -> int:
    """Tokens of the longest prompt that all of these workers take, because any of them may pull it."""
    sizes = (min(filter(None, (each.max_model_len, each.kv_tokens)), default=0) for each in workers)
    return min(filter(None, sizes), default=sys.maxsize) - 1


def _working(workers: list[Instance]) -> set[str]:
    return {worker.id for worker in workers if worker.is_working}
