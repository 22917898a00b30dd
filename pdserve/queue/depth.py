"""The depth of the prefill queue, computed without asking the server from what a process sees; and the load of prefill
workers.

Sequence numbers are the stream's: the server counts the stored requests, 1, 2, 3, … A decode worker sees the numbers
of its own requests when they are stored, and the queue state that prefill workers broadcast when they pull.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from pdserve.contract.messages import PrefillLoad, PrefillRequest, QueueState


@dataclass(frozen=True)
class QueueDepth:
    delivered: int = 0
    """highest sequence known to have been delivered to a prefill worker"""
    last: int = 0
    """highest sequence known to have been stored"""
    missing: int = 0
    """number of requests between the two that the server no longer has: past their age, or purged"""

    @property
    def value(self) -> int:
        return max(0, self.last - self.delivered - self.missing)

    def published(self, sequence: int) -> "QueueDepth":
        """The server stored a request of this process. Confirmations may come out of order."""
        return replace(self, last=max(self.last, sequence))

    def reported(self, state: QueueState) -> "QueueDepth":
        """A prefill worker pulled. A lower sequence than the known one is a redelivery or came late, and is ignored.

        Requests known to be stored beyond the state's end were stored after the pull, or are missing: they count until
        `synced` corrects them.
        """
        if state.delivered_seq < self.delivered:
            return self
        last = max(self.last, state.delivered_seq + state.pending)
        gone = self.missing if state.delivered_seq == self.delivered else 0
        return QueueDepth(state.delivered_seq, last, min(gone, last - state.delivered_seq - state.pending))

    def synced(self, stored: int, state: QueueState, asked: "QueueDepth") -> "QueueDepth":
        """The server answered: `stored` is the stream's last sequence, read before `state`, and `asked` is what was
        known before both. Requests that were stored and are neither delivered nor pending are missing."""
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
        """Return its load now, including the requests that it has just pulled."""
        load = self.load()
        return msgspec.structs.replace(
            load, tokens=load.tokens + sum(len(request.prompt) for request in requests)
        )
