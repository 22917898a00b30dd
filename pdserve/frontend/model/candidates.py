"""Which decode workers may get a request, kept up as they change, so that neither a choice among them nor their
capacity costs more with a thousand workers than with ten."""

from bisect import bisect_right, insort
from collections.abc import Collection

from pdserve.frontend.admission.capacity import Capacity

WINDOW = 16
"""workers that a choice looks at, the next in turn: the best of 16 is nearly as good as the best of all, and several
frontends, which are at different turns, do not all choose the same"""


class Candidates:
    """By instance id, in order of id."""

    def __init__(self) -> None:
        self._capacities: dict[str, Capacity] = {}
        self._all: list[str] = []
        self._free: list[str] = []
        """those with capacity for one more request"""
        self._requests = self._free_requests = self._endless = 0
        self._free_tokens = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, worker: str) -> bool:
        return worker in self._capacities

    @property
    def capacity(self) -> Capacity:
        """Of all. A worker without capacity for requests has no use for its tokens, and the other way round."""
        # the sum is kept up by additions: its rounding must hide no free worker
        tokens = float("inf") if self._endless else max(self._free_tokens, 1e-6)
        return Capacity(self._requests, self._free_requests, tokens if self._free else 0.0)

    def set(self, worker: str, capacity: Capacity | None) -> None:
        """What it has now; None: it may get nothing."""
        before = self._capacities.pop(worker, None)
        if before == capacity and capacity is not None:
            self._capacities[worker] = capacity
            return
        _keep(self._all, worker, before is not None, capacity is not None)
        _keep(self._free, worker, _available(before), _available(capacity))
        if before is not None:
            self._add(before, -1)
        if capacity is not None:
            self._capacities[worker] = capacity
            self._add(capacity, 1)

    def full(self, worker: str) -> bool:
        return not _available(self._capacities.get(worker))

    def next(self, last: str, avoid: Collection[str], *, only_others: bool) -> list[str]:
        """Up to `WINDOW` that a choice has to look at, in turn behind `last`: of those with capacity, else of all; and
        those in `avoid` only where there is no other, or never with `only_others`."""
        for workers in (self._free, self._all):
            if found := _turn(workers, last, avoid):
                return found
        if only_others:
            return []
        return _turn(self._free, last, ()) or _turn(self._all, last, ())

    def _add(self, capacity: Capacity, sign: int) -> None:
        self._requests += sign * capacity.max_requests
        if not capacity.available:
            return
        self._free_requests += sign * capacity.free_requests
        if capacity.free_tokens == float("inf"):
            self._endless += sign
        else:
            self._free_tokens += sign * capacity.free_tokens


def _available(capacity: Capacity | None) -> bool:
    return capacity is not None and capacity.available


def _keep(workers: list[str], worker: str, was: bool, is_there: bool) -> None:
    if was and not is_there:
        del workers[bisect_right(workers, worker) - 1]
    elif is_there and not was:
        insort(workers, worker)


def _turn(workers: list[str], last: str, avoid: Collection[str]) -> list[str]:
    start, found = bisect_right(workers, last), list[str]()
    for place in range(min(len(workers), WINDOW + len(avoid))):
        worker = workers[(start + place) % len(workers)]
        if worker not in avoid:
            found.append(worker)
    return found[:WINDOW]
