"""When a decode worker publishes a prompt to the prefill queue, which is first come, first served for all clients.

It publishes as much as keeps the prefill workers busy, and holds the other prompts, in turn round the clients. So a
prompt waits in the queue behind about one other for each prefill worker, and not behind all that another client sent
before. Held prompts, without spare ones, count in the queue's depth, at all workers;
in that which decides about a prompt, only those before it. A client's only prompt may pass what it finds there: a
prefill worker takes it first (`PrefillRequest.behind`)."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from pdserve.contract.slo import is_flex
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.requests import DecodeRequest
from pdserve.decode.scheduling.fair_order import FairOrder
from pdserve.decode.scheduling.prefill_times import FIRST_TOKEN_SECONDS
from pdserve.queue.base import PrefillQueue

AHEAD = 0.05
"""seconds' worth of each prefill worker's prompts to have in the queue, where they are shorter than one: the next ones
come only after a pull was reported, to a process that may be busy"""
LOOK = 0.05
"""seconds between two looks while prompts are held: what other decode workers published may have been pulled"""


def enough(queued: int, own: Iterable[int], tokens: int, workers: int, token_seconds: float) -> bool:
    """Whether the prefill workers are busy without one more prompt, of `tokens`. `queued`: prompts in the queue; `own`:
    the tokens of this decode worker's among them, of which it always has one there. Pure."""
    prompts = list(own)
    queued = max(queued, len(prompts))
    if not prompts or queued < workers:
        return False
    seconds = (sum(prompts) * queued / len(prompts) + tokens) * token_seconds
    return seconds > AHEAD * workers


class PrefillTurns:
    def __init__(
        self, queue: PrefillQueue, workers: PrefillWorkers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue, self._workers, self._clock = queue, workers, clock
        self._held: FairOrder[DecodeRequest] = FairOrder()
        self._out: dict[DecodeRequest, int] = {}
        """which were published and are not over, each with its `behind`"""
        self._holds = asyncio.Event()

    async def wait(self, request: DecodeRequest, bound: Callable[[int], float]) -> bool:
        """Wait until the prompt may be published, or nothing awaits its answer any more. Return False where no prefill
        worker was heard of for as long as the prompts that wait may take (`bound` of their number). That may become
        longer meanwhile: other clients' prompts have their turns between."""
        assert request.answer is not None
        request.turn = asyncio.get_running_loop().create_future()
        self.add(request)
        if request.turn.done():
            return True
        ends: set[asyncio.Future[Any]] = {request.turn, request.answer}
        while not request.turn.done() and request.awaits:
            since, seconds = time.monotonic(), bound(max(self._queue.depth, len(self._held)))
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            now = time.monotonic()
            if now >= request.deadline or (now >= since + seconds and not self._workers.heard_since(since)):
                return request.turn.done()
        request.hops.published(time.monotonic())
        return True

    def add(self, request: DecodeRequest) -> None:
        """Set the request's `turn` when it may be published."""
        needs = len(request.submit.prompt) * self._token_seconds()
        self._held.add(request.submit.client, request, request.due, needs)
        self.look()

    def ahead(self, client: str) -> int:
        """How many of the queue's prompts have their turn before a new one of this client, as far as is known here. For
        a spare one none counts: it waits, since computed by the decode worker it would stall streams."""
        return 0 if is_flex(client) else self._queue.depth - self._held.after(client)

    def over(self, request: DecodeRequest) -> None:
        """The request waits no longer."""
        self._held.remove(request.submit.client, request)
        self._out.pop(request, None)
        self.look()

    def behind(self, request: DecodeRequest) -> int:
        """`PrefillRequest.behind`"""
        return self._out.get(request, 0)

    def look(self) -> None:
        """Let those publish whose turn it is. To be called when a prompt was pulled."""
        now = self._clock()
        while (request := self._held.first(now)) and (self._may_publish(request) or self._may_pass(request)):
            self._held.pop(now)
            client = request.submit.client
            self._out[request] = self._of(client) + is_flex(client)
            if request.turn is not None and request.awaits:
                request.turn.set_result(None)
        self._queue.hold(self._held.ordinary)
        (self._holds.set if self._held else self._holds.clear)()

    def _may_publish(self, request: DecodeRequest) -> bool:
        workers, tokens = len(self._workers.available()), len(request.submit.prompt)
        if not self._queue.connected or not workers:
            return True  # it is computed here then
        if is_flex(request.submit.client):  # one at a time: few prompts can pass what is published
            alone = all(out.prefiller and not is_flex(out.submit.client) for out in self._out)
            return alone and not self._queue.stored
        own = [len(out.submit.prompt) for out in self._waiting()]
        return not enough(self._queue.stored, own, tokens, workers, self._token_seconds())

    def _may_pass(self, request: DecodeRequest) -> bool:
        """Whether its client has no other prompt there, and all that was published and waits is of clients that do."""
        client = request.submit.client
        return not (is_flex(client) or self._of(client)) and all(self._out[out] for out in self._waiting())

    def _waiting(self) -> list[DecodeRequest]:
        """Published, and not known to be pulled; without spare ones."""
        return [out for out in self._out if not (out.prefiller or is_flex(out.submit.client))]

    def _of(self, client: str) -> int:
        return sum(out.submit.client == client for out in self._out)

    def _token_seconds(self) -> float:
        """Of the fastest prefill worker."""
        loads = (self._queue.loads.get(worker.id) for worker in self._workers.available())
        known = (load.token_seconds for load, _ in filter(None, loads) if load.token_seconds)
        return min(known, default=FIRST_TOKEN_SECONDS)

    async def watch(self) -> None:
        """Look again and again while prompts are held, for ever."""
        while True:
            await self._holds.wait()
            await asyncio.sleep(LOOK)
            self.look()
