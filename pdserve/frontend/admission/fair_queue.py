"""Fair order among the clients whose requests wait: self-clocked fair queueing, in tokens. Pure.

Each sequence has a finish tag: as many tokens as it is large behind the sequence before it of the same client, or
behind the one that is being served now (the virtual time) where that is later. The lowest tag is next. So a client that
sends one request goes before the second request of a client that sends a thousand, and a client that was away saves
nothing.

Besides, a client gets no further sequence while it runs its share of what the workers can run and others wait, since
sequences may last much longer than was estimated. A client alone may have every place.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

_REMEMBERED = 1000
"""clients that are known beside those that wait, run or have paid in advance"""


@dataclass
class ClientShare:
    last_tag: float = 0.0
    """of its last sequence"""
    waiting: int = 0
    """its entries in the queue"""
    running: int = 0
    """its sequences whose turn has come and that are not over"""


@dataclass(eq=False)
class QueueEntry:
    client: str
    tokens: float = 1.0
    """of each of its sequences, about"""
    tagged: int = 0
    """its next sequences, which have finish tags one after another"""
    tag: float = 0.0
    """finish tag of the next one, in tokens"""


E = TypeVar("E", bound=QueueEntry)


class FairQueue(Generic[E]):
    def __init__(self) -> None:
        self._entries: list[E] = []
        """in order of tag"""
        self._virtual_time = 0.0
        """the tag of the last sequence whose turn came"""
        self._clients: dict[str, ClientShare] = {}
        self._prune_at = _REMEMBERED

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[E]:
        """In order of tag."""
        return iter(self._entries)

    @property
    def tokens(self) -> float:
        """That the entries wait for."""
        return sum(entry.tokens * entry.tagged for entry in self._entries)

    @property
    def running(self) -> int:
        """Sequences whose turn has come and that are not over."""
        return sum(client.running for client in self._clients.values())

    def tag(self, entry: E, sequences: int) -> None:
        """Give tags to the entry's next sequences, behind those of its client."""
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
        """It keeps its tags. Does nothing where it is not in the queue."""
        if entry in self._entries:
            self._entries.remove(entry)
            self._client(entry.client).waiting -= 1

    def withdraw(self, entry: E) -> None:
        """As if what is left of it had never come: its client's later sequences move up."""
        self.remove(entry)
        tokens, entry.tagged = entry.tokens * entry.tagged, 0
        if not tokens:
            return
        for other in self._entries:
            if other.client == entry.client and other.tag > entry.tag:
                other.tag -= tokens
        self._client(entry.client).last_tag -= tokens
        self._entries.sort(key=attrgetter("tag"))

    def next(self, places: int) -> E:
        """The first entry of a client that runs less than its share of the places; where each client runs its share,
        the first entry."""
        clients = sum(bool(client.running or client.waiting) for client in self._clients.values())
        share = max(1, places // clients)
        within = (entry for entry in self._entries if self._clients[entry.client].running < share)
        return next(within, self._entries[0])

    def start(self, entry: E) -> None:
        """Take it out of the queue: the turn of its next sequence has come."""
        self.remove(entry)
        self._virtual_time = max(self._virtual_time, entry.tag)
        self._client(entry.client).running += 1
        entry.tagged -= 1
        entry.tag += entry.tokens

    def finish(self, client: str) -> None:
        """A sequence of this client is over."""
        self._client(client).running -= 1

    def before(self, entry: E) -> list[tuple[float, int]]:
        """What comes before its next sequence: tokens of each sequence and how many, for each entry."""
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


def _turns_before(entry: QueueEntry, other: QueueEntry) -> int:
    """Of its sequences, those whose turns come before the other one's."""
    return min(entry.tagged, 1 + int((other.tag - entry.tag) // entry.tokens))
