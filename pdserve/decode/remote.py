"""Remote prefill, seen from the decode worker: ask, wait within a bound, and believe nothing unchecked."""

import asyncio
import logging
import time

from pdserve.decode.patience import Patience
from pdserve.decode.requests import Request, Requests
from pdserve.engine.base import Engine
from pdserve.engine.handles import check_handle, expired
from pdserve.errors import ProtocolError, QueueUnavailable
from pdserve.messages import (
    Instance,
    KvHandle,
    PrefillAnswer,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Role,
)
from pdserve.observe.metrics import REMOTE_PREFILL_FAILURES
from pdserve.queue.base import PrefillQueue
from pdserve.registry.view import View

log = logging.getLogger(__name__)

CANCELLED = "cancelled"
"""resolves the wait of a request that its client no longer wants"""


class NoHandle(Exception):
    """Remote prefill came to nothing; `reason` is a metric's label."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class RemotePrefill:
    def __init__(
        self, instance: str, engine: Engine, queue: PrefillQueue, view: View, requests: Requests
    ) -> None:
        self._instance = instance
        self._engine = engine
        self._queue = queue
        self._view = view
        self._requests = requests
        self._patience = Patience()

    def workers(self) -> list[Instance]:
        return [one for one in self._view.instances(role=Role.PREFILL) if not one.draining]

    async def handle(self, request: Request) -> KvHandle | None:
        """The KV of the request's prompt, checked; None where it has to be computed here (counted and
        logged) or the request was cancelled meanwhile."""
        request.answer = asyncio.get_running_loop().create_future()
        try:
            return await self._ask(request)
        except NoHandle as failure:
            if failure.reason != CANCELLED:
                REMOTE_PREFILL_FAILURES.labels(failure.reason).inc()
                log.warning("request %s: remote prefill failed (%s), prefilling locally", request.id, failure)
            if failure.reason in (CANCELLED, "timeout"):
                await self._withdraw(request.id)
            return None

    async def _ask(self, request: Request) -> KvHandle:
        assert request.answer is not None
        submit = request.submit
        bound = self._patience.bound(len(submit.prompt), self._queue.depth, len(self.workers()))
        deadline = min(submit.deadline, time.time() + bound)
        message = PrefillRequest(
            submit.request_id,
            self._instance,
            submit.prompt,
            deadline,
            self._engine.facts.block_size,
            submit.body,
        )
        try:
            await self._queue.publish(message)
        except QueueUnavailable as error:
            raise NoHandle("queue-down", str(error)) from error
        try:
            answer = await asyncio.wait_for(request.answer, max(0.0, deadline - time.time()))
        except TimeoutError:
            raise NoHandle("timeout", f"no answer within {bound:.1f} s") from None
        if isinstance(answer, str):
            raise NoHandle(answer)
        if isinstance(answer, PrefillFailed):
            raise NoHandle(answer.reason, f"{answer.reason}: {answer.message}")
        self._patience.observe(len(submit.prompt), answer.compute_seconds)
        return await self._check(answer.handle, len(submit.prompt))

    async def _check(self, handle: KvHandle, prompt_tokens: int) -> KvHandle:
        if not self._known(handle):
            raise NoHandle("unknown-engine", f"{handle.engine_id} is not a live prefill worker")
        try:
            check_handle(handle, prompt_tokens, self._engine.facts.block_size)
        except ProtocolError as error:
            await self._engine.reject(handle)
            raise NoHandle("expired" if expired(handle) else "invalid", str(error)) from error
        return handle

    def _known(self, handle: KvHandle) -> bool:
        return any(one.id == handle.engine_id for one in self._view.instances(role=Role.PREFILL))

    async def _withdraw(self, request_id: str) -> None:
        try:
            await self._queue.cancel([request_id])
        except QueueUnavailable:
            log.info("request %s: could not be taken back from the queue; its deadline will", request_id)

    async def read_answers(self) -> None:
        """Hand each answer to the request that waits for it, for ever; what nobody waits for is rejected,
        so that its blocks are free at once and not at the end of their lease."""
        async for answer in self._queue.answers(self._instance):
            await self._deliver(answer)

    async def _deliver(self, answer: PrefillAnswer) -> None:
        request = self._requests.get(answer.request_id)
        if request is not None and request.resolve(answer):
            return
        if isinstance(answer, PrefillDone) and self._known(answer.handle):
            log.info("request %s: late answer of %s rejected", answer.request_id, answer.handle.engine_id)
            await self._engine.reject(answer.handle)
        else:
            log.info("request %s: late answer ignored", answer.request_id)

    def give_up_if_alone(self) -> None:
        """With no prefill worker left nobody will answer: end all waits now."""
        if not self._view.instances(role=Role.PREFILL):
            for request in self._requests:
                request.resolve("no-prefill-worker")
