"""The prefill queue seam: prefill requests out, answers and cancellations back.

One queue per model. A request is delivered to one prefill worker at a time, and at least once: it is delivered again if
its worker neither acks nor reports progress for `ack_wait` seconds. Answers and cancellations are delivered at most
once, and only to processes that listen: wait for them with a timeout.
"""

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping

from pdserve.contract.messages import PrefillAnswer, PrefillLoad, PrefillRequest, ToPrefill
from pdserve.queue.depth import Puller
from pdserve.runtime.tasks import Lifetime


class Delivery:
    """A prefill request that this worker has until `ack`. Instances of this class itself are warm-ups, which come
    beside the queue and need no ack."""

    def __init__(self, request: PrefillRequest, queued: float = 0.0, *, redelivered: bool = False) -> None:
        self.request = request
        self.redelivered = redelivered
        """true if a worker had it before and did not ack"""
        self.queued = queued
        """seconds in the queue, by the server's clock; 0 if the server does not report its time"""
        self.deadline = time.monotonic() + request.timeout - queued
        """until when the decode worker waits for the answer, in monotonic seconds of this process"""

    async def ack(self) -> None:
        """The request is done, well or not: never deliver it again. Raises nothing during an outage; the ack is sent
        when the server is back."""

    async def in_progress(self) -> None:
        """The request is still being worked on: `ack_wait` starts anew."""

    async def give_back(self) -> None:
        """Deliver the request to another worker at once."""


class PrefillQueue(Lifetime):
    """One process's side of one model's queue. While the server is away methods raise QueueUnavailable unless they say
    otherwise; iterators stay open and go on when it is back. The queue reconnects by itself: entering does not fail
    while the server is away, and the queue goes on trying in the background."""

    max_payload: int = 1 << 20
    """bytes that a message may have, as the server last reported; NATS' default before that"""

    @abstractmethod
    def bind(self, fingerprint: str) -> None:
        """Use the queue of the workers that have loaded what this fingerprint names; workers of another one never see
        its requests. To be called before entering."""

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @property
    @abstractmethod
    def losses(self) -> int:
        """How often the server is known to have lost the queued requests, which are in its memory."""

    @property
    @abstractmethod
    def stored(self) -> int:
        """Number of requests queued and not yet delivered, as known here without asking the server; those past their
        deadline count for some seconds at most."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of requests that wait for a prefill worker: those `stored`, and those that decode workers `hold`."""

    @property
    @abstractmethod
    def loads(self) -> Mapping[str, tuple[PrefillLoad, float]]:
        """By id of the prefill worker, the load that it sent with its last pull, and when that came, in monotonic
        seconds. Workers that are gone may stay in it for a while."""

    # decode side

    @abstractmethod
    def hold(self, requests: int) -> None:
        """This process holds so many requests, to publish them later. The others are told, some times a second at most;
        they count them until they hear otherwise, or nothing any more."""

    @abstractmethod
    async def publish(self, request: PrefillRequest) -> None:
        """Return when the server has stored the request. Raises QueueFull if the queue is full, and QueueUnavailable
        also if the server did not confirm in time; the request is then withdrawn when the server is back."""

    @abstractmethod
    def answers(self, instance: str) -> AsyncIterator[PrefillAnswer]:
        """Yield the answers to the requests of decode worker `instance`; undecodable ones are logged and skipped."""

    @abstractmethod
    async def cancel(self, request_ids: list[str]) -> None: ...

    @abstractmethod
    async def warm_up(self, worker: str, request: PrefillRequest) -> None:
        """Send a request to this prefill worker alone, beside the queue. It arrives at most once, and not at all if the
        worker does not listen yet."""

    @abstractmethod
    async def listens(self, worker: str) -> bool:
        """Whether this prefill worker may be there: false only where the server reports that nothing listens for its
        warm-ups. Raises TimeoutError where the worker does not answer: it hangs."""

    # prefill side

    @abstractmethod
    async def expect_warm_ups(self, instance: str) -> None:
        """Listen for the warm-ups of prefill worker `instance`: from the return on `warm_up` reaches it. Does not fail
        while the server is away."""

    @abstractmethod
    def warm_ups(self, instance: str) -> AsyncIterator[PrefillRequest]:
        """Yield the warm-ups for prefill worker `instance`; undecodable ones are logged and skipped."""

    @abstractmethod
    async def pull(self, limit: int, wait: float, worker: Puller | None = None) -> list[Delivery]:
        """Return the queued requests, up to `limit`; if there are none, wait up to `wait` seconds for one, and return
        an empty list if none comes. Requests past their deadline, and those known to be cancelled, are acked and left
        out. Sends the decode workers the new queue state and the load of `worker`."""

    @abstractmethod
    async def answer(self, instance: str, answer: PrefillAnswer) -> None: ...

    @abstractmethod
    def notices(self) -> AsyncIterator[ToPrefill]:
        """Yield the cancellations, which go to all prefill workers of the model."""
