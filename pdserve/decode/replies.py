"""Sends a decode worker's messages to its frontends, and ends requests early: after a cancellation, a failure, the
deadline, or the loss of their frontend or the engine."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter

from pdserve.contract.messages import Failed, Hello, Load, Outputs, PrefixesChanged, ToFrontend, WorkerLoad
from pdserve.contract.slo import is_flex
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.requests import CANCELLED, DecodeRequest, DecodeRequests, Phase
from pdserve.decode.scheduling.quarantine import Quarantine
from pdserve.engine.base import Engine, Output
from pdserve.process.engine_checks import may_have_killed
from pdserve.runtime.tasks import isolate_errors
from pdserve.stream.tcp import TcpStreamServer
from pdserve.util.errors import EngineDead, PeerGone, ProtocolError
from pdserve.util.ticks import tick

logger = logging.getLogger(__name__)

LOAD_INTERVAL = 0.5
"""Seconds between two reports of the load; it is sent only if it changed."""
PREEMPT_INTERVAL = 0.1
"""Seconds between two checks whether to pause a client's requests for other clients."""
PREFIX_INTERVAL = 0.25
"""Seconds between two reports of the prefix cache: a conversation's next prompt comes later than this."""
FRONTENDS = "frontends"
"""Name under which all frontends together follow the prefix cache."""
INTERNAL = "internal error in the decode worker"
"""Error text of a request that failed by a bug; it is retried at another worker."""


def choose_preemption(requests: Iterable[DecodeRequest], queued: int) -> tuple[str, int]:
    """Return a frontend, and how many of its requests to pause (0: none). The slots go to clients that have at most
    half of the largest client's running requests even with the slot. Flex requests are paused first, and no request is
    paused for them.
    `queued`: number of requests that wait for a slot in the engine. They are the last that entered the engine."""
    inside = [request for request in requests if request.phase is Phase.RUNNING]
    entered = sorted((request for request in inside if not request.has_first_step), key=attrgetter("since"))
    waiting = entered[-queued:] if queued else []
    clients = [each.submit.client for each in inside if each not in waiting or is_flex(each.submit.client)]
    running = Counter(clients)
    largest = max(running, key=lambda name: (is_flex(name), running[name]), default="")
    largest_count = math.inf if is_flex(largest) else running[largest]
    # the rule of `frontend/admission/fair_queue.py`, which does not see the requests of other frontends
    entitled = [
        place
        for place, request in enumerate(waiting, 1)
        if largest_count > 2 * running[request.submit.client] + 1 and not is_flex(request.submit.client)
    ]
    if not entitled:
        return "", 0
    where = Counter(request.frontend for request in inside if request.submit.client == largest)
    frontend = max(where, key=where.__getitem__)
    count = entitled[-1]  # the engine's queue is FIFO
    return frontend, min(count, where[frontend]) if is_flex(largest) else count


