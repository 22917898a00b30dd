"""Remote prefill, seen from the decode worker: ask, wait within a bound, and believe nothing unchecked."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

import msgspec

from pdserve.decode.freshness import Freshness
from pdserve.decode.patience import Patience
from pdserve.decode.requests import Request, Requests
from pdserve.engine.base import Engine
from pdserve.errors import ProtocolError, QueueFull, QueueUnavailable
from pdserve.kv.handles import check_handle, expired
from pdserve.messages import (
    Instance,
    KvHandle,
    PrefillConfirm,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    PrefillStarted,
    Role,
    Submit,
    encode,
)
from pdserve.observe.metrics import REMOTE_PREFILL_FAILURES
from pdserve.queue.base import PrefillQueue
from pdserve.registry.view import RegistryView

log = logging.getLogger(__name__)

WARM_UP = 5.0
"""seconds that the prefill of a warm-up may take: that worker may have long prompts before it"""
CANCELLED = "cancelled"
"""resolves the wait of a request that its client no longer wants"""
TIMEOUT, GONE, ALONE, UNKNOWN = "timeout", "prefill-worker-gone", "no-prefill-worker", "unknown-engine"
UNREACHABLE, LOST = "unreachable", "queue-lost"
DOWN, FULL = "queue-down", "queue-full"
"""why a wait came to nothing, as the metric has it"""
LAST_WORDS = 0.2
"""seconds that a prefill worker's answers may still take when the registry has told that it is gone: they come by
another connection"""
AVOID_FOR = 30.0
"""seconds for which nothing is asked of a prefill worker whose KV could not be read; then it is tried again"""

OVERHEAD = 2048
"""bytes of a PrefillRequest and its headers beside prompt and body"""


class NoHandle(Exception):
    """Remote prefill came to nothing; `reason` is a metric's label."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class RemotePrefill:
    def __init__(
        self,
        instance: str,
        model: str,
        engine: Engine,
        queue: PrefillQueue,
        view: RegistryView,
        requests: Requests,
    ) -> None:
        self._instance = instance
        self._model = model
        self._engine = engine
        self._queue = queue
        self._view = view
        self._requests = requests
        self._patience = Patience()
        self._avoided: dict[str, float] = {}
        """prefill worker -> monotonic time until which it is avoided"""

    def workers(self) -> list[Instance]:
        """Those that take requests from this decode worker's queue, and whose KV can be read."""
        return [each for each in self._registered() if not each.draining and not self._is_avoided(each.id)]

    def avoid(self, workers: list[str]) -> None:
        """Their KV cannot be read here. Requests that one of them has, or pulls in spite of it (the queue is shared),
        are prefilled locally at once."""
        for worker in workers:
            if not self._is_avoided(worker):
                log.error("KV of %s cannot be read: avoiding it for %g s", worker, AVOID_FOR)
            self._avoided[worker] = time.monotonic() + AVOID_FOR
            for request in self._requests:
                if request.prefiller == worker:
                    request.resolve(UNREACHABLE)

    def _is_avoided(self, worker: str) -> bool:
        if (until := self._avoided.get(worker)) is None:
            return False
        if time.monotonic() >= until:
            del self._avoided[worker]
        return worker in self._avoided

    def _registered(self) -> list[Instance]:
        """The prefill workers of the same model and fingerprint, also draining ones. All others share only the
        registry."""
        ours = self._engine.facts.fingerprint
        there = self._view.instances(Role.PREFILL, self._model)
        return [worker for worker in there if worker.fingerprint == ours]

    def peers(self) -> list[Instance]:
        """The model's prefill workers, also draining ones and those that are not ready yet."""
        ours = self._engine.facts.fingerprint
        newcomers = self._view.newcomers(Role.PREFILL, self._model)
        return self._registered() + [worker for worker in newcomers if worker.fingerprint == ours]

    def fits(self, submit: Submit) -> bool:
        """Whether the queue takes a message that is as large as this request's. A token id takes 5 bytes at most."""
        left = self._queue.max_payload - OVERHEAD - sum(map(len, submit.body))
        return 5 * len(submit.prompt) <= left or len(encode(submit.prompt)) <= left

    async def handle(self, request: Request) -> KvHandle | None:
        """The KV of the request's prompt, checked; None where it has to be computed here (counted and
        logged) or the request was cancelled meanwhile."""
        request.answer = asyncio.get_running_loop().create_future()
        request.freshness = Freshness(time.monotonic())
        try:
            return await self._ask(request)
        except NoHandle as failure:
            if request.warms:
                log.info("warm-up with %s: no KV came: %s", request.warms, failure)
            elif failure.reason != CANCELLED:
                REMOTE_PREFILL_FAILURES.labels(failure.reason).inc()
                log.warning("request %s: remote prefill failed (%s), prefilling locally", request.id, failure)
            return None

    async def _ask(self, request: Request) -> KvHandle:
        assert request.answer is not None
        submit = request.submit
        bound = WARM_UP if request.warms else self._bound(len(submit.prompt))
        bound = min(bound, request.deadline - time.monotonic())
        ends = time.monotonic() + bound
        message = PrefillRequest(
            submit.request_id,
            self._instance,
            submit.prompt,
            bound,
            self._engine.facts.block_size,
            submit.body,
            warm_up=bool(request.warms),
        )
        request.losses = self._queue.losses
        try:
            if request.warms:
                await self._queue.warm_up(request.warms, message)
            else:
                await self._queue.publish(message)
        except QueueUnavailable as error:  # but it may have come through, and be answered already
            request.resolve(FULL if isinstance(error, QueueFull) else DOWN)
        await asyncio.wait({request.answer}, timeout=max(0.0, ends - time.monotonic()))
        request.resolve(TIMEOUT)
        match request.answer.result():
            case PrefillDone(handle=handle, compute_seconds=seconds):
                if not request.warms:  # too short to tell how fast a worker is
                    self._patience.observe(len(submit.prompt), seconds)
                return await self._check(handle, len(submit.prompt))
            case PrefillFailed(reason=reason, message=text, engine_died=died):
                request.engines_died += died
                raise NoHandle(reason, f"{reason}: {text}")
            case str(reason):
                if reason not in (DOWN, FULL):
                    await self._withdraw(request.id)
                pulled = f"pulled by {request.prefiller}" if request.prefiller else "not pulled"
                raise NoHandle(reason, f"{reason}; {pulled}, bound {bound:.1f} s")

    def _bound(self, tokens: int) -> float:
        return self._patience.bound(tokens, self._queue.depth, len(self.workers()))

    async def _check(self, handle: KvHandle, prompt_tokens: int) -> KvHandle:
        try:
            facts = self._engine.facts
            check_handle(handle, prompt_tokens, facts.block_size, facts.fingerprint)
        except ProtocolError as error:
            await self._engine.reject(handle)
            raise NoHandle("expired" if expired(handle) else "invalid", str(error)) from error
        return handle

    def _known(self, worker: str) -> bool:
        """Whether it is registered, be it draining or not ready yet: no other one is believed, or asked for KV."""
        return any(peer.id == worker for peer in self.peers())

    async def _withdraw(self, request_id: str) -> None:
        try:
            await self._queue.cancel([request_id])
        except QueueUnavailable:
            log.info("request %s: could not be taken back from the queue; its deadline will", request_id)

    async def read_answers(self) -> None:
        """Hand each answer to the request that waits for it, for ever."""
        async for answer in self._queue.answers(self._instance):
            request = self._requests.get(answer.request_id)
            match answer:
                case PrefillStarted(worker=worker):
                    self._started(request, worker)
                case PrefillDone():
                    await self._done(request, answer)
                case PrefillFailed() if request is not None:
                    request.resolve(answer)

    def _started(self, request: Request | None, worker: str) -> None:
        if request is None:
            return
        request.prefiller = worker
        if not self._known(worker):
            request.resolve(UNKNOWN)
        elif self._is_avoided(worker):
            request.resolve(UNREACHABLE)

    async def _done(self, request: Request | None, answer: PrefillDone) -> None:
        """KV that no request takes is rejected, so that its blocks are free at once and not at the end of their
        lease. Never KV that a live request took, since that may be being read while the answer is said again;
        and not that of an unknown worker, which says it again until it is known or the lease is over."""
        worker = answer.handle.engine_id
        if not self._known(worker):
            log.info("request %s: %s is not a live prefill worker", answer.request_id, worker)
            if request is not None:
                request.resolve(UNKNOWN)
            return
        if request is not None and self._is_avoided(worker):
            request.resolve(UNREACHABLE)
        if request is not None and request.awaits:
            if await self._doubts(request, answer):
                log.info("request %s: asked %s how old the KV of its answer is", request.id, worker)
            else:
                request.resolve(_dated(request, answer))
        elif request is None or not request.took(answer.handle):
            log.info("request %s: late answer of %s rejected", answer.request_id, worker)
            await self._engine.reject(answer.handle)

    async def _doubts(self, request: Request, answer: PrefillDone) -> bool:
        """Whether the answer may have been on its way for so long that it has to be confirmed first. Where the
        confirmation is lost, the answer is said again sooner or later, and a confirmation asked for again."""
        now, handle = time.monotonic(), answer.handle
        assert request.freshness is not None
        if not request.freshness.doubtful(answer, now):
            return False
        if token := request.freshness.confirm(now):
            confirm = PrefillConfirm(request.id, self._instance, handle.engine_id, handle.request_id, token)
            with suppress(QueueUnavailable):
                await self._queue.confirm(confirm)
        return True

    def give_up_on_the_lost(self) -> None:
        """What was queued when the server lost its queue, and no prefill worker had pulled, is done here."""
        for request in self._requests:
            if request.awaits and not request.prefiller and request.losses != self._queue.losses:
                request.resolve(LOST)

    def give_up_on_the_gone(self) -> None:
        """What a prefill worker had in its hands that is registered no longer is done here, and everything where none
        is left: after `LAST_WORDS`, since the worker may have said that its engine died of a request."""
        if lost := [request for request, _ in self._gone(self._requests)]:
            asyncio.get_running_loop().call_later(LAST_WORDS, self._give_up, lost)

    def _give_up(self, requests: list[Request]) -> None:
        for request, reason in self._gone(requests):
            request.resolve(reason)

    def _gone(self, requests: Iterable[Request]) -> Iterator[tuple[Request, str]]:
        """Those that no prefill worker will answer, with the reason. A worker that drains finishes what it has, and
        pulls no more."""
        registered, peers = self._registered(), {peer.id for peer in self.peers()}
        there = {worker.id for worker in registered}
        pulled = any(not worker.draining for worker in registered)
        for request in requests:
            if not request.awaits:
                continue
            if not request.warms and not pulled and request.prefiller not in there:
                yield request, ALONE
            elif request.prefiller and request.prefiller not in peers:
                yield request, GONE


def _dated(request: Request, answer: PrefillDone) -> PrefillDone:
    """The answer with its KV's age by this host's clock."""
    assert request.freshness is not None
    now = time.monotonic()
    computed_at = now - request.freshness.age(answer, now)
    return msgspec.structs.replace(
        answer, handle=msgspec.structs.replace(answer.handle, computed_at=computed_at)
    )
