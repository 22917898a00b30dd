"""A fair queue: self-clocked fair queueing (SCFQ) over clients, weighted by tokens; FIFO within a client. No I/O.

Each sequence has a finish tag: its tokens plus the larger of its client's previous tag and the virtual time. The
virtual time is the highest tag of a sequence that has started. The lowest tag is served next. So a client with one
request goes before the second request of a client with a thousand, and an idle client saves up nothing.

In addition, clients that run less than their share of the slots go first, because sequences may last much longer than
estimated. A single client may use every slot. A request of another client then gets one by preemption (`first_short`).
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

_REMEMBERED = 1000
"""Number of new clients after which idle ones are removed."""


@dataclass
class ClientShare:
    last_tag: float = 0.0
    """finish tag of its last sequence"""
    waiting: int = 0
    """entries in the queue"""
    running: int = 0
    """sequences that have started and are not over"""


@dataclass(eq=False)
class QueueEntry:
    client: str
    tokens: float = 1.0
    """of each sequence, estimated"""
    tagged: int = 0
    """number of its next sequences whose finish tags are set, each `tokens` after the one before"""
    tag: float = 0.0
    """finish tag of its next sequence, in tokens"""


E = TypeVar("E", bound=QueueEntry)


class FairQueue(Generic[E]):
    def __init__(self) -> None:
        self._entries: list[E] = []
        """in order of tag"""
        self._virtual_time = 0.0
        self._clients: dict[str, ClientShare] = {}
        self._prune_at = _REMEMBERED

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries)

    @property
    def tokens(self) -> float:
        """Tokens of all tagged sequences in the queue."""
        return sum(entry.tokens * entry.tagged for entry in self._entries)

    @property
    def running(self) -> int:
        return sum(client.running for client in self._clients.values())

    def tag(self, entry: E, sequences: int) -> None:
        """Tag the entry's next sequences, behind those of its client."""
        client = self._client(entry.client)
        start = max(self._virtual_time, client.last_tag)
        entry.tagged = sequences
        entry.tag = start + entry.tokens
        client.last_tag = start + entry.tokens * sequences
        if len(self._clients) > self._prune_at:
            self._prune()

    def push(self, entry: E) -> None:
        insort(self._entries, entry, key=attrgetter("tag"))
        self._client(entry.client).waiting += 1

    def remove(self, entry: E) -> None:
        """Take the entry out; it keeps its tags. Does nothing if it is not in the queue."""
        if entry in self._entries:
            self._entries.remove(entry)
            self._client(entry.client).waiting -= 1

    def withdraw(self, entry: E) -> None:
        """Take the entry out and give back its tags: its client's later sequences move up."""
        self.remove(entry)
        tokens, entry.tagged = entry.tokens * entry.tagged, 0
        if not tokens:
            return
        for other in self._entries:
            if other.client == entry.client and other.tag > entry.tag:
                other.tag -= tokens
        self._client(entry.client).last_tag -= tokens
        self._entries.sort(key=attrgetter("tag"))

    def next(self, places: int, may: Callable[[E], bool]) -> E | None:
        """The first entry that may start and whose client runs less than its share of the slots (`places`); without
        such an entry, the first that may start."""
        clients = sum(bool(client.running or client.waiting) for client in self._clients.values())
        share = max(1, places // clients)
        within = (entry for entry in self._entries if self.runs(entry) < share and may(entry))
        return next(within, None) or next(filter(may, self._entries), None)

    def runs(self, entry: E) -> int:
        """Number of running sequences of its client."""
        return self._client(entry.client).running

    def first_short(self, may: Callable[[E], bool]) -> E | None:
        """The first entry that may start and whose client is short of slots (`is_short`)."""
        most = max((client.running for client in self._clients.values()), default=0)
        if not any(client.waiting and is_short(client.running, most) for client in self._clients.values()):
            return None
        return next(
            (entry for entry in self._entries if is_short(self.runs(entry), most) and may(entry)), None
        )

    def start(self, entry: E) -> None:
        """Take the entry out of the queue: its next sequence starts."""
        self.remove(entry)
        self._virtual_time = max(self._virtual_time, entry.tag)
        self._client(entry.client).running += 1
        entry.tagged -= 1
        entry.tag += entry.tokens

    def put_back(self, entry: E) -> None:
        """Undo `start`, as for a preempted sequence: it stays before its client's later ones. Does not push
        the entry."""
        self._client(entry.client).running -= 1
        entry.tagged += 1
        entry.tag -= entry.tokens

    def finish(self, client: str) -> None:
        """A sequence of this client has ended."""
        self._client(client).running -= 1

    def before(self, entry: E) -> list[tuple[float, int]]:
        """For each entry with a lower tag: tokens per sequence, and how many of its sequences start before the next one
        of `entry`."""
        return [
            (other.tokens, _turns_before(other, entry)) for other in self._entries if other.tag < entry.tag
        ]

    def _client(self, client: str) -> ClientShare:
        return self._clients.setdefault(client, ClientShare())

    def _prune(self) -> None:
        self._clients = {
            name: client
            for name, client in self._clients.items()
            if client.last_tag > self._virtual_time or client.waiting or client.running
        }
        self._prune_at = _REMEMBERED + len(self._clients)


def is_short(running: int, most: int) -> bool:
    """Whether a client with `running` sequences gets a slot of a client with `most` sequences. The latter is not short
    afterwards, so slots do not go back and forth."""
    return most > 2 * running + 1


def _turns_before(entry: QueueEntry, other: QueueEntry) -> int:
    """Number of `entry`'s sequences that start before the next one of `other`."""
    return min(entry.tagged, 1 + int((other.tag - entry.tag) // entry.tokens))
