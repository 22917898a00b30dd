"""The prefill workers as a decode worker sees them: which may be asked, and which requests they will not answer."""

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
from pdserve.decode.peers.untaken import UntakenPrompts
from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.engine.base import Engine
from pdserve.process.presence import MAX_PAIRS
from pdserve.queue.base import PrefillQueue
from pdserve.registry.view import RegistryView
from pdserve.util.errors import QueueUnavailable

logger = logging.getLogger(__name__)

LAST_WORDS = 0.2
"""seconds that a prefill worker's answers may take after the registry says it is gone: they use another connection"""
AVOID_FOR = 30.0
"""seconds without new requests for a prefill worker whose KV could not be read; then it is tried again"""
LOOK = 0.5
"""seconds between two questions to NATS whether a prefill worker still listens"""
UNHEARD = 2
"""such questions in a row after which a worker that does not listen counts as gone: it may be connecting anew"""
GONE, ALONE, UNKNOWN = "prefill-worker-gone", "no-prefill-worker", "unknown-engine"
UNREACHABLE, LOST, STALLED = "unreachable", "queue-lost", "stalled"
"""why no answer will come, as labels of the failure metric"""


@dataclass(eq=False)
class PrefillWorkers:
    """Only workers of the same model and fingerprint that confirm reads of their KV, without this worker itself (it may
    be of role `both`)."""

    instance: str
    model: str
    engine: Engine
    queue: PrefillQueue
    view: RegistryView
    requests: DecodeRequests
    _avoided: dict[str, float] = field(default_factory=dict)
    """by prefill worker: monotonic time until which it is avoided"""
    _unheard: Counter[str] = field(default_factory=Counter)
    """by prefill worker: how often in a row NATS said that it does not listen; at least `UNHEARD` where it hangs"""
    _untaken: UntakenPrompts = field(default_factory=UntakenPrompts)
    _registered: list[Instance] = field(default_factory=list)
    _newcomers: list[Instance] = field(default_factory=list)
    """both as of the view's `_version`: every request asks, and there may be hundreds of workers"""
    _version: int = -1

    # which may be asked

    def available(self) -> list[Instance]:
        """Workers that pull requests and whose KV can be read."""
        if self._silent():
            return []
        ready = [worker for worker in self.registered() if not worker.draining and self._reachable(worker)]
        return [worker for worker in ready if not self.avoided(worker.id)] if self._avoided else ready

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that each of them takes: any of them may pull it."""
        sizes = (
            min(filter(None, (worker.max_model_len, worker.kv_tokens)), default=0)
            for worker in self.available()
        )
        return min(filter(None, sizes), default=sys.maxsize) - 1

    def to_warm_up(self) -> set[str]:
        """Ids of the workers to warm up with, ready or not yet, but not draining. Of many, each decode worker takes the
        first by an order of its own, which hardly changes as workers come and go."""
        peers = [peer.id for peer in self.peers() if not peer.draining]
        return set(nsmallest(MAX_PAIRS, peers, key=lambda peer: crc32(f"{self.instance} {peer}".encode())))

    def known(self, worker: str) -> bool:
        """Whether it is registered, draining or not ready yet. Answers of any other worker are not trusted."""
        return any(peer.id == worker for peer in self.peers())

    def registered(self) -> list[Instance]:
        """Announced workers, draining ones included."""
        self._look()
        return self._registered

    def peers(self) -> list[Instance]:
        """The registered workers, and those that are not ready yet."""
        self._look()
        return self._registered + self._newcomers

    def _look(self) -> None:
        if self._version != self.view.version:
            self._version, before = self.view.version, self._registered
            self._registered = self._alike(self.view.instances(Role.PREFILL, self.model))
            if _working(self._registered) - _working(before):
                self.heard()
            self._newcomers = self._alike(self.view.newcomers(Role.PREFILL, self.model))

    def _alike(self, workers: list[Instance]) -> list[Instance]:
        same = self.engine.facts.fingerprint
        others = [worker for worker in workers if worker.id != self.instance and worker.wire >= MIN_KV_WIRE]
        return [worker for worker in others if worker.fingerprint == same]

    # those whose KV cannot be read

    def avoid(self, workers: list[str]) -> None:
        """The KV of these workers cannot be read here. Requests that such a worker has, or pulls in spite of it (the
        queue is shared), are prefilled locally at once."""
        for worker in workers:
            if not self.avoided(worker):
                logger.error("KV of %s cannot be read: avoiding it for %g s", worker, AVOID_FOR)
            self._avoided[worker] = time.monotonic() + AVOID_FOR
            for request in self.requests:
                if request.prefiller == worker:
                    request.resolve(UNREACHABLE)

    def avoided(self, worker: str) -> bool:
        if (until := self._avoided.get(worker)) is None:
            return False
        if time.monotonic() >= until:
            del self._avoided[worker]
        return worker in self._avoided

    # those that neither take prompts nor answer, though they are registered

    def heard(self) -> None:
        """Something came from a prefill worker."""
        self._untaken.heard(time.monotonic())

    def heard_since(self, when: float) -> bool:
        """Whether a prefill worker has answered, or pulled from the queue."""
        self._untaken.heard(max((at for _, at in self.queue.loads.values()), default=0.0))
        return self._untaken.news > when

    def left_untaken(self, request: DecodeRequest) -> None:
        """No worker took this request in its time."""
        before = self._silent()
        self._untaken.untaken(request.asked, time.monotonic())
        if self._silent() and not before:
            logger.warning("no prefill worker takes prompts: they are prefilled here until one is heard of")
            self._give_up(list(self.requests))

    def _silent(self) -> bool:
        if self._untaken.count:  # a pull is reported to all decode workers
            self._untaken.heard(max((at for _, at in self.queue.loads.values()), default=0.0))
        return self._untaken.silent(time.monotonic())

    def _reachable(self, worker: Instance) -> bool:
        return worker.is_working and self._unheard[worker.id] < UNHEARD

    async def watch(self) -> None:
        """Ask NATS, while requests wait for prefill workers, whether these are still connected to it; for ever. The
        registry says so only when a lease ends."""
        while True:
            await asyncio.sleep(LOOK)
            workers = [worker.id for worker in self.registered()]
            for gone in self._unheard.keys() - set(workers):
                del self._unheard[gone]
            long_ago = time.monotonic() - LOOK
            waited_for = {
                request.prefiller for request in self.requests if request.awaits and request.asked < long_ago
            }
            first = [worker for worker in workers if worker in waited_for | self._unheard.keys()]
            ask = dict.fromkeys([*first, *(workers if "" in waited_for else ())])
            with suppress(QueueUnavailable):
                await asyncio.gather(*(self._ask(worker) for worker in islice(ask, MAX_PAIRS)))
            self.give_up_gone()

    async def _ask(self, worker: str) -> None:
        before = self._unheard[worker]
        try:
            self._unheard[worker] = 0 if await self.queue.listens(worker) else before + 1
        except TimeoutError:  # its process hangs
            self._unheard[worker] = max(before, UNHEARD)
        if before < UNHEARD <= self._unheard[worker]:
            logger.warning("%s does not answer on NATS: nothing is asked of it until it does", worker)
        if not self._unheard[worker]:
            del self._unheard[worker]

    # requests that no prefill worker will answer

    def give_up_lost(self) -> None:
        """Prefill here what was queued, and not pulled yet, when the server lost its queue."""
        for request in self.requests:
            if (
                request.published
                and request.awaits
                and not request.prefiller
                and request.losses != self.queue.losses
            ):
                request.resolve(LOST)

    def give_up_gone(self) -> None:
        """Prefill here what a worker that is gone had pulled, and everything if no worker is left. Wait `LAST_WORDS`
        before: the worker's last message may say that its engine died of a request."""
        if lost := [request for request, _ in self._gone(self.requests)]:
            asyncio.get_running_loop().call_later(LAST_WORDS, self._give_up, lost)

    def _give_up(self, requests: list[DecodeRequest]) -> None:
        for request, reason in self._gone(requests):
            request.resolve(reason)

    def _gone(self, requests: Iterable[DecodeRequest]) -> Iterator[tuple[DecodeRequest, str]]:
        """Requests that no prefill worker will answer, with the reason. A draining worker finishes what it has and
        pulls no more."""
        peers = {peer.id for peer in self.peers() if self._reachable(peer)}
        registered = [worker for worker in self.registered() if worker.id in peers]
        there = {worker.id for worker in registered}
        stalled = {worker.id for worker in self.registered() if worker.stalled}
        pulled = any(not worker.draining for worker in registered) and not self._silent()
        for request in requests:
            if not request.awaits:
                continue
            if request.prefiller in stalled:
                yield request, STALLED
            elif not request.warms and not pulled and request.prefiller not in there:
                yield request, ALONE
            elif request.prefiller and request.prefiller not in peers:
                yield request, GONE


def _working(workers: list[Instance]) -> set[str]:
    return {worker.id for worker in workers if worker.is_working}
