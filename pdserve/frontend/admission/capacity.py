"""How much more a decode worker should get: what it can run, and not what it would only queue. Pure.

A request that waits inside an engine waits in order of arrival, whoever it belongs to; it holds KV on the prefill
worker, whose lease runs out; and where the KV cache is full, engines throw out what they are at and compute it
again. So requests wait in the frontend (`frontend/line.py`) until there is room.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pdserve.messages import Instance

UNTOLD = 256
"""requests at once of a worker that does not say how many it runs"""
EXTRA = 4
"""one request more for so many: those whose prompts are prefilled elsewhere have no place in the batch yet"""
KV_FULL = 0.9
"""share of the KV cache in use beyond which nothing is tried any more"""


class Ours(Protocol):
    """What this frontend has at a worker."""

    @property
    def requests(self) -> int: ...

    @property
    def tokens(self) -> float:
        """of KV that they will need, prompts and outputs, shared prefixes counted for each"""

    @property
    def starting(self) -> bool:
        """one of them has no token yet"""


@dataclass(frozen=True)
class Room:
    places: int = 0
    """requests at once where there are none; 0 where nobody could run any"""
    requests: int = 0
    """how many more"""
    tokens: float = 0.0
    """of KV, for these; any above 0 lets one more in, however long it is"""

    @property
    def open(self) -> bool:
        return self.requests > 0 and self.tokens > 0


def room(worker: Instance, ours: Ours, frontends: int) -> Room:
    """`frontends` share the worker, this one included: an equal part is always ours, and what the others leave
    unused, as far as the worker's report of a second ago can tell.

    Where prompts have prefixes in common, more fits the KV cache than adds up. So beyond that one more at a time
    is tried, when all that is there has begun and the worker says that there is space."""
    if worker.draining:
        return Room()
    places = _places(worker)
    mine = places
    if frontends > 1:
        others = max(0, worker.load.running + worker.load.waiting - ours.requests)
        mine = max(places // frontends, places - others, 1)
    return Room(places, max(0, mine - ours.requests), _tokens(worker, ours, frontends))


def total(rooms: Iterable[Room]) -> Room:
    """Of several workers: one without room for requests has no use for its tokens, and the other way round."""
    rooms = list(rooms)
    there = [one for one in rooms if one.open]
    return Room(
        sum(one.places for one in rooms), sum(one.requests for one in there), sum(one.tokens for one in there)
    )


def _places(worker: Instance) -> int:
    most = worker.max_num_seqs or UNTOLD
    return most + max(1, most // EXTRA)


def _tokens(worker: Instance, ours: Ours, frontends: int) -> float:
    if not worker.kv_tokens:
        return float("inf")
    free = worker.kv_tokens / frontends - ours.tokens
    if free > 0:
        return free
    return 1.0 if worker.load.kv_usage < KV_FULL and not ours.starting else 0.0
