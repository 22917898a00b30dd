"""The prefill workers of a decode worker: which of them may be asked, and which requests can expect nothing of them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from zlib import crc32

from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.engine.base import Engine
from pdserve.process.presence import MAX_PAIRS
from pdserve.queue.base import PrefillQueue
from pdserve.records import Instance, Role
from pdserve.registry.view import RegistryView

log = logging.getLogger(__name__)

LAST_WORDS = 0.2
"""seconds that a prefill worker's answers may still take when the registry has told that it is gone: they come by
another connection"""
AVOID_FOR = 30.0
"""seconds for which nothing is asked of a prefill worker whose KV could not be read; then it is tried again"""
GONE, ALONE, UNKNOWN = "prefill-worker-gone", "no-prefill-worker", "unknown-engine"
UNREACHABLE, LOST = "unreachable", "queue-lost"
"""why a request's wait came to nothing, as the metric has it"""


@dataclass(eq=False)
class PrefillWorkers:
    """Only workers of the same model and fingerprint: all others share nothing but the registry."""

    instance: str
    """of this worker itself: it is none of them, though it may be of role `both`"""
    model: str
    engine: Engine
    queue: PrefillQueue
    view: RegistryView
    requests: DecodeRequests
    _avoided: dict[str, float] = field(default_factory=dict)
    """prefill worker -> monotonic time until which it is avoided"""
    _found: dict[str, list[Instance]] = field(default_factory=dict)
    """what the registry had at `_version`: asked for with each request, and there may be hundreds"""
    _version: int = 0

    # which may be asked

    def available(self) -> list[Instance]:
        """Those that take requests from this decode worker's queue, and whose KV can be read."""
        ready = [worker for worker in self.registered() if not worker.draining]
        return [worker for worker in ready if not self.avoided(worker.id)] if self._avoided else ready

    def to_warm_up(self) -> set[str]:
        """The ids of those that will serve: also those that are not ready yet, and no draining ones. Of many the first
        in an order of this worker's own, which hardly changes as they come and go."""
        peers = [peer.id for peer in self.peers() if not peer.draining]
        return set(nsmallest(MAX_PAIRS, peers, key=lambda peer: crc32(f"{self.instance} {peer}".encode())))

    def known(self, worker: str) -> bool:
        """Whether it is registered, be it draining or not ready yet: no other worker is believed, or asked for KV."""
        return any(peer.id == worker for peer in self.peers())

    def registered(self) -> list[Instance]:
        """Also draining workers."""
        return self._same("registered", lambda: self.view.instances(Role.PREFILL, self.model))

    def peers(self) -> list[Instance]:
        """Also those that are not ready yet."""
        newcomers = self._same("newcomers", lambda: self.view.newcomers(Role.PREFILL, self.model))
        return self.registered() + newcomers

    def _same(self, kind: str, look: Callable[[], list[Instance]]) -> list[Instance]:
        if self._version != self.view.version:
            self._version = self.view.version
            self._found.clear()
        if kind not in self._found:
            self._found[kind] = [worker for worker in look() if self._other(worker)]
        return self._found[kind]

    def _other(self, worker: Instance) -> bool:
        return worker.id != self.instance and worker.fingerprint == self.engine.facts.fingerprint

    # those whose KV cannot be read

    def avoid(self, workers: list[str]) -> None:
        """Their KV cannot be read here. Requests that such a worker has, or pulls in spite of it (the queue is shared),
        are prefilled locally at once."""
        for worker in workers:
            if not self.avoided(worker):
                log.error("KV of %s cannot be read: avoiding it for %g s", worker, AVOID_FOR)
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

    # requests that no prefill worker will answer

    def give_up_lost(self) -> None:
        """What was queued when the server lost its queue, and no prefill worker had pulled, is done here."""
        for request in self.requests:
            if request.awaits and not request.prefiller and request.losses != self.queue.losses:
                request.resolve(LOST)

    def give_up_gone(self) -> None:
        """What a prefill worker had in its hands that is registered no longer is done here, and everything where none
        is left: after `LAST_WORDS`, since the worker may have said that its engine died of a request."""
        if lost := [request for request, _ in self._gone(self.requests)]:
            asyncio.get_running_loop().call_later(LAST_WORDS, self._give_up, lost)

    def _give_up(self, requests: list[DecodeRequest]) -> None:
        for request, reason in self._gone(requests):
            request.resolve(reason)

    def _gone(self, requests: Iterable[DecodeRequest]) -> Iterator[tuple[DecodeRequest, str]]:
        """Those that no prefill worker will answer, with the reason. A worker that drains finishes what it has, and
        pulls no more."""
        registered, peers = self.registered(), {peer.id for peer in self.peers()}
        there = {worker.id for worker in registered}
        pulled = any(not worker.draining for worker in registered)
        for request in requests:
            if not request.awaits:
                continue
            if not request.warms and not pulled and request.prefiller not in there:
                yield request, ALONE
            elif request.prefiller and request.prefiller not in peers:
                yield request, GONE
