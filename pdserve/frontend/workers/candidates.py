"""The workers that may get a request, in round-robin order, with the sum of their capacities.

Updated incrementally, so that a choice and the sum cost no more with a thousand workers than with ten."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Set

from pdserve.frontend.admission.capacity import Capacity

WINDOW = 16
"""Workers that the router compares for one request. The best of 16 is nearly as good as the best of all. Frontends
compare different windows, so that they do not all choose the same worker."""


class Candidates:
    """Workers by instance id, which is also the round-robin order."""

    def __init__(self) -> None:
        self._capacities: dict[str, Capacity] = {}
        self._all: list[str] = []
        self._free: list[str] = []
        """workers with capacity for one more request"""
        self._requests = 0
        self._free_requests = 0
        self._free_tokens = 0.0
        self._unbounded = 0
        """workers whose free tokens are infinite"""

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, worker: str) -> bool:
        return worker in self._capacities

    @property
    def capacity(self) -> Capacity:
        """The sum over all workers. A full worker adds only its `max_requests`."""
        # the running sum has rounding errors, which must not hide a free worker
        tokens = float("inf") if self._unbounded else max(self._free_tokens, 1e-6)
        return Capacity(self._requests, self._free_requests, tokens if self._free else 0.0)

    def set(self, worker: str, capacity: Capacity | None) -> None:
        """Set a worker's capacity; None removes the worker."""
        before = self._capacities.pop(worker, None)
        if before == capacity and capacity is not None:
            self._capacities[worker] = capacity
            return
        _update(self._all, worker, before is not None, capacity is not None)
        _update(self._free, worker, _available(before), _available(capacity))
        if before is not None:
            self._add(before, -1)
        if capacity is not None:
            self._capacities[worker] = capacity
            self._add(capacity, 1)

    def is_full(self, worker: str) -> bool:
        return not _available(self._capacities.get(worker))

    def next_in_turn(
        self,
        last: str,
        *,
        never: Set[str] = frozenset(),
        avoid: Set[str] = frozenset(),
        preferred: Iterable[str] = (),
    ) -> list[str]:
        """Return the next `WINDOW` workers in round-robin order after `last`, then the rest of `preferred`. Workers in
        `never` are left out. Workers in `avoid` are returned only if there are no others. Of the workers that remain,
        full ones are returned only if all are full."""
        for skipped in (never | avoid, never):
            for workers in (self._free, self._all):
                if found := _next(workers, last, skipped):
                    may_be_full = workers is self._all
                    found += [
                        worker
                        for worker in preferred
                        if worker in self._capacities
                        and (may_be_full or not self.is_full(worker))
                        and worker not in skipped
                        and worker not in found
                    ]
                    return found
        return []

    def _add(self, capacity: Capacity, sign: int) -> None:
        self._requests += sign * capacity.max_requests
        if not capacity.has_room:
            return
        self._free_requests += sign * capacity.free_requests
        if capacity.free_tokens == float("inf"):
            self._unbounded += sign
        else:
            self._free_tokens += sign * capacity.free_tokens


def _available(capacity: Capacity | None) -> bool:
    return capacity is not None and capacity.has_room


def _update(workers: list[str], worker: str, was: bool, is_now: bool) -> None:
    if was and not is_now:
        del workers[bisect_right(workers, worker) - 1]
    elif is_now and not was:
        insort(workers, worker)


def _next(workers: list[str], last: str, skipped: Set[str]) -> list[str]:
    start = bisect_right(workers, last)
    turns = range(start, start + min(len(workers), WINDOW + len(skipped)))
    found = (workers[turn % len(workers)] for turn in turns)
    return [worker for worker in found if worker not in skipped][:WINDOW]
