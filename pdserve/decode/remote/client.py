"""Remote prefill at the decode worker: publishes a prompt, waits for the answer with a timeout, checks its KV handle.

`answer_reader.py` handles late answers, and `decode/peers/prefill_workers.py` lost prefill workers."""

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdserve.contract.messages import KvHandle, PrefillDone, PrefillFailed, PrefillRequest, Submit, encode
from pdserve.decode.peers.links import KvLinks
from pdserve.decode.peers.prefill_workers import (
    ALONE,
    GONE,
    LOST,
    STALLED,
    UNKNOWN,
    UNREACHABLE,
    PrefillWorkers,
)
from pdserve.decode.policy.cost import PrefixChoice
from pdserve.decode.policy.decision import PrefillTimeout
from pdserve.decode.remote.publisher import PromptPublisher
from pdserve.decode.requests import CANCELLED, OWN, DecodeRequest, Outcome
from pdserve.engine.base import Engine
from pdserve.kv.handles import check_handle, prefix_hit, source
from pdserve.process.learned import MIN_MEASURED_TOKENS
from pdserve.queue.base import PrefillQueue
from pdserve.util.errors import ProtocolError, QueueFull, QueueUnavailable

logger = logging.getLogger(__name__)

BEGIN_GRACE = 0.25
"""Seconds for messages, added to the time in which a worker with the prefix must begin the prompt."""
WARM_UP_TIMEOUT = 5.0
"""Seconds that a warm-up's prefill may take. The worker may have long prompts to compute first."""
TIMEOUT, DOWN, FULL = "timeout", "queue-down", "queue-full"
"""Why no answer will come, as labels of the failure metric; `decode/peers/prefill_workers.py` has more."""
_NO_ANSWER = {
    DOWN: "NATS did not take the prompt",
    FULL: "the queue had no room for the prompt",
    LOST: "NATS lost its queue before a worker pulled the prompt",
    ALONE: "no prefill worker was left to pull the prompt",
    GONE: "{worker}, which had the prompt, is lost",
    STALLED: "the engine of {worker} stalled",
    UNREACHABLE: "the KV of {worker} cannot be read",
    UNKNOWN: "the answer came from {worker}, which is not registered",
}
OVERHEAD = 2048
"""Bytes of a PrefillRequest with its headers, without prompt and body."""


