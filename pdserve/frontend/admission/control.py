"""Admission control of one model: a bounded fair queue in front of the decode workers. Requests wait in it, before any
work is done for them, until the workers have capacity.

Each sequence that a request generates (n, several prompts) needs a permit. The first permit lets the HTTP request in.
The engine core requests the further ones when the prompt is tokenized. `FairQueue` orders all permits. A request that
is expected to miss its deadline is refused. A full queue refuses its last request that is not admitted.
Reasons: docs/decisions/0006-overload.md.

A running sequence may be paused for a client that runs far fewer sequences than its own (`is_short`). A sequence whose
client does not read may be paused for any client. docs/decisions/0046-places-of-others.md.

Flex requests have a queue of their own. They start only while no other request waits, and pause for any that does.
docs/decisions/0083-batches.md.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from weakref import WeakValueDictionary

from pdserve.config.schema import AdmissionLimits
from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.admission.fair_queue import FairQueue, is_short
from pdserve.frontend.admission.granted import Admission, GrantedPermits, ModelReplaced, SequencePermit
from pdserve.frontend.admission.wait_estimate import (
    AdmissionRate,
    RequestEstimate,
    RequestSize,
    retry_after,
    seconds_of_turns,
    seconds_too_late,
)
from pdserve.util.errors import BadRequest, Overloaded

GROUP = 8
"""A request gets finish tags for at most this many sequences at once. Further ones queue behind its client's other
requests."""


class AdmissionControl:
    """Call `leave` at the end of each request that `enter` or `bypass` returned, and `advance` whenever the capacity
    may have grown. `capacity` is called before each grant."""

    def __init__(
        self,
        limits: AdmissionLimits,
        capacity: Callable[[], Capacity],
        estimate: Callable[[], RequestEstimate],
    ) -> None:
        self.limits = limits
        """may be changed at any time"""
        self.queue: FairQueue[Admission] = FairQueue()
        self.flex_queue: FairQueue[Admission] = FairQueue()
        self._capacity = capacity
        self._estimate = estimate
        self._rate = AdmissionRate()
        self._inside: set[Admission] = set()
        """Admitted requests that have not ended."""
        self._starting: set[Admission] = set()
        """Admitted requests whose first permit is unused: the capacity does not reflect them."""
        self._granted = GrantedPermits()
        self._left = asyncio.Event()
        self.tokenizing = asyncio.Lock()
        self._long_texts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """by client"""

    def __len__(self) -> int:
        """Requests in the queue, without flex requests."""
        return len(self.queue)

    @property
    def requests(self) -> int:
        """Waiting and admitted requests, without those that bypassed the queue."""
        waiting = sum(admission.waiting for admission in chain(self.queue, self.flex_queue))
        return waiting + sum(bool(admission.size.sequences) for admission in self._inside)

    # requests

    def enter(self, client: str, size: RequestSize, deadline: float, *, is_flex: bool = False) -> Admission:
        """Queue a request that needs a decode worker, and admit it at once if there is capacity. Raises Overloaded, and
        BadRequest for a request with too many sequences."""
        if size.sequences > self.limits.max_outputs:
            made = "items make" if size.several == "items" else "n and prompts make"
            text = f"{made} {size.sequences} outputs; one request may have {self.limits.max_outputs}"
            raise BadRequest(text, "n" if size.n > 1 else size.several)
        self._check_inside(is_flex=is_flex)
        queue = self.flex_queue if is_flex else self.queue
        admission = Admission(
            client, control=self, queue=queue, size=size, deadline=deadline, is_flex=is_flex
        )
        prompt = (1 + size.prompt_tokens + size.logprobs) / size.sequences
        admission.tokens = prompt + self._estimate().tokens(size.max_tokens)
        queue.tag(admission, min(GROUP, size.sequences))
        self._push(admission)
        self.advance()
        if admission.waiting and not is_flex:
            admission.queued = True
            self._check_wait(admission)
        if admission.waiting:
            self._check_bounds(admission)
        return admission

    def bypass(self, client: str) -> Admission:
        """Admit a request that needs no decode worker. Raises Overloaded."""
        self._check_inside()
        size = RequestSize(0, None, sequences=0)
        admission = Admission(client, control=self, queue=self.queue, size=size, deadline=math.inf)
        self._inside.add(admission)
        admission.decide()
        return admission

    def leave(self, admission: Admission) -> None:
        """End the request, admitted or not."""
        self._withdraw(admission)
        if admission.unused:
            admission.unused = False
            admission.queue.finish(admission.client)
        self._inside.discard(admission)
        self._starting.discard(admission)
        for permit in list(admission.requested):
            permit.drop()
        self._left.set()
        self.advance()

    @asynccontextmanager
    async def long_text(self, client: str) -> AsyncIterator[None]:
        """Hold while the long text of a tokenization request is tokenized. Only one runs at a time, round-robin over
        clients, because each takes seconds of the threads that also tokenize prompts."""
        async with self._long_texts.setdefault(client, asyncio.Lock()), self.tokenizing:
            yield

    def redirect(self) -> None:
        """Send the requests that still wait for admission, in their order, to the model that replaces this one."""
        for admission in [admission for admission in chain(self.queue, self.flex_queue) if admission.waiting]:
            self._withdraw(admission)
            admission.decide(ModelReplaced())

    async def idle(self) -> None:
        """Wait until all requests have ended."""
        while self.queue or self.flex_queue or self._inside:
            self._left.clear()
            await self._left.wait()

    def advance(self) -> None:
        """Grant permits while the workers have capacity or `_make_way` preempts a sequence."""
        self._update_rate()
        # a sequence was paused for this entry, and may now be ahead of it in the queue
        made_for: Admission | None = None
        while queue := self.queue or self.flex_queue:
            capacity = self._capacity()
            starting = sum(admission.tokens for admission in self._starting)
            room = capacity.free_requests > len(self._starting) and capacity.free_tokens > starting
            may = partial(self._may_start, places=self._places(capacity))
            entry = made_for if room and made_for else queue.first_short(may)
            if entry is None and (room or self._granted.any_yielding):
                entry = queue.next(capacity.max_requests, may)
            if entry is None or not (room or self._make_way(entry)):
                return
            made_for = None if room else entry
            if room:
                self._grant(entry)

    # the sequences of a request

    def request(self, permit: SequencePermit) -> None:
        admission = permit.admission
        admission.requested.append(permit)
        if admission.unused:
            admission.unused = False
            self._starting.discard(admission)
            admission.queue.put_back(admission)
            if self._may_start(admission, self._places(self._capacity())):
                admission.queue.start(admission)
                self._begin(admission.requested.popleft())
                return
        if len(admission.requested) == 1:
            admission.queued = False
            self._push(admission)
        self.advance()
        admission.queued = bool(admission.requested) and not admission.is_flex

    def release(self, permit: SequencePermit) -> None:
        admission = permit.admission
        if permit.granted:
            self._granted.remove(permit)
            admission.queue.finish(admission.client)
        elif permit in admission.requested:
            admission.requested.remove(permit)
            if not admission.requested:
                admission.queue.remove(admission)
                self._update_rate()
        elif permit in admission.paused:
            admission.paused.remove(permit)

    def yield_slots(self, count: int, there: Mapping[SequencePermit, bool]) -> None:
        """Pause up to `count` sequences of a worker, because requests wait in its engine. `there`: the worker's
        sequences, and whether each has a slot in the engine."""
        permits = [permit for permit in there if permit.admission.is_flex] or list(there)
        permits = [permit for permit in permits if there[permit]] or permits
        while count and any(map(self._pause, self._granted.to_pause(permits))):
            count -= 1

    def _places(self, capacity: Capacity) -> int:
        """Number of sequences that this frontend can run, given what other frontends run now."""
        return len(self._granted) + capacity.free_requests

    def _may_start(self, admission: Admission, places: int) -> bool:
        """Whether the request's next sequence may start. A sequence that cannot pause must leave room for others,
        unless it is its client's only one and not flex."""
        if admission.is_flex and self.queue:
            return False
        can_pause = not admission.requested or admission.requested[0].can_pause
        if can_pause or self._granted.leaves_room(places, is_flex=admission.is_flex):
            return True
        return not (admission.is_flex or admission.runs)

    def _make_way(self, entry: Admission) -> bool:
        """Preempt one sequence for the entry's next one. Return whether one was paused."""
        others = [
            permit
            for permit in self._granted
            if (other := permit.admission) is not entry
            and other.is_flex >= entry.is_flex
            and (other.unread or other.is_flex > entry.is_flex or is_short(entry.runs, other.runs))
        ]
        return any(self._pause(permit) for permit in self._granted.to_pause(others))

    def _pause(self, permit: SequencePermit) -> bool:
        if not permit.pause():
            return False
        admission = permit.admission
        self._granted.remove(permit)
        if admission.unread:
            admission.paused.append(permit)
            admission.queue.finish(admission.client)
            return True
        if admission.queued:
            self._rate.admitted(-admission.tokens, time.monotonic())
        admission.queue.remove(admission)
        admission.queue.put_back(admission)
        admission.requested.appendleft(permit)
        self._push(admission)
        return True

    def _begin(self, permit: SequencePermit) -> None:
        self._granted.add(permit)
        permit.begin()

    # in and out of the queue

    def _push(self, admission: Admission) -> None:
        if not admission.tagged:
            admission.queue.tag(admission, min(GROUP, len(admission.requested)))
        admission.queue.push(admission)
        self._update_rate()

    def _withdraw(self, admission: Admission) -> None:
        admission.queue.withdraw(admission)
        self._update_rate()

    def _grant(self, admission: Admission) -> None:
        """Grant the permit for the request's next sequence; the first one admits the request. Refuse a request that
        waited for its first permit and would now miss its deadline."""
        end = time.monotonic() + self._estimate().seconds(admission.size.max_tokens)
        if admission.waiting and admission.queued and end > admission.deadline:
            self._refuse(admission, "the request would miss its deadline: it waited too long in the queue")
            return
        admission.queue.start(admission)
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
        self._begin(permit)

    def _refuse(self, admission: Admission, why: str) -> Overloaded:
        wait, run = self._rate.seconds(self.queue.tokens, time.monotonic()), self._estimate().seconds(None)
        now = seconds_of_turns(sum(entry.tagged for entry in self.queue), self.queue.running, run)
        refusal = Overloaded(why, retry_after(wait or run, now))
        self._withdraw(admission)
        admission.decide(refusal)
        return refusal

    def _update_rate(self) -> None:
        """Time without a worker, as at the start, does not count: it says nothing about the workers' speed."""
        self._rate.set_waiting(bool(self.queue) and self._capacity().max_requests > 0, time.monotonic())

    # limits

    def _check_inside(self, *, is_flex: bool = False) -> None:
        """Raise Overloaded if too many requests are admitted. Flex requests count only if this one is flex, too."""
        most = self._capacity().max_requests + self.limits.max_waiting
        if len(self._inside) >= most and sum(is_flex or not each.is_flex for each in self._inside) >= most:
            raise Overloaded(f"too many requests are running ({len(self._inside):,})")

    def _check_wait(self, admission: Admission) -> None:
        places = self._capacity().max_requests
        if not places:
            return  # no worker: the wait is unknown
        before, estimate = self.queue.before(admission), self._estimate()
        usual, turns = estimate.seconds(None), sum(turns for _, turns in before)
        wait = self._rate.seconds(sum(tokens * turns for tokens, turns in before), time.monotonic(), usual)
        now = seconds_of_turns(turns, self.queue.running, usual)
        wait = turns / places * usual if wait is None else wait
        left, run = admission.deadline - time.monotonic(), estimate.seconds(admission.size.max_tokens)
        if late := seconds_too_late(wait, left, run, self.limits.max_wait):
            self._withdraw(admission)
            soon = None if now is None else seconds_too_late(now, left, run, self.limits.max_wait)
            raise Overloaded("the request would miss its deadline in the queue", retry_after(late, soon))

    def _check_bounds(self, admission: Admission) -> None:
        limits = self.limits
        outside = [waiting for waiting in chain(self.queue, self.flex_queue) if waiting.waiting]
        while len(outside) > limits.max_waiting or (
            self._waiting_tokens > limits.max_waiting_tokens and len(outside) > 1
        ):
            last = outside.pop()
            refusal = self._refuse(last, f"the admission queue is full ({len(outside):,} requests)")
            if last is admission:
                raise refusal

    @property
    def _waiting_tokens(self) -> float:
        """Tokens of both queues, without admitted flex requests."""
        return self.queue.tokens + sum(
            entry.tokens * entry.tagged for entry in self.flex_queue if entry.waiting
        )
