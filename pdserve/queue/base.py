"""The prefill queue seam: prefill requests out, answers and cancellations back, model archives beside them.

One queue per model. A request is delivered to one prefill worker at a time and at least once in all: it is
delivered again when its worker neither acks nor reports progress for `ack_wait` seconds. Answers and
cancellations are at most once and reach only those that listen: to wait for one needs a timeout.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping

from pdserve.messages import PrefillAnswer, PrefillConfirm, PrefillLoad, PrefillRequest, ToPrefill
from pdserve.queue.depth import Puller
from pdserve.tasks import Lifetime


class Delivery:
    """A prefill request in this worker's hands, until `ack`. This class itself is for a warm-up, which came beside the
    queue: there is nothing to ack."""

    def __init__(self, request: PrefillRequest, queued: float = 0.0, *, redelivered: bool = False) -> None:
        self.request = request
        self.redelivered = redelivered
        """true when a worker had it before and did not ack"""
        self.queued = queued
        """seconds it waited in the queue, by the server's clock alone; 0 where the server does not tell its time"""
        self.deadline = time.monotonic() + request.timeout - queued
        """its own, in monotonic seconds of this process"""

    async def ack(self) -> None:
        """Done, whatever came of it: never deliver again. Raises nothing during an outage: the server learns
        of it when it is back."""

    async def in_progress(self) -> None:
        """Still being worked on: `ack_wait` starts anew."""

    async def give_back(self) -> None:
        """Deliver to another worker at once."""


class PrefillQueue(Lifetime):
    """One process's side of one model's queue, or of that of its workers that have loaded the same (`bind`). Every
    method raises QueueUnavailable while the server is away; iterators stay open and go on when it is back. The queue
    reconnects by itself: entering does not fail when the server is away, it goes on trying in the background."""

    @abstractmethod
    def bind(self, fingerprint: str) -> None:
        """Before entering: from here on it is the queue of the workers of this fingerprint. Others never see what is
        in it."""

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @property
    @abstractmethod
    def losses(self) -> int:
        """How often the server has lost what was queued, as far as is known here: the stream is in its memory."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Requests queued but not yet delivered, from what this process has seen: no server round trip."""

    @property
    @abstractmethod
    def loads(self) -> Mapping[str, tuple[PrefillLoad, float]]:
        """What prefill workers said of themselves when they last pulled, and when that was heard, in monotonic seconds.
        Workers that are gone may be in it for a while."""

    @property
    @abstractmethod
    def clock_skew(self) -> float | None:
        """Seconds that this process's time of day is ahead of the server's, as last measured; None where it was not."""

    @property
    @abstractmethod
    def max_payload(self) -> int:
        """Bytes that a message may have, as the server says; while it is away, as it said last."""

    # decode side

    @abstractmethod
    async def publish(self, request: PrefillRequest) -> None:
        """Returns when the server has stored the request. Raises QueueUnavailable also where that could not
        be confirmed in time (it is withdrawn when the server is back), and QueueFull where the queue is full."""

    @abstractmethod
    def answers(self, instance: str) -> AsyncIterator[PrefillAnswer]:
        """Answers to the requests of decode worker `instance`; undecodable ones are logged and skipped."""

    @abstractmethod
    async def cancel(self, request_ids: list[str]) -> None: ...

    @abstractmethod
    async def confirm(self, confirm: PrefillConfirm) -> None: ...

    @abstractmethod
    async def warm_up(self, worker: str, request: PrefillRequest) -> None:
        """Hand a request to prefill worker `worker` and no other, beside the queue: at most once, and not at all where
        it does not listen (yet)."""

    # prefill side

    @abstractmethod
    async def expect_warm_ups(self, instance: str) -> None:
        """When it returns, `warm_up` reaches this prefill worker. Does not fail where the queue is away."""

    @abstractmethod
    def warm_ups(self, instance: str) -> AsyncIterator[PrefillRequest]:
        """Those for prefill worker `instance`; undecodable ones are logged and skipped."""

    @abstractmethod
    async def pull(self, limit: int, wait: float, worker: Puller | None = None) -> list[Delivery]:
        """What is there, up to `limit` requests, or else the first that comes within `wait` seconds; empty
        when none does. Requests past their deadline, and those cancelled since this process listens, are
        acked and left out. Tells the decode workers the new queue state and the load of `worker`."""

    @abstractmethod
    async def answer(self, instance: str, answer: PrefillAnswer) -> None: ...

    @abstractmethod
    def notices(self) -> AsyncIterator[ToPrefill]:
        """Cancellations and requests to confirm, as they are sent to all prefill workers of the model."""


class BlobStore(ABC):
    """Small archives by name (a model's config, tokenizer and chat template), for frontends on other hosts."""

    @abstractmethod
    async def put(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    async def get(self, name: str) -> bytes:
        """Raises KeyError where there is none."""
