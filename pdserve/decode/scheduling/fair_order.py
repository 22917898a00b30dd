"""In which order what waits has its turn: round the clients, so that nothing waits for all that another client has
there; of a client first come, first served; spare requests last. Pure: times come from outside.

Where a time is promised for the first token, the earliest comes first, among the clients that have had as many turns as
the others, and of a client. What cannot keep its promise any more waits behind what can, but not for ever."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from pdserve.contract.slo import is_flex

T = TypeVar("T")

LATE = 10.0
"""seconds after the promised time when what could not keep it counts as the earliest"""
PASSED = 2
"""turns of other clients, for each of them, after which a client has the next turn"""


def rank(due: float, needs: float, now: float) -> float:
    """Of what waits, the lowest comes first. `needs`: seconds from its turn to the first token."""
    return due if now + needs <= due else due + LATE


@dataclass(eq=False)
class Waiting(Generic[T]):
    item: T
    due: float = math.inf
    """when its first token is promised"""
    needs: float = 0.0
    _seen: float = math.inf
    """when it was looked at first while anything had a promise"""

    def rank(self, now: float) -> float:
        """Without a promise, as what cannot keep its own since it was looked at first: else what its client sends
        later, with a promise, would pass it for ever."""
        if self.due == math.inf:
            self._seen = min(self._seen, now)
            return self._seen + LATE
        return rank(self.due, self.needs, now)


class FairOrder(Generic[T]):
    def __init__(self) -> None:
        self._queues: dict[str, list[Waiting[T]]] = {}
        """by client, in the order in which they have their turns; none is empty"""
        self._turns: Counter[str] = Counter()
        """of each client that waits: its turns so far, or those of others of its kind before it came"""
        self._passed: Counter[str] = Counter()
        """of each client that waits: turns of others since its last one"""
        self._promised = 0
        """how many have a promise"""
        self._ranked: dict[str, tuple[list[Waiting[T]], float]] = {}
        """by client: the best when it was looked at last, with its rank then, and those that came since. Ranks only
        grow, so that none of the others can have become the best while this one's has not"""

    def add(self, client: str, item: T, due: float = math.inf, needs: float = 0.0) -> None:
        if client not in self._queues:
            alike = (turns for name, turns in self._turns.items() if is_flex(name) == is_flex(client))
            self._turns[client] = min(alike, default=0)
        waiting = Waiting(item, due, needs)
        self._queues.setdefault(client, []).append(waiting)
        self._promised += due < math.inf
        if client in self._ranked:
            self._ranked[client][0].append(waiting)

    def first(self, now: float) -> T | None:
        """The next one, which stays."""
        if not self._queues:
            return None
        client = self._next(now)
        return self._best(client, now).item

    def pop(self, now: float) -> T:
        client = self._next(now)
        best = self._best(client, now)
        queue, turns = self._queues[client], self._turns[client] + 1
        self._leave(client)
        queue.remove(best)
        self._promised -= best.due < math.inf
        self._passed.update(list(self._queues))
        if queue:  # its next one comes after those of all others
            self._queues[client], self._turns[client] = queue, turns
        return best.item

    def remove(self, client: str, item: T) -> None:
        """No effect if it is not there."""
        queue = self._queues.get(client, [])
        left = [waiting for waiting in queue if waiting.item is not item]
        self._promised -= sum(each.due < math.inf for each in queue if each.item is item)
        if left:
            self._queues[client] = left
            self._ranked.pop(client, None)
        else:
            self._leave(client)

    def after(self, client: str) -> int:
        """How many of other clients, without spare ones, have their turn after a new one of this client, where none has
        a promise."""
        own = len(self._queues.get(client, ())) + 1
        others = (len(queue) for name, queue in self._queues.items() if name != client and not is_flex(name))
        return sum(max(0, count - own) for count in others)

    @property
    def ordinary(self) -> int:
        """How many wait, without spare ones."""
        return sum(len(queue) for name, queue in self._queues.items() if not is_flex(name))

    def _leave(self, client: str) -> None:
        for each in (self._queues, self._turns, self._passed, self._ranked):
            each.pop(client, None)

    def _next(self, now: float) -> str:
        clients = [name for name in self._queues if not is_flex(name)] or list(self._queues)
        if not self._promised:
            return clients[0]
        if passed := [name for name in clients if self._passed[name] > PASSED * len(clients)]:
            return passed[0]
        fewest = min(self._turns[name] for name in clients)
        return min(
            (name for name in clients if self._turns[name] == fewest),
            key=lambda name: self._best(name, now).rank(now),
        )

    def _best(self, client: str, now: float) -> Waiting[T]:
        if not self._promised:
            return self._queues[client][0]
        known, rank = self._ranked.get(client, (self._queues[client], 0.0))
        if known[0].rank(now) != rank:
            known = self._queues[client]
        best = min(known, key=lambda waiting: waiting.rank(now))
        self._ranked[client] = [best], best.rank(now)
        return best

    def __iter__(self) -> Iterator[T]:
        return (waiting.item for waiting in chain.from_iterable(self._queues.values()))

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
