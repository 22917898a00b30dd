"""When users join, and when they ask: the arithmetic of the workload, without a server.

A user asks its questions `interval = users / qps` seconds apart, so its chat lasts `interval x (rounds - 1)`, and
then its place is free. So that `users` are there at all times, one joins every `(rounds - 1) / qps` seconds. Each
of them asks `rounds` questions: together they ask `qps x rounds / (rounds - 1)` a second, half as many again as
`qps` where a chat has three rounds. This is how multi-round-qa of vLLM's production stack counts, and how published
figures were made.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random


@dataclass(frozen=True)
class Visit:
    """A user's chat."""

    user: int
    """from 1 on"""
    at: float
    """seconds after the run's begin; its first question of the run is due then"""
    first_round: int
    """1, or later for a user that was already there when the run began"""


@dataclass(frozen=True)
class Pacing:
    users: float
    """that are there at a time; a fraction where the load was scaled"""
    rounds: int
    qps: float

    @property
    def interval(self) -> float:
        """Seconds between two questions of a user."""
        return self.users / self.qps

    @property
    def joining(self) -> float:
        """Seconds from one user to the next."""
        return max(1, self.rounds - 1) / self.qps

    @property
    def rate(self) -> float:
        """Questions per second of all users, as long as answers come within the interval."""
        return self.rounds / self.joining

    def scaled(self, rate: float) -> "Pacing":
        """More or fewer users of the same kind: each asks as often as before."""
        qps = self.qps * rate / self.rate
        return Pacing(self.interval * qps, self.rounds, qps)

    def visits(self, seed: int) -> Iterator[Visit]:
        """In the order of their times, without an end. As if users had joined long before: those whose chats still last
        when the run begins come first, in the middle of their rounds, so that the rate is the same from the first
        second on. Users join evenly, each somewhere within its share of the time: the seed says where, so that users
        do not ask at the same moments for ever."""
        dice = Random(f"{seed} arrivals")
        early = list[tuple[float, int]]()
        for slot in range(-int(self.interval * (self.rounds - 1) / self.joining) - 1, 0):
            joined = (slot + dice.random()) * self.joining
            asked = int(-joined / self.interval) + 1
            if asked < self.rounds:
                early.append((joined + asked * self.interval, asked + 1))
        joining = (((slot + dice.random()) * self.joining, 1) for slot in count())
        for user, (at, first_round) in enumerate(heapq.merge(sorted(early), joining), 1):
            yield Visit(user, at, first_round)
