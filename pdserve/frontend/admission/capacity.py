"""Capacity of a decode worker: how many more requests it should get, so that it runs them at once and queues none.
Pure.

An engine serves its waiting requests first come, first served, whichever client sent them, and preempts running ones
when its KV cache is full. So requests wait in the frontend (`admission/control.py`) until a worker has capacity.
"""

from dataclasses import dataclass
from typing import Protocol

from pdserve.contract.messages import Load
from pdserve.contract.records import Instance

DEFAULT_MAX_REQUESTS = 256
"""Slots of a worker that does not publish `max_num_seqs`."""
EXTRA = 4
"""A worker gets one extra request for each of its requests in remote prefill, because these need no slot yet. It gets
at most one extra request for this many slots."""
KV_FULL = 0.9
"""A worker whose KV cache is this full gets no request beyond this frontend's part of the cache."""


class InFlight(Protocol):
    """This frontend's requests at a worker, and the worker's last report."""

    @property
    def load(self) -> Load: ...

    @property
    def requests(self) -> int: ...

    @property
    def tokens(self) -> float:
        """KV tokens that the requests will need, prompts and outputs; a shared prefix counts in each"""

    @property
    def starting(self) -> bool:
        """whether any request has no token yet"""


@dataclass(frozen=True)
class Capacity:
    max_requests: int = 0
    """slots of the workers, free or not; 0 without workers"""
    free_requests: int = 0
    """how many more requests can run now"""
    free_tokens: float = 0.0
    """KV tokens for these requests; any number above 0 admits one more, of any length"""

    @property
    def has_room(self) -> bool:
        return self.free_requests > 0 and self.free_tokens > 0


def worker_capacity(worker: Instance, ours: InFlight, frontends: int) -> Capacity:
    """`frontends`: how many share the worker, this one included. Each may always use an equal part of the slots, and
    more if the worker's last report shows that the others leave slots unused.

    Prompts with common prefixes need less of the KV cache than the sum of their tokens. So when that sum reaches this
    frontend's part of the cache, one more request at a time is tried while the cache is not `KV_FULL`."""
    if worker.draining:
        return Capacity()
    places = worker.max_num_seqs or DEFAULT_MAX_REQUESTS
    extra = min(max(1, places // EXTRA), ours.load.remote)
    maximum = share = places + extra
    if frontends > 1:
        others = max(0, ours.load.running + ours.load.waiting - ours.requests)
        share = max(maximum // frontends, maximum - others, 1)
    return Capacity(places, max(0, share - ours.requests), _free_tokens(worker, ours, frontends))


def _free_tokens(worker: Instance, ours: InFlight, frontends: int) -> float:
    if not worker.kv_tokens:
        return float("inf")
    free = worker.kv_tokens / frontends - ours.tokens
    if free > 0:
        return free
    return 1.0 if ours.load.kv_usage < KV_FULL and not ours.starting else 0.0