@dataclass(eq=False)
class Frontends:
    engine: Engine
    stream: TcpStreamServer
    workers: PrefillWorkers
    requests: DecodeRequests
    quarantine: Quarantine
    _load_followers: set[str] = field(default_factory=set)
    """Connected frontends that asked for the load (`Hello.follow_load`)."""
    _cache_followers: set[str] = field(default_factory=set)
    """Connected frontends that route by this worker's prefix cache."""

    async def send(self, frontend: str, message: ToFrontend) -> None:
        """Send a message; forget a frontend that is not connected any more. A warm-up has none: send nothing."""
        if not frontend:
            return
        try:
            await self.stream.send(frontend, message)
        except PeerGone:
            await self.forget(frontend)

    async def send_outputs(self, frontend: str, outputs: list[Output]) -> None:
        """Send a step's outputs in one message, or one by one if that is too large. A request fails, without a retry,
        if its own output is too large."""
        try:
            await self.send(frontend, Outputs(self.engine.pack(outputs)))
        except ProtocolError as error:
            if len(outputs) > 1:
                for output in outputs:
                    await self.send_outputs(frontend, [output])
                return
            request_id = outputs[0].request_id
            logger.warning("request %s: its output is too large: %s", request_id, error)
            await self.send(frontend, Failed(request_id, f"its output is too large: {error}", invalid=True))
            if request := self.requests.get(request_id):
                await self.cancel(request)

    async def welcome(self, frontend: str, hello: Hello, load: Load) -> None:
        if hello.follow_load:
            self._load_followers.add(frontend)
            await self.send(frontend, WorkerLoad(load))
        self._follow(frontend, hello.follow_cache)
        if hello.follow_cache:
            await self.send(frontend, self._prefixes(self.engine.prefixes.known(), [], whole=True))

    def _follow(self, frontend: str, wanted: bool) -> None:
        (self._cache_followers.add if wanted else self._cache_followers.discard)(frontend)
        self.engine.prefixes.follow(FRONTENDS, bool(self._cache_followers))

    def _prefixes(self, stored: list[bytes], gone: list[bytes], *, whole: bool = False) -> PrefixesChanged:
        prefixes = self.engine.prefixes
        return PrefixesChanged(prefixes.block_size, prefixes.stride, stored, gone, whole)

    async def report_prefixes(self) -> None:
        """Send changes of the prefix cache to the frontends that follow it, for ever."""
        while True:
            await self.requests.pause(PREFIX_INTERVAL)
            stored, gone = self.engine.prefixes.changes(FRONTENDS)
            if stored or gone:
                for frontend in list(self._cache_followers):
                    with isolate_errors("prefixes"):
                        await self.send(frontend, self._prefixes(stored, gone))

    async def preempt(self, get_load: Callable[[], Load]) -> None:
        """For ever, ask frontends to pause requests whose slots other clients need (`choose_preemption`)."""
        while True:
            await self.requests.pause(PREEMPT_INTERVAL)
            if queued := self.engine.usage.queued:
                largest, count = choose_preemption(self.requests.clients(), queued)
                if count and largest in self._load_followers:
                    await self.send(largest, WorkerLoad(get_load(), count))

    async def report_load(self, get_load: Callable[[], Load]) -> None:
        """Send changes of the load to the frontends, for ever."""
        reported = Load()
        while True:
            await self.requests.pause(LOAD_INTERVAL)
            if (load := get_load()) != reported:
                reported = load
                for frontend in list(self._load_followers):
                    with isolate_errors("load"):
                        await self.send(frontend, WorkerLoad(load))

    async def forget(self, frontend: str) -> None:
        """Cancel the requests of a frontend that is not connected any more."""
        self._load_followers.discard(frontend)
        self._follow(frontend, wanted=False)
        gone = [request for request in self.requests.of(frontend) if not request.cancelled]
        if gone:
            logger.warning("frontend %s is gone; cancelling its %d requests", frontend, len(gone))
        for request in gone:
            with isolate_errors("requests of a frontend that is gone"):
                await self.cancel(request)

    async def cancel(self, request: DecodeRequest) -> None:
        """Cancel a request. If it is not in the engine yet, `RequestRunner` sees `cancelled` and drops it."""
        request.cancelled = True
        self.quarantine.leave(request)
        if request.phase is Phase.RUNNING:
            self.requests.drop(request)
            await self.engine.cancel([request.id])
        else:
            request.resolve(CANCELLED)
            request.begins.set()

    async def end(self, request: DecodeRequest, message: str, *, retry: bool) -> None:
        """Fail a request, wherever it is, unless it is cancelled."""
        if not request.cancelled:
            request.failure = message
            await self.send(request.frontend, Failed(request.id, message, retry))
            await self.cancel(request)

    async def fail(self, request: DecodeRequest, message: str, *, retry: bool, invalid: bool = False) -> None:
        """Fail a request that the engine does not have, or no longer has."""
        request.failure = "the request is invalid" if invalid else message
        self.requests.drop(request)
        self.quarantine.leave(request)
        if not request.cancelled:
            await self.send(request.frontend, Failed(request.id, message, retry, invalid))

    async def lose(self, frontend: str, outputs: list[Output]) -> None:
        """Fail the requests of outputs that cannot be sent; another worker resumes after the tokens sent before."""
        for output in outputs:
            with isolate_errors("outputs"):
                await self.send(frontend, Failed(output.request_id, INTERNAL, retry=True))
                if request := self.requests.get(output.request_id):
                    request.failure = INTERNAL
                    await self.cancel(request)

    async def watch_deadlines(self) -> None:
        """Fail requests past their deadline, and give up remote prefills that the queue lost; for ever."""
        while True:
            await tick(1.0)
            self.workers.give_up_lost()
            for request in self.requests:
                if time.monotonic() >= request.deadline:
                    with isolate_errors("deadlines"):
                        await self.end(request, "the request's deadline passed", retry=False)

    async def engine_died(self, death: EngineDead) -> None:
        """Fail every request. Count the death for each request that may have caused it (`engines_died`)."""
        for request in self.requests.clients():
            running = request.phase is Phase.RUNNING
            blamed = death.crashed and running and may_have_killed(len(request.submit.prompt), request.since)
            died = request.engines_died + blamed
            request.failure = text = f"the engine died: {death}"
            with isolate_errors("requests of a dead engine"), suppress(PeerGone):
                self.requests.drop(request)
                await self.stream.send(
                    request.frontend, Failed(request.id, text, retry=True, engines_died=died)
                )
