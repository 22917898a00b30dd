"""The prefill worker: pulls prompts when its engine has capacity, answers with where their KV lies.

`_pull`, `_take`, `_read_engine` and `_finished` are the path of a request. Nothing is acked before it was answered, so
that what dies with this process is delivered to another worker."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from pdserve.engine.base import Output
from pdserve.errors import EngineDead, ProtocolError, QueueUnavailable
from pdserve.messages import (
    PrefillAnswer,
    PrefillCancel,
    PrefillConfirm,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
)
from pdserve.observe.metrics import QUEUE_WAIT
from pdserve.prefill.answers import AnswerSender, unless_away
from pdserve.prefill.running import RunningPrefill, RunningPrefills
from pdserve.process.engine_checks import may_have_killed, watch_side_channel
from pdserve.process.worker import EngineWorker
from pdserve.queue.base import Delivery
from pdserve.records import Role
from pdserve.tasks import forever

log = logging.getLogger(__name__)

PULL_WAIT = 5.0
"""seconds that one pull waits for a request"""
PROGRESS_INTERVAL = 5.0
"""seconds between two `in_progress` for each running request: well below any sensible ack_wait"""
AHEAD = 2
"""engine steps' worth of prompt tokens to have in the engine: it never waits for the next request, and what
is queued stays where another worker can take it"""


class PrefillWorker(EngineWorker):
    def _assemble(self) -> None:
        self._running = RunningPrefills()
        self._answers = AnswerSender(self._queue)

    # its life

    def permanent(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [
            *super().permanent(),
            self._pull(),
            self._read_engine(),
            forever(self._read_warm_ups, "warm-ups"),
            forever(self._read_notices, "notices"),
            forever(self._report_progress, "progress reports"),
            forever(self._answers.repeat, "repeated answers"),
            forever(lambda: watch_side_channel(self._engine), "side channel watch"),
        ]

    async def warm_up(self) -> None:
        await self._queue.expect_warm_ups(self.id)
        await self._presence.warm_up(self.view, lambda: self._answers.warm(self._decode_workers))

    def _decode_workers(self) -> set[str]:
        """Those that may read KV of this worker, ready or not yet."""
        model, ours = self._config.served_model_name, self._engine.facts.fingerprint
        announced = [worker for worker in self.view.instances(Role.DECODE, model) if not worker.draining]
        workers = announced + self.view.newcomers(Role.DECODE, model)
        return {worker.id for worker in workers if worker.fingerprint == ours}

    async def drain(self) -> None:
        """Running prompts finish, then the decode workers get until the end of the lease to pull the last
        blocks."""
        log.info("draining: %d prompts to finish", len(self._running))
        await self._presence.drain()
        try:
            async with asyncio.timeout(self._config.drain_timeout):
                await self._running.until(lambda: not self._running)
                await self._answers.empty()
        except TimeoutError:
            log.warning("leaving %d prompts to another worker", len(self._running))

    async def engine_died(self, death: EngineDead) -> None:
        """What the engine was computing may be what killed it: that goes back to its decode worker, and to no other
        prefill worker."""
        for running in self._running:
            request = running.request
            if may_have_killed(len(request.prompt), running.started):
                failed = PrefillFailed(request.request_id, "engine-died", str(death), engine_died=True)
                await unless_away(self._answer(running.delivery, failed))

    # from the queue to the engine

    async def _pull(self) -> None:
        """One request at a time: batching prompts gains nothing once a step is full, and other workers may be
        idle. Not before this worker is registered: decode workers believe no other."""
        await self._presence.announced.wait()
        while True:
            await self._running.until(self._has_capacity)
            try:
                deliveries = await self._queue.pull(1, PULL_WAIT)
            except QueueUnavailable:
                await asyncio.sleep(1.0)  # the queue reconnects by itself
                continue
            for delivery in deliveries:
                await self._take(delivery)

    def _has_capacity(self) -> bool:
        if self.draining:
            return False
        facts, tokens = self._engine.facts, self._running.tokens
        free = facts.kv_tokens * (1.0 - self._engine.usage.kv_usage)
        return not self._running or (
            len(self._running) < facts.max_num_seqs
            and tokens < AHEAD * facts.max_batched_tokens
            and tokens + facts.max_batched_tokens < free
        )

    async def _read_warm_ups(self) -> None:
        async for request in self._queue.warm_ups(self.id):
            await self._take(Delivery(request))

    async def _take(self, delivery: Delivery) -> None:
        request = delivery.request
        if running := self._running.of_request(request.request_id):
            log.info("request %s delivered again while it runs here", request.request_id)
            running.delivery = delivery
            return
        if self.draining:
            await unless_away(delivery.give_back())
            return
        if time.monotonic() >= delivery.deadline:
            await unless_away(delivery.ack())
            return
        if delivery.redelivered:
            log.info("request %s: delivered again, the worker that had it did not ack it", request.request_id)
        if not request.warm_up:
            QUEUE_WAIT.observe(delivery.queued)
        if refusal := self._refusal(delivery):
            await self._answer(delivery, refusal)
            return
        running = self._running.add(delivery)
        try:
            await self._engine.prefill(running.engine_id, request.prompt, request.body)
        except ProtocolError as error:
            self._running.drop(running)
            await self._answer(delivery, PrefillFailed(request.request_id, "refused", str(error)))
        else:
            await self._answers.send(request.decode, PrefillStarted(request.request_id, self.id))

    def _refusal(self, delivery: Delivery) -> PrefillFailed | None:
        request, facts = delivery.request, self._engine.facts
        if request.block_size != facts.block_size:
            message = f"KV blocks of {facts.block_size} tokens here, of {request.block_size} there"
            return PrefillFailed(request.request_id, "block-size", message)
        if len(request.prompt) >= min(facts.max_model_len, facts.kv_tokens):
            return PrefillFailed(request.request_id, "too-long", f"{len(request.prompt)} tokens")
        return None

    # from the engine to the decode workers

    async def _read_engine(self) -> None:
        while True:
            step = await self._engine.step()
            for output in step.outputs:
                if output.finished:
                    await self._finished(output)
            for request_id in step.released:
                self._answers.released(request_id)
            self._running.changed()

    async def _finished(self, output: Output) -> None:
        running = self._running.of_engine(output.request_id)
        if running is not None:
            self._running.drop(running)
            await self._answer(running.delivery, _outcome(running, output))
        elif output.handle is not None and (request := self._running.pop_cancelled(output.request_id)):
            # the cancellation came too late for the engine: the decode worker will reject its KV
            await self._answers.send(request.decode, PrefillDone(request.request_id, output.handle))

    async def _answer(self, delivery: Delivery, answer: PrefillAnswer) -> None:
        """Answer, then ack: a worker that dies between the two has the prompt computed twice, and the
        second answer is rejected; the other order could lose it."""
        request = delivery.request
        if isinstance(answer, PrefillFailed):
            log.warning("request %s not prefilled: %s %s", request.request_id, answer.reason, answer.message)
        await self._answers.send(request.decode, answer, warm_up=request.warm_up)
        await delivery.ack()

    # beside the path

    async def _read_notices(self) -> None:
        async for notice in self._queue.notices():
            match notice:
                case PrefillCancel(request_ids):
                    await self._cancel(request_ids)
                case PrefillConfirm(worker=worker) if worker == self.id:
                    await self._answers.confirm(notice)

    async def _cancel(self, request_ids: list[str]) -> None:
        found = [running for name in request_ids if (running := self._running.of_request(name))]
        for running in found:
            self._running.cancel(running)
        await self._engine.cancel([running.engine_id for running in found])
        for running in found:
            await unless_away(running.delivery.ack())

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            for running in self._running:
                await unless_away(running.delivery.in_progress())


def _outcome(running: RunningPrefill, output: Output) -> PrefillAnswer:
    name, tokens = running.request.request_id, len(running.request.prompt)
    seconds = time.monotonic() - running.started
    if output.failed or output.handle is None:
        return PrefillFailed(name, "engine", "the prefill engine failed this request")
    log.info("request %s: %d tokens prefilled in %.3f s", name, tokens, seconds)
    return PrefillDone(name, output.handle, seconds)
