"""A fair queue of prompts: round-robin over clients, FIFO within a client, flex requests last.

A request that can no longer meet its TTFT deadline lets the others pass, until `MAX_LATE` seconds after that deadline.
Pure: callers pass the time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from pdserve.contract.slo import is_flex

T = TypeVar("T")

MAX_LATE = 10.0
"""A request that is this many seconds past its deadline no longer lets others pass, so that it does not starve."""


def is_late(due: float, needs: float, now: float) -> bool:
    """Whether the request lets others pass. `due`: its TTFT deadline; `needs`: seconds from its turn to the first
    token."""
    return due - needs < now < due + MAX_LATE


@dataclass(frozen=True, eq=False)
class _Waiting(Generic[T]):
    item: T
    due: float
    needs: float


class PromptQueue(Generic[T]):
    def __init__(self) -> None:
        self._queues: dict[str, list[_Waiting[T]]] = {}
        """By client, in round-robin order. No list is empty."""

    def add(self, client: str, item: T, due: float = math.inf, needs: float = 0.0) -> None:
        self._queues.setdefault(client, []).append(_Waiting(item, due, needs))

    def first(self, now: float) -> T | None:
        """Return the next item and leave it in the queue."""
        return self._next(now)[1].item if self._queues else None

    def pop(self, now: float) -> T:
        client, waiting = self._next(now)
        queue = self._queues.pop(client)
        queue.remove(waiting)
        if queue:  # the client's next turn comes after those of all others
            self._queues[client] = queue
        return waiting.item

    def remove(self, client: str, item: T) -> None:
        """Remove the item if it is in the queue."""
        queue = self._queues.get(client, [])
        queue[:] = [waiting for waiting in queue if waiting.item is not item]
        if not queue:
            self._queues.pop(client, None)

    def behind(self, client: str) -> int:
        """How many requests of other clients, flex requests excluded, come after a new one of this client."""
        own = len(self._queues.get(client, ())) + 1
        return sum(max(0, len(queue) - own) for name, queue in self._regular() if name != client)

    @property
    def regular(self) -> int:
        """Number of requests, flex requests excluded."""
        return sum(len(queue) for _, queue in self._regular())

    def _regular(self) -> Iterator[tuple[str, list[_Waiting[T]]]]:
        return ((name, queue) for name, queue in self._queues.items() if not is_flex(name))

    def _next(self, now: float) -> tuple[str, _Waiting[T]]:
        """The first request, client by client, that is not late; if all are late, the first one. Flex requests count
        only if there are no others."""
        queues = list(self._regular()) or list(self._queues.items())
        for client, queue in queues:
            for waiting in queue:
                if not is_late(waiting.due, waiting.needs, now):
                    return client, waiting
        client, queue = queues[0]
        return client, queue[0]

    def __iter__(self) -> Iterator[T]:
        return (waiting.item for waiting in chain.from_iterable(self._queues.values()))

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
