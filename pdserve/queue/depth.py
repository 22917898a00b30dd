"""The depth of the prefill queue, which a process computes without asking the server, and the load of prefill workers.

The stream numbers the stored requests: 1, 2, 3, … A decode worker learns the sequence numbers of its own requests when
they are stored, and the queue state from prefill workers, which broadcast it with each pull.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from pdserve.contract.messages import PrefillLoad, PrefillRequest, QueueState


@dataclass(frozen=True)
class QueueDepth:
    delivered: int = 0
    """highest known sequence that was delivered to a prefill worker"""
    last: int = 0
    """highest known sequence that was stored"""
    missing: int = 0
    """requests between the two that the server no longer has: too old, or purged"""

    @property
    def value(self) -> int:
        return max(0, self.last - self.delivered - self.missing)

    def published(self, sequence: int) -> "QueueDepth":
        """Update for a request of this process that was stored. Confirmations may come out of order."""
        return replace(self, last=max(self.last, sequence))

    def reported(self, state: QueueState) -> "QueueDepth":
        """Update for a prefill worker's pull. A lower sequence than the known one is a redelivery or late, and is
        ignored. Requests stored after those that the state counts are newer than the pull, or missing: they count until
        `synced`."""
        if state.delivered_seq < self.delivered:
            return self
        last = max(self.last, state.delivered_seq + state.pending)
        gone = self.missing if state.delivered_seq == self.delivered else 0
        return QueueDepth(state.delivered_seq, last, min(gone, last - state.delivered_seq - state.pending))

    def synced(self, stored: int, state: QueueState, asked: "QueueDepth") -> "QueueDepth":
        """Update from the server: `stored` is the stream's last sequence, read before `state`, and `asked` is the depth
        before both. Requests that were stored and are neither delivered nor pending are missing."""
        end = state.delivered_seq + state.pending
        truth = QueueDepth(state.delivered_seq, max(stored, end), max(0, stored - end))
        if truth.last < asked.last or truth.delivered < asked.delivered:
            return truth  # NATS lost its data, so the stream is a new one
        if truth.delivered < self.delivered:
            return self  # a prefill worker has reported a later pull
        return replace(truth, last=max(truth.last, self.last))


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
