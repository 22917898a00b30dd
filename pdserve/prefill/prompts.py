"""Runs each prompt at a prefill worker: pulls it when the engine has capacity, prefills it, and answers with a KV
handle.

Read `_pull`, `_begin`, `read_step` and `_finished`, in this order. A request is acked after its answer. If this process
dies before, the queue delivers the request to another worker."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from pdserve.config.schema import Config
from pdserve.contract.messages import (
    PrefillAnswer,
    PrefillDone,
    PrefillFailed,
    PrefillProgress,
    PrefillRequest,
    PrefillStarted,
)
from pdserve.engine.base import Engine, Output, Step
from pdserve.observe.metrics import QUEUE_WAIT
from pdserve.observe.tracing import Tracer
from pdserve.prefill.addressed import AddressedPrompt
from pdserve.prefill.answer_sender import AnswerSender, readers, unless_away
from pdserve.prefill.prefix_reports import PrefixReports
from pdserve.prefill.pull_policy import TICK, DecodeLoad, Pulling
from pdserve.prefill.running import RunningPrefill, RunningPrefills, until
from pdserve.process.engine_checks import may_have_killed, watch_side_channel
from pdserve.queue.base import Delivery, PrefillQueue
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import Work, isolate_errors
from pdserve.util.errors import EngineDead, ProtocolError, QueueUnavailable, Unavailable

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL = 5.0
"""Seconds between two `in_progress` of a running prompt: well below any sensible ack_wait."""


class PromptRunner:
    def __init__(
        self,
        instance: str,
        config: Config,
        engine: Engine,
        queue: PrefillQueue,
        view: RegistryView,
        tracer: Tracer,
        decode_load: Callable[[], DecodeLoad] = DecodeLoad,
        own: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        """For role `both`: `decode_load` returns the decode half's work in the engine; `own` is called with the id of a
        pulled request that the decode half of this worker had published."""
        self.id, self._config, self._engine = instance, config, engine
        self._queue, self._view, self._own = queue, view, own
        self._running = RunningPrefills(tracer)
        self.pulling = Pulling(instance, engine, queue, self._running, decode_load)
        self._answers = AnswerSender(queue)
        self.prefix_reports = PrefixReports(instance, engine, queue, self._readers)

    def permanent(self, announced: asyncio.Event) -> Mapping[str, Work]:
        return {
            "prompts": partial(self._pull, announced),
            "addressed prompts": self._read_addressed,
            "notices": self._read_notices,
            "progress reports": self._report_progress,
            "repeated answers": self._answers.repeat,
            "side channel watch": partial(watch_side_channel, self._engine),
        }

    @property
    def tokens(self) -> int:
        """Prompt tokens that the engine has to compute."""
        return self._running.tokens

    async def warm(self) -> None:
        """Wait until enough decode workers have warmed up with this worker, or failed to (`AnswerSender.warm`)."""
        await self._answers.warm(self._readers)

    def _readers(self) -> set[str]:
        model, fingerprint = self._config.served_model_name, self._engine.facts.fingerprint
        return readers(self._view, model, fingerprint) - {self.id}

    async def drain(self) -> None:
        """Give back the waiting addressed prompts. Then wait until the running prompts are done and their KV is freed,
        at most for the drain timeout."""
        logger.info("draining: %d prompts to finish", len(self._running))
        await self.pulling.addressed.give_back()
        try:
            async with asyncio.timeout(self._config.drain_timeout):
                await until(lambda: not self._running, self._running.changed, TICK)
                await self._answers.empty()
        except TimeoutError:
            logger.warning(
                "the drain timed out: %d prompts still run; KV of finished ones may be unread",
                len(self._running),
            )

    async def engine_died(self, death: EngineDead) -> None:
        """Fail the prompts that may have killed the engine, so that no other prefill worker gets them."""
        for running in self._running if death.crashed else ():
            request = running.request
            if may_have_killed(len(request.prompt), running.started):
                failed = PrefillFailed(request.request_id, "engine-died", str(death), engine_died=True)
                self._running.trace(running, "the engine died")
                await unless_away(self._answer(running.delivery, failed))

    # from the queue to the engine

    async def _pull(self, announced: asyncio.Event) -> None:
        """Pull prompts, for ever, once this worker is registered: decode workers take no answers of unknown workers."""
        await announced.wait()
        while True:
            try:
                deliveries = await self.pulling.next()
            except QueueUnavailable:
                await asyncio.sleep(1.0)  # the queue reconnects by itself
                continue
            for delivery in deliveries:
                await self._start(delivery)

    async def _read_addressed(self) -> None:
        """Begin warm-ups at once. Prompts whose prefix is cached here wait for capacity (`addressed.py`)."""
        async for request in self._queue.addressed(self.id):
            if not request.begin_within:
                await self._start(Delivery(request))
                continue
            cached = 0
            with isolate_errors("prefix hits"):
                cached = self._cached(request)
            prompt = AddressedPrompt(request, self._queue, self.id, cached)
            if self.pulling.draining or self.pulling.stalled:
                await prompt.give_back()
            elif self.pulling.receive(prompt):
                await self._start(prompt)
                self.pulling.begun()
            self._queue.load_changed(self.pulling.puller)

    async def _start(self, delivery: Delivery) -> None:
        with isolate_errors("prompts") as one:
            await self._begin(delivery)
        if one.error is not None:  # a redelivery would cause the error at each worker
            request = delivery.request
            if running := self._running.of_request(request.request_id):
                self._running.drop(running, failed=True)
            failed = PrefillFailed(request.request_id, "refused", "internal error in the prefill worker")
            await self._answer(delivery, failed)

    async def _begin(self, delivery: Delivery) -> None:
        request = delivery.request
        if running := self._running.of_request(request.request_id):
            logger.info("request %s: delivered again while it runs", request.request_id)
            running.delivery = delivery
            return
        if self.pulling.draining or self.pulling.stalled:
            await unless_away(delivery.give_back())
            return
        if time.monotonic() >= delivery.deadline:
            await delivery.ack()
            return
        if request.decode == self.id:
            self._own(request.request_id)
            await delivery.ack()
            return
        if delivery.redelivered:
            logger.info("request %s: delivered again, because no worker acked it", request.request_id)
        if not request.warm_up and not delivery.redelivered:
            QUEUE_WAIT.labels(self._config.served_model_name).observe(request.held + delivery.queued)
        if refusal := self._refusal(delivery):
            await self._answer(delivery, refusal)
            return
        running = self._running.add(delivery)
        try:
            running.cached = self._cached(request)
            await self._engine.prefill(running.engine_id, request.prompt, request.body)
        except (ProtocolError, Unavailable) as error:
            self._running.drop(running, failed=True)
            await self._answer(delivery, PrefillFailed(request.request_id, "refused", str(error)))
        else:
            await self._answers.send(request.decode, self._started(delivery))

    def _started(self, delivery: Delivery) -> PrefillStarted:
        state = delivery.state
        if state is not None and state.worker:
            state = msgspec.structs.replace(state, load=self.pulling.load())
        return PrefillStarted(delivery.request.request_id, self.id, delivery.queued, state)

    def _cached(self, request: PrefillRequest) -> int:
        """Number of the prompt's tokens in the prefix cache. After a hit, the cache is reported for a while."""
        if hit := self._engine.prefix_hit(request.prompt, request.body) or 0:
            self.prefix_reports.last_hit = time.monotonic()
        return hit

    def _refusal(self, delivery: Delivery) -> PrefillFailed | None:
        request, facts = delivery.request, self._engine.facts
        if request.block_size != facts.block_size:
            message = f"KV blocks have {facts.block_size} tokens, the decode worker's {request.block_size}"
            return PrefillFailed(request.request_id, "block-size", message)
        if len(request.prompt) >= min(facts.max_model_len, facts.kv_tokens):
            return PrefillFailed(request.request_id, "too-long", f"{len(request.prompt)} tokens")
        return None

    # from the engine to the decode workers

    async def read_step(self, step: Step) -> None:
        """Answer the prompts that the engine has finished. Role `both`: the step also has the decode half's outputs."""
        self.pulling.measure(step.outputs)
        for kv in step.complete:
            if running := self._running.of_engine(kv.request_id):
                request = running.request
                await self._answers.send(request.decode, PrefillProgress(request.request_id, kv))
        for output in step.outputs:
            if output.finished:
                with isolate_errors("finished prompts"):
                    await self._finished(output)
        for request_id in step.released:
            self._answers.released(request_id)
        self._running.changed.set()

    async def _finished(self, output: Output) -> None:
        running = self._running.of_engine(output.request_id)
        if running is not None:
            running.begun = output.begun
            self._running.drop(running, output.failed)
            self.pulling.learn(time.monotonic() - running.started)
            await self._answer(running.delivery, self._outcome(running, output))
        elif output.handle is not None and (request := self._running.pop_cancelled(output.request_id)):
            # finished before the cancellation came: the decode worker rejects the KV
            await self._answers.send(request.decode, PrefillDone(request.request_id, output.handle))

    def _outcome(self, running: RunningPrefill, output: Output) -> PrefillAnswer:
        name, tokens = running.request.request_id, len(running.request.prompt)
        seconds = time.monotonic() - running.started
        if output.failed or output.handle is None:
            return PrefillFailed(name, "engine", "the prefill engine failed this request")
        logger.info("request %s: %d tokens prefilled in %.3f s", name, tokens, seconds)
        first = self._engine.pack([output]) if output.tokens else []
        waited = running.engine_queued
        return PrefillDone(name, output.handle, seconds, running.queued, first=first, engine_queued=waited)

    async def _answer(self, delivery: Delivery, answer: PrefillAnswer) -> None:
        """Answer, then ack. In the other order, a worker that dies between the two would lose the prompt."""
        request = delivery.request
        if isinstance(answer, PrefillFailed):
            logger.warning(
                "request %s not prefilled: %s %s", request.request_id, answer.reason, answer.message
            )
        await self._answers.send(request.decode, answer, warm_up=request.warm_up)
        await delivery.ack()

    # cancellations and progress

    async def _read_notices(self) -> None:
        async for notice in self._queue.notices():
            with isolate_errors("notices"):
                await self._cancel(notice.request_ids)

    async def _cancel(self, request_ids: list[str]) -> None:
        self.pulling.addressed.cancel(request_ids)
        cancelled = [running for name in request_ids if (running := self._running.of_request(name))]
        for running in cancelled:
            self._running.cancel(running)
        await self._engine.cancel([running.engine_id for running in cancelled])
        for running in cancelled:
            await running.delivery.ack()

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            for running in self._running:
                with isolate_errors("progress reports"):
                    await unless_away(running.delivery.in_progress())
