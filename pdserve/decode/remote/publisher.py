"""Publishes just enough prompts to keep the prefill workers busy, and holds back the rest in a fair queue, because the
JetStream queue itself is FIFO for all clients.

So a prompt waits in the JetStream queue behind about one other for each prefill worker. Held prompts, except those of
flex requests, count in the queue's depth at all workers."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from pdserve.contract.slo import is_flex
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.requests import DecodeRequest
from pdserve.decode.scheduling.prefill_times import FIRST_TOKEN_SECONDS
from pdserve.queue.base import PrefillQueue
from pdserve.queue.prompt_queue import PromptQueue

BUFFER = 0.05
"""Seconds of work to keep in the JetStream queue for each prefill worker, because this process may be too busy to
publish the next prompt right after a pull."""
POLL_INTERVAL = 0.05
"""Seconds between two checks whether held prompts may be published."""


def are_busy(stored: int, own: Iterable[int], tokens: int, workers: int, token_seconds: float) -> bool:
    """Whether the JetStream queue has a prompt for each prefill worker and, with one more of `tokens` tokens, would
    have more than `BUFFER` seconds of work for each. `stored`: prompts in the queue; `own`: the tokens of each of this
    decode worker's prompts among them. False if `own` is empty. Pure."""
    prompts = list(own)
    stored = max(stored, len(prompts))
    if not prompts or stored < workers:
        return False
    seconds = (sum(prompts) * stored / len(prompts) + tokens) * token_seconds
    return seconds > BUFFER * workers


class PromptPublisher:
    def __init__(
        self, queue: PrefillQueue, workers: PrefillWorkers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._workers = workers
        self._clock = clock
        self._held: PromptQueue[DecodeRequest] = PromptQueue()
        self._published: set[DecodeRequest] = set()
        """Requests whose prompts are published, or about to be, and that still wait for an answer."""
        self._has_held = asyncio.Event()

    async def wait(self, request: DecodeRequest, bound: Callable[[int], float]) -> bool:
        """Wait until the prompt may be published or the request no longer awaits an answer. Return False at the
        request's deadline, or if no prefill worker sends a message for `bound(waiting prompts)` seconds."""
        assert request.answer is not None
        request.turn = asyncio.get_running_loop().create_future()
        self.add(request)
        if request.turn.done():
            return True
        ends: set[asyncio.Future[Any]] = {request.turn, request.answer}
        while not request.turn.done() and request.awaits_answer:
            since, seconds = time.monotonic(), bound(max(self._queue.depth, len(self._held)))
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            now = time.monotonic()
            if now >= request.deadline or (now >= since + seconds and not self._workers.heard_since(since)):
                return request.turn.done()
        request.hops.published(time.monotonic())
        return True

    def add(self, request: DecodeRequest) -> None:
        """Queue the request; its `turn` is set when it may be published."""
        needs = len(request.submit.prompt) * self._token_seconds()
        self._held.add(request.submit.client, request, request.due, needs)
        self.publish_next()

    def ahead(self, client: str) -> int:
        """Number of prompts, held or published, that come before a new one of this client. For a flex client it is 0,
        so that a long queue does not lead to a local prefill, which would delay other requests."""
        return 0 if is_flex(client) else self._queue.depth - self._held.behind(client)

    def remove(self, request: DecodeRequest) -> None:
        self._held.remove(request.submit.client, request)
        self._published.discard(request)
        self.publish_next()

    def publish_next(self) -> None:
        """Let held prompts be published while the prefill workers are not busy. Call it after each pull."""
        now = self._clock()
        while (request := self._held.first(now)) and self._may_publish(request):
            self._held.pop(now)
            self._published.add(request)
            if request.turn is not None and request.awaits_answer:
                request.turn.set_result(None)
        self._queue.hold(self._held.regular)
        (self._has_held.set if self._held else self._has_held.clear)()

    def _may_publish(self, request: DecodeRequest) -> bool:
        workers, tokens = len(self._workers.available()), len(request.submit.prompt)
        if not self._queue.connected or not workers:
            return True  # no prefill worker will answer, so this worker will compute the prompt
        if is_flex(request.submit.client):  # one at a time: the JetStream queue is FIFO
            idle = all(each.prefiller and not is_flex(each.submit.client) for each in self._published)
            return idle and not self._queue.stored
        own = [
            len(each.submit.prompt)
            for each in self._published
            if not (each.prefiller or is_flex(each.submit.client))
        ]
        return not are_busy(self._queue.stored, own, tokens, workers, self._token_seconds())

    def _token_seconds(self) -> float:
        """Seconds per prompt token of the fastest prefill worker."""
        loads = (self._queue.loads.get(worker.id) for worker in self._workers.available())
        known = (load.token_seconds for load, _ in filter(None, loads) if load.token_seconds)
        return min(known, default=FIRST_TOKEN_SECONDS)

    async def watch(self) -> None:
        """Publish held prompts as other decode workers' prompts are pulled, for ever."""
        while True:
            await self._has_held.wait()
            await asyncio.sleep(POLL_INTERVAL)
            self.publish_next()
