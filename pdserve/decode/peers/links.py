"""Counts and reports KV transfers from prefill workers: successes and failures, by request and by link."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.contract.reports import LinkState
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.engine.base import Transfers
from pdserve.observe.metrics import (
    HANDSHAKE_FAILURES,
    KV_TRANSFER_BYTES,
    KV_TRANSFER_SECONDS,
    REMOTE_PREFILL_FAILURES,
)
from pdserve.process.learned import WEIGHT


@dataclass
class _Link:
    pulls: int = 0
    pull_seconds: float | None = None
    last_pull: float = 0.0
    """Monotonic seconds."""
    failures: int = 0
    failure: str = ""
    bytes: float = 0.0
    seconds: float = 0.0
    """`bytes` and `seconds`: decaying sums over reads, so that the speed follows recent and large reads."""


@dataclass(eq=False)
class KvLinks:
    workers: PrefillWorkers
    requests: DecodeRequests
    _links: dict[str, _Link] = field(default_factory=dict)
    """By prefill worker."""

    def read(self, transfers: Transfers) -> None:
        """Record the engine's KV reads."""
        KV_TRANSFER_BYTES.labels(self.workers.model).inc(transfers.bytes)
        for read in transfers.reads:
            link = self._of(read.source)
            link.bytes += read.bytes - WEIGHT * link.bytes
            link.seconds += read.seconds - WEIGHT * link.seconds

    def first_step(self, request: DecodeRequest, begun: float | None) -> None:
        """Record the engine's first step for a frontend's request."""
        now, instance = time.monotonic(), self.workers.instance
        if request.placed.prefill == "local":
            request.hops.prefilled(request.since, begun, now, instance, request.placed.reason)
            return
        seconds = request.hops.read(request.since, begun, now, request.prefiller, instance)
        KV_TRANSFER_SECONDS.labels(self.workers.model).observe(seconds)
        link = self._of(request.prefiller)
        link.pulls += 1
        link.last_pull = now
        link.pull_seconds = seconds + (1 - WEIGHT) * ((link.pull_seconds or seconds) - seconds)

    def unread(self, request: DecodeRequest, why: str) -> None:
        """Record that the request's KV could not be read; the engine computes the prompt instead."""
        request.kv_unread = True
        request.hops.add("transfer", request.since, time.monotonic(), request.prefiller)
        self.failed(request, f"transfer: {why}")
        if not request.warm_up_with:
            request.recompute("transfer")
            request.since = time.monotonic()

    def failed(self, request: DecodeRequest, why: str) -> None:
        """Record a failed remote prefill. `why` is a label of the failure metric; details may follow after a colon."""
        now = time.monotonic()
        request.hops.add("fallback", now, now, request.prefiller, why)
        link = self._of(request.prefiller)
        link.failures += 1
        link.failure = why
        if not request.warm_up_with:
            REMOTE_PREFILL_FAILURES.labels(self.workers.model, why.partition(":")[0]).inc()

    def unreachable(self, workers: Iterable[str]) -> None:
        for worker in filter(self.workers.is_known, workers):
            self._of(worker)
            HANDSHAKE_FAILURES.labels(self.workers.model, worker).inc()

    def states(self) -> list[LinkState]:
        """The state of the link to each registered prefill worker."""
        requests = Counter(
            request.prefiller for request in self.requests.clients() if request.needs_prefill_worker
        )
        return [self._state(worker.id, requests[worker.id]) for worker in self.workers.registered()]

    def _state(self, worker: str, requests: int) -> LinkState:
        link = self._links.get(worker, _Link())
        return LinkState(
            worker,
            "kv",
            up=not self.workers.is_avoided(worker),
            requests=requests,
            pulls=link.pulls,
            pull_seconds=link.pull_seconds,
            bytes_per_second=link.bytes / link.seconds if link.seconds else None,
            idle=time.monotonic() - link.last_pull if link.pulls else 0.0,
            failures=link.failures,
            failure=link.failure,
        )

    def forget_gone(self) -> None:
        for worker in self._links.keys() - {peer.id for peer in self.workers.peers()}:
            del self._links[worker]
            HANDSHAKE_FAILURES.remove(self.workers.model, worker)

    def _of(self, worker: str) -> _Link:
        """Return the link's counts. Those of an unregistered worker, whose last reads may end late, are not kept."""
        if worker not in self._links:
            if not self.workers.is_known(worker):
                return _Link()
            self._links[worker] = _Link()
            # the counter must exist at 0, because Prometheus sees no increase in a series that begins at 1
            HANDSHAKE_FAILURES.labels(self.workers.model, worker)
        return self._links[worker]
