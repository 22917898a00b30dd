"""The decode workers that may get a request, updated as each changes, so that neither a choice among them nor the sum
of their capacities costs more with a thousand workers than with ten; and those that are expected to keep a request's
promise (`slo.py`), among which the router chooses."""

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.contract.messages import Load, Promise
from pdserve.contract.records import Instance
from pdserve.contract.slo import MIN_MISS_DIFFERENCE, gap_miss_probability, ttft_miss_probability
from pdserve.frontend.admission.capacity import Capacity

WINDOW = 16
"""workers that a choice looks at, the next in turn: the best of 16 is nearly as good as the best of all, and several
frontends, which are at different turns, do not all choose the same worker"""


class Candidates:
    """Workers are named by instance id, and turns go in order of id."""

    def __init__(self) -> None:
        self._capacities: dict[str, Capacity] = {}
        self._all: list[str] = []
        self._free: list[str] = []
        """with capacity for one more request"""
        self._requests = self._free_requests = self._endless = 0
        self._free_tokens = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, worker: str) -> bool:
        return worker in self._capacities

    @property
    def capacity(self) -> Capacity:
        """The sum of all. A full worker adds neither its free requests nor its free tokens."""
        # a sum that is updated has rounding errors, which must not hide a free worker
        tokens = float("inf") if self._endless else max(self._free_tokens, 1e-6)
        return Capacity(self._requests, self._free_requests, tokens if self._free else 0.0)

    def set(self, worker: str, capacity: Capacity | None) -> None:
        """Note a worker's capacity; None: it may get no request."""
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

    def is_full(self, worker: str) -> bool:
        return not _available(self._capacities.get(worker))

    def next_in_turn(
        self, last: str, avoid: Collection[str], *, only_others: bool, preferred: Iterable[str] = ()
    ) -> list[str]:
        """The workers that a choice has to look at: the next `WINDOW` in turn behind `last`, then, of `preferred`, what
        may be chosen as well as these. Full workers are returned only where none has capacity; those in `avoid` are the
        last resort, or never returned with `only_others`."""
        for avoided in (avoid,) if only_others else (avoid, ()):
            for workers in (self._free, self._all):
                if found := _turn(workers, last, avoided):
                    may_be_full = workers is self._all
                    found += [
                        worker
                        for worker in preferred
                        if worker in self._capacities
                        and (may_be_full or not self.is_full(worker))
                        and worker not in avoided
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
            self._endless += sign
        else:
            self._free_tokens += sign * capacity.free_tokens


def _available(capacity: Capacity | None) -> bool:
    return capacity is not None and capacity.has_room


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


@dataclass(frozen=True)
class Forecast:
    """Of a request at a worker, in seconds."""

    first: float
    """until its first token"""
    gap: float
    """between two tokens"""

    @classmethod
    def of(cls, load: Load, sent: int, prompt: int) -> "Forecast":
        """`sent`: tokens of the prompts sent since the worker reported this load; `prompt`: of the request's, without
        what the worker has cached."""
        return cls(load.prompt_wait + (sent + prompt) * load.token_seconds, load.gap_seconds)

    def miss_probability(self, promise: Promise) -> float:
        """The probability that the promise is broken."""
        kept = 1.0 if promise.ttft is None else 1 - ttft_miss_probability(self.first, promise.ttft)
        return 1 - kept * (1.0 if promise.gap is None else 1 - gap_miss_probability(self.gap, promise.gap))


def likely_to_keep(
    promise: Promise, candidates: Sequence[Instance], forecasts: Mapping[str, Forecast]
) -> list[Instance]:
    """The candidates that are expected to keep the promise about as well as the best of them, and those of which
    nothing is known."""
    broken = {
        each.id: forecasts[each.id].miss_probability(promise) for each in candidates if each.id in forecasts
    }
    best = min(broken.values(), default=0.0)
    return [each for each in candidates if broken.get(each.id, 0.0) <= best + MIN_MISS_DIFFERENCE]
