"""Admission control of one model: requests wait here, before any work is done for them, until the decode workers have
capacity.

Each sequence that a request generates (n, several prompts) needs a permit. The first one lets the HTTP request in; the
engine core requests the others when the prompt is tokenized, and they are granted as capacity comes free, like those of
many requests. The order is that of `FairQueue`. A request that would be served too late is refused at once, and where
too many wait, the last one is refused. Why all of this: docs/decisions/0006-overload.md.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from pdserve.config.schema import AdmissionLimits
from pdserve.errors import BadRequest, Overloaded
from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.admission.estimate import AdmissionRate, RequestEstimate, RequestSize, seconds_too_late
from pdserve.frontend.admission.fair_queue import FairQueue, QueueEntry

GROUP = 8
"""sequences of a request that get their tags together; with more, it goes behind its client's other requests again"""


class ModelReplaced(Exception):
    """Another model has this one's name: the request has to wait for that one's workers."""


class Admission(QueueEntry):
    """One HTTP request, from its arrival to its end."""

    def __init__(self, control: "AdmissionControl", client: str, size: RequestSize, deadline: float) -> None:
        super().__init__(client)
        self.size = size
        self.deadline = deadline
        """monotonic seconds"""
        self.queued = False
        """it was not admitted at once"""
        self.unused = False
        """it has the permit that let it in, until its first sequence begins"""
        self.requested: deque[SequencePermit] = deque()
        """permits that the engine core waits for"""
        self.control = control
        self._decided = asyncio.Event()
        self._refusal: Exception | None = None

    @property
    def waiting(self) -> bool:
        """Whether it is neither admitted nor refused."""
        return not self._decided.is_set()

    async def wait(self) -> None:
        """Wait until the request may go on to the model. Raises Overloaded if it is refused, and ModelReplaced."""
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    def decide(self, refusal: Exception | None = None) -> None:
        self._refusal = refusal
        self._decided.set()

    def permit(self, begin: Callable[[], None], drop: Callable[[], None]) -> "SequencePermit":
        """A permit for one sequence; `begin` is called when it is granted, `drop` if the request ends before."""
        return SequencePermit(self, begin, drop)


@dataclass(eq=False)
class SequencePermit:
    """Permission to run one sequence at a decode worker. It must be released."""

    admission: Admission
    begin: Callable[[], None]
    drop: Callable[[], None]
    granted: bool = False
    requested: bool = False

    def request(self) -> None:
        """Queue for the permit. May call `begin` at once."""
        self.requested = True
        self.admission.control.request(self)

    def release(self) -> None:
        """Give the permit back: the sequence is over or paused, begun or not. May be called twice; the permit may be
        requested again."""
        self.requested = False
        self.admission.control.release(self)


