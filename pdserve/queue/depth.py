"""How long the prefill queue is, without asking the server: a pure value, fed with what a process gets to
see; and what prefill workers have pulled.

Sequence numbers are the stream's: the server counts every stored request, 1, 2, 3, … Deciders see the
numbers of their own requests when they are stored, and the state that prefill workers broadcast when they
pull.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from pdserve.messages import PrefillLoad, PrefillRequest, QueueState


@dataclass(frozen=True)
class QueueDepth:
    delivered: int = 0
    """highest sequence known to have been delivered to a prefill worker"""
    last: int = 0
    """highest sequence known to have been stored"""
    missing: int = 0
    """how many between the two the server no longer has: past their age, or purged"""

    @property
    def value(self) -> int:
        return max(0, self.last - self.delivered - self.missing)

    def published(self, sequence: int) -> "QueueDepth":
        """The server stored a request of this process. Confirmations may come out of order."""
        return replace(self, last=max(self.last, sequence))

    def reported(self, state: QueueState) -> "QueueDepth":
        """A prefill worker pulled. A lower sequence than known is a redelivery or came late: it says
        nothing new.

        What is known to be stored beyond the state's own end was stored after the pull, or is missing: it
        counts until `synced` says better.
        """
        if state.delivered_seq < self.delivered:
            return self
        last = max(self.last, state.delivered_seq + state.pending)
        gone = self.missing if state.delivered_seq == self.delivered else 0
        return QueueDepth(state.delivered_seq, last, min(gone, last - state.delivered_seq - state.pending))

    def synced(self, stored: int, state: QueueState, asked: "QueueDepth") -> "QueueDepth":
        """The server itself answered: `stored` is the stream's last sequence, read before `state`; `asked` is
        what was known before both. What was stored and is neither delivered nor pending is missing."""
        end = state.delivered_seq + state.pending
        truth = QueueDepth(state.delivered_seq, max(stored, end), max(0, stored - end))
        if truth.last < asked.last or truth.delivered < asked.delivered:
            return truth  # the stream is a new one: NATS lost its data
        if truth.delivered < self.delivered:
            return self  # a prefill worker reported a later pull meanwhile
        return replace(truth, last=max(truth.last, self.last))


@dataclass(frozen=True)
class Puller:
    """A prefill worker that pulls."""

    id: str
    load: Callable[[], PrefillLoad]

    def load_with(self, requests: Iterable[PrefillRequest]) -> PrefillLoad:
        """Its load now, with what it has just pulled."""
        load = self.load()
        return msgspec.structs.replace(
            load, tokens=load.tokens + sum(len(request.prompt) for request in requests)
        )
