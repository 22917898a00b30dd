"""Computes the depth of the prefill queue without asking the server.

The JetStream stream numbers the requests: 1, 2, 3, … A decode worker learns the numbers ("sequences") of its own
requests when they are stored, and the queue state when they are pulled. Prefill workers broadcast this state only if
others need it (`reports.py`). Without a broadcast, waiting requests of other processes may not be counted.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from pdserve.contract.messages import PrefillLoad, PrefillRequest, QueueState


@dataclass(frozen=True)
class QueueDepth:
    delivered: int = 0
    """highest known sequence that was delivered to a prefill worker"""
    pending: int = 0
    """number of stored requests after `delivered`, up to `end`"""
    end: int = 0
    """highest sequence that `pending` covers"""
    own: frozenset[int] = frozenset()
    """sequences of this process's requests after `end`"""

    @property
    def value(self) -> int:
        return self.pending + len(self.own)

    @property
    def last(self) -> int:
        """Highest known sequence that was stored."""
        return max(self.end, *self.own, 0)

    def published(self, sequence: int) -> "QueueDepth":
        """Update for a request of this process that was stored; confirmations may come out of order. With
        `pending` requests, all after `end` up to this one count as waiting: those of other processes, too."""
        if sequence <= self.end:
            return self
        if self.pending:
            return self._up_to(self.delivered, self.pending + sequence - self.end, sequence)
        return replace(self, own=self.own | {sequence})

    def reported(self, state: QueueState) -> "QueueDepth":
        """Update for a prefill worker's pull. A report of an earlier pull, or of a redelivery, is ignored."""
        end = state.delivered_seq + state.pending
        if (state.delivered_seq, end) < (self.delivered, self.end):
            return self
        return self._up_to(state.delivered_seq, state.pending, end)

    def synced(self, stored: int, state: QueueState, asked: "QueueDepth") -> "QueueDepth":
        """Update from the server: `stored` is the stream's last sequence, read before `state`, and `asked` is this
        object as it was before both reads."""
        end = max(stored, state.delivered_seq + state.pending)
        if end < asked.last or state.delivered_seq < asked.delivered:
            return QueueDepth(state.delivered_seq, state.pending, end)  # NATS lost its data: a new stream
        if state.delivered_seq < self.delivered:
            return self  # a prefill worker has reported a later pull
        return self._up_to(state.delivered_seq, state.pending, end)

    def _up_to(self, delivered: int, pending: int, end: int) -> "QueueDepth":
        return QueueDepth(delivered, pending, end, frozenset(each for each in self.own if each > end))


@dataclass(frozen=True)
class Puller:
    """A prefill worker that pulls."""

    id: str
    load: Callable[[], PrefillLoad]

    def load_with(self, requests: Iterable[PrefillRequest]) -> PrefillLoad:
        """Return its load, including `requests`, which it has just pulled."""
        load = self.load()
        return msgspec.structs.replace(
            load, tokens=load.tokens + sum(len(request.prompt) for request in requests)
        )
