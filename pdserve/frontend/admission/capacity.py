"""How many more requests a decode worker should get: what it can run, not what it would only queue. Pure.

Requests that wait inside an engine are served in order of arrival, whichever client sent them; they hold KV on
the prefill worker, whose lease runs out; and where the KV cache is full, engines preempt what they run and compute it
again. So requests wait in the frontend (`admission/control.py`) until a worker has capacity.
"""

from dataclasses import dataclass
from typing import Protocol

from pdserve.messages import Load
from pdserve.records import Instance

DEFAULT_MAX_REQUESTS = 256
"""concurrent requests of a worker that does not publish how many it runs"""
EXTRA = 4
"""one request more for so many: requests that are prefilled elsewhere have no place in the batch yet"""
KV_FULL = 0.9
"""share of the KV cache in use beyond which nothing is tried any more"""


class InFlight(Protocol):
    """What this frontend has at a worker, and what the worker said last."""

    @property
    def load(self) -> Load: ...

    @property
    def requests(self) -> int: ...

    @property
    def tokens(self) -> float:
        """of KV that they will need, prompts and outputs, shared prefixes counted for each"""

    @property
    def starting(self) -> bool:
        """at least one request has no token yet"""


@dataclass(frozen=True)
class Capacity:
    max_requests: int = 0
    """concurrent requests of idle workers; 0 where no worker could run any"""
    free_requests: int = 0
    """how many more now"""
    free_tokens: float = 0.0
    """of KV, for these; any above 0 lets one more in, however long it is"""

    @property
    def available(self) -> bool:
        return self.free_requests > 0 and self.free_tokens > 0


def worker_capacity(worker: Instance, ours: InFlight, frontends: int) -> Capacity:
    """`frontends` share the worker, this one included: an equal part is always ours, and what the others leave
    unused, as far as the worker's report of a second ago can tell.

    Where prompts have prefixes in common, more fits the KV cache than adds up. So beyond that one more request at a
    time is tried, when all that are there have begun and the worker reports free space."""
    if worker.draining:
        return Capacity()
    maximum = worker.max_num_seqs or DEFAULT_MAX_REQUESTS
    maximum += max(1, maximum // EXTRA)
    share = maximum
    if frontends > 1:
        others = max(0, ours.load.running + ours.load.waiting - ours.requests)
        share = max(maximum // frontends, maximum - others, 1)
    return Capacity(maximum, max(0, share - ours.requests), _free_tokens(worker, ours, frontends))


def _free_tokens(worker: Instance, ours: InFlight, frontends: int) -> float:
    if not worker.kv_tokens:
        return float("inf")
    free = worker.kv_tokens / frontends - ours.tokens
    if free > 0:
        return free
    return 1.0 if ours.load.kv_usage < KV_FULL and not ours.starting else 0.0
