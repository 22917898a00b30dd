"""The prefill queue: prefill requests to prefill workers, answers back, and cancellations.

One queue per model. A request is delivered to one prefill worker at a time, and at least once: it is delivered again if
its worker neither acks nor reports progress for `ack_wait` seconds. Answers and cancellations are delivered at most
once, and only to processes that listen: wait for them with a timeout.
"""

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping

from pdserve.contract.messages import (
    PrefillAnswer,
    PrefillLoad,
    PrefillPrefixes,
    PrefillRequest,
    QueueState,
    ToPrefill,
)
from pdserve.queue.depth import Puller
from pdserve.runtime.tasks import Lifetime


class Delivery:
    """A prefill request that this worker has until `ack`. Instances of this class itself are warm-ups, which bypass the
    queue and need no ack."""

    def __init__(self, request: PrefillRequest, queued: float = 0.0, *, redelivered: bool = False) -> None:
        self.request = request
        self.redelivered = redelivered
        """true if a worker had the request before and did not ack it"""
        self.queued = queued
        """seconds in the queue, by the server's clock; 0 if the server does not report its time"""
        self.state: QueueState | None = None
        """the queue's state after the pull, for `PrefillStarted`"""
        self.deadline = time.monotonic() + request.timeout - queued
        """monotonic time until which the decode worker waits for the answer"""

    async def ack(self) -> None:
        """The request is finished or has failed: never deliver it again. During an outage this raises nothing, and the
        ack is sent when the server is back."""

    async def in_progress(self) -> None:
        """The worker still computes the request: restart `ack_wait`."""

    async def give_back(self) -> None:
        """Deliver the request to another worker at once."""


class PrefillQueue(Lifetime):
    """A process's connection to the queue of one model. It reconnects in the background. While the server is away,
    entering succeeds, iterators wait, and methods raise QueueUnavailable unless they say otherwise."""

    max_payload: int = 1 << 20
    """maximum size of a message in bytes, as the server last reported"""

    @abstractmethod
    def bind(self, fingerprint: str) -> None:
        """Use the queue of the workers with this fingerprint. Workers of another fingerprint never see its requests.
        Call it before entering."""

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
        """Number of requests queued and not yet delivered, known without asking the server. Requests may count for
        some seconds after their deadline."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of requests that wait for a prefill worker: `stored` ones, and those that decode workers `hold`."""

    @property
    @abstractmethod
    def loads(self) -> Mapping[str, tuple[PrefillLoad, float]]:
        """By prefill worker's id: the load that it sent last, and the monotonic time of its arrival. Workers that have
        ended may stay for a while."""

    # decode side

    @abstractmethod
    def hold(self, requests: int) -> None:
        """Report that this process holds back `requests` requests. Other processes hear it within some 100 ms."""

    @abstractmethod
    async def publish(self, request: PrefillRequest) -> None:
        """Return when the server has stored the request. Raises QueueFull, and QueueUnavailable also if the server did
        not confirm in time. An unconfirmed request is withdrawn when the server is back."""

    @abstractmethod
    def answers(self, instance: str) -> AsyncIterator[PrefillAnswer]:
        """Yield the answers to the requests of decode worker `instance`. The queue state in an answer first updates
        `depth` and `loads`. Undecodable answers are logged and skipped."""

    @abstractmethod
    async def cancel(self, request_ids: list[str]) -> None: ...

    @abstractmethod
    async def address(self, worker: str, request: PrefillRequest) -> None:
        """Send a request to this prefill worker, bypassing the queue. It arrives at most once, and not at all if the
        worker does not listen yet."""

    @abstractmethod
    def prefixes(self) -> AsyncIterator[PrefillPrefixes]:
        """Yield the reports of the prefill workers' prefix caches from now on."""

    @abstractmethod
    async def listens(self, worker: str) -> bool:
        """False if the server reports that nothing listens for requests to this prefill worker, else true.
        Raises TimeoutError if the worker does not answer in time."""

    # prefill side

    @abstractmethod
    async def expect_addressed(self, instance: str) -> None:
        """Listen for the requests that `address` sends to prefill worker `instance` after the return. Does not fail
        while the server is away: then listening begins when the server is back."""

    @abstractmethod
    def addressed(self, instance: str) -> AsyncIterator[PrefillRequest]:
        """Yield the requests that `address` sent to prefill worker `instance`. Undecodable ones are logged and
        skipped."""

    @abstractmethod
    async def report_prefixes(self, changed: PrefillPrefixes) -> None:
        """Send all decode workers a change of this prefill worker's prefix cache."""

    @abstractmethod
    async def pull(self, limit: int, wait: float, worker: Puller | None = None) -> list[Delivery]:
        """Return up to `limit` queued requests. If there are none, wait up to `wait` seconds for one. Requests past
        their deadline, and cancelled ones, are acked and left out. Reports the new queue state and the load of `worker`
        to decode workers (`reports.py`)."""

    @abstractmethod
    def load_changed(self, worker: Puller) -> None:
        """Report the load of `worker` as a pull does. Call it when `worker` got a request that bypassed the queue."""

    @abstractmethod
    async def answer(self, instance: str, answer: PrefillAnswer) -> None: ...

    @abstractmethod
    def notices(self) -> AsyncIterator[ToPrefill]:
        """Yield the cancellations, which all prefill workers of the model get."""
