"""In which order what waits has its turn: round the clients, so that nothing waits for all that another client has
there. Of a client first come, first served. Pure."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T")


class FairOrder(Generic[T]):
    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}
        """by client, the next one first; none is empty"""

    def add(self, client: str, item: T) -> None:
        self._queues.setdefault(client, deque()).append(item)

    def first(self) -> T | None:
        """The next one, which stays."""
        return next((queue[0] for queue in self._queues.values()), None)

    def pop(self) -> T:
        client, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        del self._queues[client]
        if queue:  # its next one comes after those of all others
            self._queues[client] = queue
        return item

    def remove(self, client: str, item: T) -> None:
        """No effect if it is not there."""
        queue = self._queues.get(client, deque())
        if item in queue:
            queue.remove(item)
            if not queue:
                del self._queues[client]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._queues.values())

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