class NoHandle(Exception):
    """Raised when a remote prefill ends without KV. `reason`: `OWN`, `CANCELLED`, or a label of the failure metric."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason = reason


def _why_none(reason: str, worker: str, seconds: float) -> str:
    if text := _NO_ANSWER.get(reason):
        return text.format(worker=worker or "a prefill worker") + f" ({seconds:.1f} s)"
    return f"{f'no answer of {worker}' if worker else 'no worker pulled it'} within {seconds:.1f} s"


@dataclass(eq=False)
class RemotePrefill:
    instance: str
    engine: Engine
    queue: PrefillQueue
    workers: PrefillWorkers
    links: KvLinks
    publisher: PromptPublisher
    timeout: PrefillTimeout = field(default_factory=PrefillTimeout)

    def fits(self, submit: Submit, longest_prompt: int) -> bool:
        """Whether the request fits into a message of the queue, and its prompt into the prefill workers."""
        if len(submit.prompt) > longest_prompt:
            return False
        left = self.queue.max_payload - OVERHEAD - sum(map(len, submit.body))
        # a token id has at most 5 bytes
        return 5 * len(submit.prompt) <= left or len(encode(submit.prompt)) <= left

    async def prefill(self, request: DecodeRequest, why: str = "") -> PrefillDone | None:
        """Return the prefill worker's answer with a checked KV handle. Return None if the prompt must be prefilled
        locally or the request was cancelled. `why` is the decision's reason."""
        request.asked = time.monotonic()
        request.hops.asked(request.asked, why)
        done: PrefillDone | None = None
        try:
            done = await self._ask(request)
        except NoHandle as failure:
            self._log(request, failure)
        if request.read_ahead is not None and (
            done is None or source(request.read_ahead) != source(done.handle)
        ):
            await self.engine.drop_ahead(request.read_ahead)
        return done

    def _log(self, request: DecodeRequest, failure: NoHandle) -> None:
        if failure.reason not in (OWN, CANCELLED):
            self.links.failed(request, str(failure))
        if request.warm_up_with:
            logger.info("warm-up with %s: no KV came: %s", request.warm_up_with, failure)
        elif failure.reason == OWN:
            logger.info("request %s: no other worker is idle; prefilling locally", request.id)
        elif failure.reason != CANCELLED:
            logger.warning("request %s: remote prefill failed: %s; prefilling locally", request.id, failure)

    async def _ask(self, request: DecodeRequest) -> PrefillDone:
        tokens = len(request.submit.prompt)
        request.answer = asyncio.get_running_loop().create_future()
        try:
            if request.prefix and not await self._send_to_preferred(request, request.prefix):
                request.prefix, request.remote_tokens = None, tokens
            await self._wait_turn(request)
            if request.awaits_answer:
                await self._wait_answer(request, request.answer)
        finally:
            self.publisher.remove(request)
        now, outcome = time.monotonic(), request.answer.result()
        if not isinstance(outcome, PrefillDone):
            request.hops.ended(now)
        match outcome:
            case PrefillDone(handle=handle, compute_seconds=seconds) as done:
                request.prefiller = handle.engine_id
                request.hops.answered(handle.engine_id, done.queued, seconds, now, done.engine_queued)
                if not request.warm_up_with:  # a warm-up's prompt is too short to measure the worker's speed
                    self.timeout.learn(max(MIN_MEASURED_TOKENS, tokens - prefix_hit(handle)), seconds)
                await self._check(handle, request.submit)
                return done
            case PrefillFailed(reason=reason, message=text, engine_died=died):
                request.engines_died += died
                raise NoHandle(reason, text)
            case str(reason):
                if request.published and reason not in (DOWN, FULL):
                    await self._withdraw(request.id)
                if reason == TIMEOUT and not request.prefiller:
                    self.workers.left_untaken(request)
                raise NoHandle(reason, _why_none(reason, request.prefiller, now - request.asked))

    async def _wait_turn(self, request: DecodeRequest) -> None:
        """Wait until the prompt may be published. A prompt that bypasses the queue does not wait."""
        bypasses = request.warm_up_with or request.preferred
        if not bypasses and not await self.publisher.wait(request, partial(self._timeout_of, request)):
            request.resolve(TIMEOUT)

    async def _send_to_preferred(self, request: DecodeRequest, prefix: PrefixChoice) -> bool:
        """Send the prompt to the worker with its prefix. Return False if it does not begin the prompt."""
        request.begun = asyncio.get_running_loop().create_future()
        assert request.answer is not None
        request.published = True
        await self._publish(request, prefix.begin_within + self._timeout_of(request, 0))
        ends: set[asyncio.Future[Any]] = {request.begun, request.answer}
        within = prefix.begin_within + BEGIN_GRACE
        await asyncio.wait(ends, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        request.preferred_begun(False)
        if request.begun.result() or not request.awaits_answer:
            return True
        request.published = False
        request.hops.missed(f"{prefix.worker} did not begin it")
        return False

    async def _wait_answer(self, request: DecodeRequest, answer: asyncio.Future[Outcome]) -> None:
        bound = self._timeout_of(request, self.queue.stored)
        request.published = True
        ends = time.monotonic() + bound
        if not request.preferred:
            await self._publish(request, bound)
        await asyncio.wait({answer}, timeout=max(0.0, ends - time.monotonic()))
        request.resolve(TIMEOUT)

    def _timeout_of(self, request: DecodeRequest, ahead: int) -> float:
        tokens, workers = len(request.submit.prompt), len(self.workers.available())
        bound = WARM_UP_TIMEOUT if request.warm_up_with else self.timeout.seconds(tokens, ahead, workers)
        return min(bound, request.deadline - time.monotonic())

    async def _publish(self, request: DecodeRequest, timeout: float) -> None:
        submit = request.submit
        message = PrefillRequest(
            submit.request_id,
            self.instance,
            submit.prompt,
            timeout,
            self.engine.facts.block_size,
            submit.body,
            warm_up=bool(request.warm_up_with),
            traceparent=submit.traceparent,
            held=request.hops.held,
            reads_state=True,
            begin_within=request.prefix.begin_within if request.prefix else 0.0,
            client=submit.client if request.preferred else "",
            due=request.due - time.monotonic() if request.preferred and request.due < math.inf else None,
        )
        request.losses = self.queue.losses
        try:
            if worker := request.warm_up_with or request.preferred:
                await self.queue.address(worker, message)
            else:
                await self.queue.publish(message)
        except QueueUnavailable as error:  # no effect if an answer has come all the same
            request.resolve(FULL if isinstance(error, QueueFull) else DOWN)

    async def _check(self, handle: KvHandle, submit: Submit) -> None:
        try:
            facts, fingerprint = self.engine.facts, self.engine.kv_fingerprint(submit.body)
            check_handle(handle, len(submit.prompt), facts.block_size, fingerprint)
        except ProtocolError as error:
            await self.engine.reject(handle)
            raise NoHandle("invalid", str(error)) from error

    async def _withdraw(self, request_id: str) -> None:
        try:
            await self.queue.cancel([request_id])
        except QueueUnavailable:
            logger.info(
                "request %s: NATS is disconnected; its prompt stays queued until its timeout", request_id
            )
