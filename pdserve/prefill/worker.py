"""The prefill worker: takes prompts from the queue as its engine has room, answers with where their KV
lies."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress

from pdserve import queue, registry
from pdserve.config.schema import Config
from pdserve.engine.base import Engine, Output
from pdserve.errors import EngineDead, ProtocolError, QueueUnavailable
from pdserve.messages import (
    Instance,
    Load,
    PrefillAnswer,
    PrefillCancel,
    PrefillConfirm,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Role,
)
from pdserve.observe.metrics import QUEUE_WAIT, serve_metrics
from pdserve.plan.slots import Slot
from pdserve.prefill.held import Held, aged
from pdserve.prefill.jobs import Job, Jobs
from pdserve.process.identity import describe, new_instance_id
from pdserve.process.lifecycle import Lifecycle
from pdserve.process.liveness import may_have_killed, watch_engine, watch_side_channel
from pdserve.process.measured import log_memory
from pdserve.process.presence import Presence
from pdserve.process.run import build_engine, run_until_signalled
from pdserve.process.self_test import self_test
from pdserve.queue.base import Delivery, PrefillQueue, Unqueued
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.tasks import forever

log = logging.getLogger(__name__)

PULL_WAIT = 5.0
"""seconds that one pull waits for a request"""
PROGRESS_INTERVAL = 5.0
"""seconds between two `in_progress` for each running request: well below any sensible ack_wait"""
TELL_INTERVAL = 0.5
"""seconds between two looks at what nobody read"""
AHEAD = 2
"""engine steps' worth of prompt tokens to have in the engine: it never waits for the next request, and what
is queued stays where another worker can take it"""


class PrefillWorker:
    """`run` is its whole life, as in the decode worker. Nothing is acked before it was answered, so that
    what dies with this process is delivered to another one."""

    def __init__(
        self,
        config: Config,
        slot: Slot,
        instance_id: str,
        engine: Engine,
        registry: Registry,
        queue: PrefillQueue,
        metrics_url: str = "",
    ) -> None:
        self.id = instance_id
        self._config = config
        self._slot = slot
        self._engine = engine
        self._registry = registry
        self._queue = queue
        self._metrics_url = metrics_url
        self._jobs = Jobs()
        self._held = Held()
        self._view = RegistryView(registry)
        self._warm_ups: dict[str, str] = {}
        """KV of warm-ups that is kept, by the handle's `request_id`, with the decode worker that is to read it"""
        self._warm_with: set[str] = set()
        self._life = Lifecycle()

    def stop(self) -> None:
        self._life.stop()

    @property
    def ready(self) -> asyncio.Event:
        return self._life.ready

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._engine)
            self._queue.bind(self._engine.facts.fingerprint)
            for seam in (self._queue, self._registry, self._view):
                await stack.enter_async_context(seam)
            log_memory(self._config, self._slot, self._engine.facts)
            await self_test(self._engine, Role.PREFILL)
            instance = describe(self._config, self._slot, self.id, self._engine.facts, "", self._metrics_url)
            self._presence = Presence(
                self._registry, instance, None, self._load, lambda: self._queue.clock_skew
            )
            await self._life.run(
                self._announce,
                [
                    self._pull(),
                    forever(self._read_warm_ups, "warm-ups"),
                    self._read_engine(),
                    forever(self._read_notices, "notices"),
                    forever(self._report_progress, "progress reports"),
                    forever(self._tell_again, "repeated answers"),
                    forever(self._presence.keep_current, "load report"),
                    watch_engine(self._engine),
                    forever(lambda: watch_side_channel(self._engine), "side channel watch"),
                ],
                self._drain,
                self._engine_died,
            )

    async def _announce(self) -> None:
        await self._queue.expect_warm_ups(self.id)
        await self._presence.warm_up(self._view, self._warm)
        await self._presence.announce()

    async def _warm(self) -> None:
        """Wait until each decode worker that is there has read the KV of a warm-up, or tried to in vain."""
        await self._jobs.until(lambda: {peer.id for peer in self._peers()} <= self._warm_with)

    def _peers(self) -> list[Instance]:
        model, ours = self._config.served_model_name, self._engine.facts.fingerprint
        announced = [peer for peer in self._view.instances(Role.DECODE, model) if not peer.draining]
        there = announced + self._view.newcomers(Role.DECODE, model)
        return [peer for peer in there if peer.fingerprint == ours]

    async def _read_warm_ups(self) -> None:
        async for request in self._queue.warm_ups(self.id):
            await self._take(Unqueued(request))

    def _load(self) -> Load:
        usage = self._engine.usage
        return Load(usage.running, usage.waiting, round(usage.kv_usage, 6), self._queue.depth)

    # taking requests

    async def _pull(self) -> None:
        """One at a time: batching prompts gains nothing once a step is full, and other workers may be
        idle. Not before this worker is registered: decode workers believe nobody else."""
        await self._life.ready.wait()
        while True:
            await self._jobs.until(self._room)
            try:
                deliveries = await self._queue.pull(1, PULL_WAIT)
            except QueueUnavailable:
                await asyncio.sleep(1.0)  # the queue reconnects by itself
                continue
            for delivery in deliveries:
                await self._take(delivery)

    def _room(self) -> bool:
        if self._life.draining:
            return False
        facts = self._engine.facts
        tokens = self._jobs.tokens
        free = facts.kv_tokens * (1.0 - self._engine.usage.kv_usage)
        return not self._jobs or (
            len(self._jobs) < facts.max_num_seqs
            and tokens < AHEAD * facts.max_batched_tokens
            and tokens + facts.max_batched_tokens < free
        )

    async def _take(self, delivery: Delivery) -> None:
        request = delivery.request
        if running := self._jobs.of_request(request.request_id):
            log.info("request %s delivered again while it runs here", request.request_id)
            running.delivery = delivery
            return
        if self._life.draining:
            await _tell_queue(delivery.give_back())
            return
        if time.monotonic() >= delivery.deadline:
            await _tell_queue(delivery.ack())
            return
        if delivery.redelivered:
            log.info("request %s: delivered again, the worker that had it did not ack it", request.request_id)
        if not request.warm_up:
            QUEUE_WAIT.observe(delivery.queued)
        if refusal := self._refusal(delivery):
            await self._answer(delivery, refusal)
            return
        job = self._jobs.add(delivery)
        try:
            await self._engine.prefill(job.engine_id, request.prompt, request.body)
        except ProtocolError as error:
            self._jobs.drop(job)
            await self._answer(delivery, PrefillFailed(request.request_id, "refused", str(error)))
        else:
            await _tell_queue(self._queue.answer(request.decode, PrefillStarted(request.request_id, self.id)))

    def _refusal(self, delivery: Delivery) -> PrefillFailed | None:
        request, facts = delivery.request, self._engine.facts
        if request.block_size != facts.block_size:
            message = f"KV blocks of {facts.block_size} tokens here, of {request.block_size} there"
            return PrefillFailed(request.request_id, "block-size", message)
        if len(request.prompt) >= min(facts.max_model_len, facts.kv_tokens):
            return PrefillFailed(request.request_id, "too-long", f"{len(request.prompt)} tokens")
        return None

    # giving answers

    async def _read_engine(self) -> None:
        while True:
            step = await self._engine.step()
            for output in step.outputs:
                if output.finished:
                    await self._finished(output)
            for request_id in step.released:
                self._held.release(request_id)
                self._warmed(request_id)
            self._jobs.changed()

    async def _finished(self, output: Output) -> None:
        job = self._jobs.of_engine(output.request_id)
        if job is not None:
            self._jobs.drop(job)
            await self._answer(job.delivery, self._outcome(job, output))
        elif output.handle is not None and (asker := self._jobs.asker_of_cancelled(output.request_id)):
            # the cancellation came too late for the engine: the decode worker will reject its KV
            await self._say(asker.decode, PrefillDone(asker.request_id, output.handle))

    def _outcome(self, job: Job, output: Output) -> PrefillAnswer:
        request = job.delivery.request
        seconds = time.monotonic() - job.started
        if output.failed or output.handle is None:
            return PrefillFailed(request.request_id, "engine", "the prefill engine failed this request")
        log.info(
            "request %s: %d tokens prefilled in %.3f s", request.request_id, len(request.prompt), seconds
        )
        return PrefillDone(request.request_id, output.handle, seconds)

    async def _answer(self, delivery: Delivery, answer: PrefillAnswer) -> None:
        """Answer, then ack: a worker that dies between the two has the prompt computed twice, and the
        second answer is rejected; the other order could lose it."""
        request = delivery.request
        if isinstance(answer, PrefillFailed):
            log.warning("request %s not prefilled: %s %s", request.request_id, answer.reason, answer.message)
        if request.warm_up:
            self._note_warm_up(request.decode, answer)
        await self._say(request.decode, answer)
        await delivery.ack()

    def _note_warm_up(self, decode: str, answer: PrefillAnswer) -> None:
        if isinstance(answer, PrefillDone):
            self._warm_ups[answer.handle.request_id] = decode
        else:
            self._warm_with.add(decode)

    def _warmed(self, released: str) -> None:
        if decode := self._warm_ups.pop(released, None):
            self._warm_with.add(decode)

    async def _say(self, decode: str, answer: PrefillAnswer) -> None:
        if isinstance(answer, PrefillDone):
            self._held.add(decode, answer)
            answer = aged(answer)
        await _tell_queue(self._queue.answer(decode, answer))

    async def _engine_died(self, death: EngineDead) -> None:
        """What the engine was computing may be what killed it: that goes back to its decode worker, and to no other
        prefill worker."""
        for job in self._jobs:
            request = job.delivery.request
            if may_have_killed(len(request.prompt), job.started):
                failed = PrefillFailed(request.request_id, "engine-died", str(death), engine_died=True)
                await _tell_queue(self._answer(job.delivery, failed))

    async def _tell_again(self) -> None:
        """Answers get lost, with NATS, with a link, with a decode worker that was away. The KV of one that
        nobody takes up would stay until the end of its lease, and only the decode worker knows that it does
        not read it: asked again, it takes the KV or rejects it (docs/decisions/0007-lost-answers.md)."""
        while True:
            await asyncio.sleep(TELL_INTERVAL)
            for decode, answer in self._held.untaken():
                log.info("request %s: nobody read its KV yet, telling %s again", answer.request_id, decode)
                await _tell_queue(self._queue.answer(decode, aged(answer)))

    async def _read_notices(self) -> None:
        async for notice in self._queue.notices():
            match notice:
                case PrefillCancel(request_ids):
                    await self._cancel(request_ids)
                case PrefillConfirm(worker=worker) if worker == self.id:
                    await self._confirm(notice)

    async def _cancel(self, request_ids: list[str]) -> None:
        jobs = [job for request_id in request_ids if (job := self._jobs.of_request(request_id))]
        for job in jobs:
            self._jobs.cancel(job)
        await self._engine.cancel([job.engine_id for job in jobs])
        for job in jobs:
            await _tell_queue(job.delivery.ack())

    async def _confirm(self, confirm: PrefillConfirm) -> None:
        kept = self._held.get(confirm.held)
        answer: PrefillAnswer = PrefillFailed(confirm.request_id, "expired", "its KV is kept no longer")
        if kept is not None:
            answer = aged(kept, confirm.token)
        await _tell_queue(self._queue.answer(confirm.decode, answer))

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            for job in self._jobs:
                await _tell_queue(job.delivery.in_progress())

    async def _drain(self) -> None:
        """Running prompts finish, then the decode workers get until the end of the lease to pull the last
        blocks."""
        log.info("draining: %d prompts to finish", len(self._jobs))
        await self._presence.drain()
        try:
            async with asyncio.timeout(self._config.drain_timeout):
                await self._jobs.until(lambda: not self._jobs)
                await self._held.empty()
        except TimeoutError:
            log.warning("leaving %d prompts to another worker", len(self._jobs))


async def _tell_queue(message: Awaitable[None]) -> None:
    """While the queue is away nothing needs to be said: what was not acked is delivered again, and an answer
    whose KV nobody read is said again."""
    with suppress(QueueUnavailable):
        await message


async def main(config: Config, slot: Slot) -> None:
    """The process. Returns after SIGTERM and the drain; raises EngineDead."""
    assert config.etcd is not None
    assert config.nats is not None
    instance_id = new_instance_id(slot)
    with serve_metrics(config.host) as url:
        worker = PrefillWorker(
            config,
            slot,
            instance_id,
            build_engine(config, slot, instance_id),
            registry.connect(config.etcd, config.namespace, patient=True),
            queue.connect(config.nats, config.namespace, config.served_model_name),
            url,
        )
        await run_until_signalled(worker, config.drain_timeout)