class AdmissionControl:
    """Every request that enters or bypasses the queue must leave. `capacity` is called before each grant; call
    `advance` whenever there may be more."""

    def __init__(
        self,
        limits: AdmissionLimits,
        capacity: Callable[[], Capacity],
        estimate: Callable[[], RequestEstimate],
    ) -> None:
        self.limits = limits
        """may be changed at any time"""
        self.queue: FairQueue[Admission] = FairQueue()
        self._capacity = capacity
        self._estimate = estimate
        self._rate = AdmissionRate()
        self._inside: set[Admission] = set()
        """admitted and not over"""
        self._starting: set[Admission] = set()
        """of these, requests that no decode worker has yet, and that the capacity does not reflect"""
        self._left = asyncio.Event()
        self.tokenizing = asyncio.Lock()
        """held while a long text is tokenized that is not generated from"""
        self._long_texts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """by client"""

    def __len__(self) -> int:
        """Requests in the queue."""
        return len(self.queue)

    @property
    def requests(self) -> int:
        """Requests that wait to be admitted or are inside, without those that bypassed the queue."""
        waiting = sum(admission.waiting for admission in self.queue)
        return waiting + sum(bool(admission.size.sequences) for admission in self._inside)

    # requests

    def enter(self, client: str, size: RequestSize, deadline: float) -> Admission:
        """Queue a request that needs a decode worker, and admit it at once if there is capacity. Raises Overloaded, and
        BadRequest for a request that is always too large."""
        if size.sequences > self.limits.max_outputs:
            made = "items make" if size.several == "items" else "n and prompts make"
            text = f"{made} {size.sequences} outputs; one request may have {self.limits.max_outputs}"
            raise BadRequest(text, "n" if size.n > 1 else size.several)
        self._check_inside()
        admission = Admission(self, client, size, deadline)
        admission.tokens = (1 + size.prompt_tokens) / size.sequences + self._estimate().tokens(
            size.max_tokens
        )
        self.queue.tag(admission, min(GROUP, size.sequences))
        self._push(admission)
        self.advance()
        if admission.waiting:
            admission.queued = True
            self._check_wait(admission)
            self._check_bounds(admission)
        return admission

    def bypass(self, client: str) -> Admission:
        """Admit a request that needs no decode worker. Raises Overloaded."""
        self._check_inside()
        admission = Admission(self, client, RequestSize(0, None, sequences=0), math.inf)
        self._inside.add(admission)
        admission.decide()
        return admission

    def leave(self, admission: Admission) -> None:
        """End the request, whatever became of it."""
        self._withdraw(admission)
        if admission.unused:
            admission.unused = False
            self.queue.finish(admission.client)
        self._inside.discard(admission)
        self._starting.discard(admission)
        for permit in list(admission.requested):
            permit.drop()
        self._left.set()
        self.advance()

    @asynccontextmanager
    async def long_text(self, client: str) -> AsyncIterator[None]:
        """Hold while a long text is tokenized that is not generated from. Such texts come one after another, in turn
        round the clients: each takes seconds of the threads that also tokenize the prompts of other requests."""
        async with self._long_texts.setdefault(client, asyncio.Lock()), self.tokenizing:
            yield

    def others_wait(self, admission: Admission) -> bool:
        return any(other.client != admission.client for other in self.queue)

    def redirect(self) -> None:
        """Send all requests that are not admitted to the model that replaces this one, in their order."""
        for admission in [admission for admission in self.queue if admission.waiting]:
            self._withdraw(admission)
            admission.decide(ModelReplaced())

    async def idle(self) -> None:
        """Wait until no request waits or is inside."""
        while self.queue or self._inside:
            self._left.clear()
            await self._left.wait()

    def advance(self) -> None:
        """Grant permits as long as the workers have capacity."""
        while self.queue:
            capacity = self._capacity()
            starting = sum(admission.tokens for admission in self._starting)
            if capacity.free_requests <= len(self._starting) or capacity.free_tokens <= starting:
                return
            self._grant(self.queue.next(capacity.max_requests))

    # the sequences of a request

    def request(self, permit: SequencePermit) -> None:
        admission = permit.admission
        if admission.unused:
            admission.unused = False
            self._starting.discard(admission)
            permit.granted = True
            permit.begin()
            return
        admission.requested.append(permit)
        if len(admission.requested) == 1:
            admission.queued = False
            self._push(admission)
        self.advance()
        admission.queued = bool(admission.requested)

    def release(self, permit: SequencePermit) -> None:
        admission = permit.admission
        if permit.granted:
            permit.granted = False
            self.queue.finish(admission.client)
        elif permit in admission.requested:
            admission.requested.remove(permit)
            if not admission.requested:
                self.queue.remove(admission)
                self._update_rate()

    # in and out of the queue

    def _push(self, admission: Admission) -> None:
        if not admission.tagged:
            self.queue.tag(admission, min(GROUP, len(admission.requested)))
        self.queue.push(admission)
        self._update_rate()

    def _withdraw(self, admission: Admission) -> None:
        self.queue.withdraw(admission)
        self._update_rate()

    def _grant(self, admission: Admission) -> None:
        """Permit the request's next sequence; the first permit admits it. Refuse it if its turn is too late."""
        end = time.monotonic() + self._estimate().seconds(admission.size.max_tokens)
        if admission.waiting and admission.queued and end > admission.deadline:
            self._refuse(admission, "its turn has come too late for its deadline")
            return
        self.queue.start(admission)
        self._update_rate()
        if admission.queued:
            self._rate.admitted(admission.tokens, time.monotonic())
        if admission.waiting:
            admission.unused = True
            self._inside.add(admission)
            self._starting.add(admission)
            admission.decide()
            return
        permit = admission.requested.popleft()
        if admission.requested:
            self._push(admission)
        permit.granted = True
        permit.begin()

    def _refuse(self, admission: Admission, why: str) -> Overloaded:
        wait = self._rate.seconds(self.queue.tokens, time.monotonic())
        refusal = Overloaded(why, wait or self._estimate().seconds(None))
        self._withdraw(admission)
        admission.decide(refusal)
        return refusal

    def _update_rate(self) -> None:
        self._rate.set_waiting(bool(self.queue), time.monotonic())

    # what is too much

    def _check_inside(self) -> None:
        """Bound answers that are not read, and requests that need no worker: nothing else does."""
        if len(self._inside) >= self._capacity().max_requests + self.limits.max_waiting:
            raise Overloaded(f"{len(self._inside)} requests are being answered")

    def _check_wait(self, admission: Admission) -> None:
        places = self._capacity().max_requests
        if not places:
            return  # when a worker will come is unknown
        before = self.queue.before(admission)
        wait = self._rate.seconds(sum(tokens * turns for tokens, turns in before), time.monotonic())
        estimate, left = self._estimate(), admission.deadline - time.monotonic()
        if wait is None:
            wait = sum(turns for _, turns in before) / places * estimate.seconds(None)
        run = estimate.seconds(admission.size.max_tokens)
        if late := seconds_too_late(wait, left, run, self.limits.max_wait):
            self._withdraw(admission)
            raise Overloaded("its turn would come too late: too many requests wait", late)

    def _check_bounds(self, admission: Admission) -> None:
        limits = self.limits
        outside = [waiting for waiting in self.queue if waiting.waiting]
        while len(outside) > limits.max_waiting or (
            self.queue.tokens > limits.max_waiting_tokens and len(outside) > 1
        ):
            last = outside.pop()
            refusal = self._refuse(last, "as many requests wait as may")
            if last is admission:
                raise refusal
