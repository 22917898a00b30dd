"""Runs each request at a decode worker: prefills its prompt locally or remotely, hands it to the engine, and sends its
tokens to the frontend, in one message for each engine step and frontend.

`replies.py` ends requests early."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdserve.contract.messages import Failed, KvHandle, PrefillDone, Submit
from pdserve.contract.slo import is_flex
from pdserve.decode.live_updates import LiveSettings, thresholds
from pdserve.decode.peers.links import KvLinks
from pdserve.decode.peers.prefill_prefixes import PrefillPrefixIndex
from pdserve.decode.peers.prefill_workers import PrefillWorkers, longest_prompt
from pdserve.decode.policy.decision import PREFIX, Decision, decide
from pdserve.decode.remote.client import RemotePrefill
from pdserve.decode.replies import INTERNAL, Frontends
from pdserve.decode.requests import OWN, STAND_IN, DecodeRequest, DecodeRequests, Phase
from pdserve.decode.scheduling.prefill_slots import ChunkLimit, PromptSlots
from pdserve.decode.scheduling.prefill_times import Estimator
from pdserve.decode.scheduling.quarantine import Quarantine
from pdserve.engine.base import Engine, Output, Step
from pdserve.kv.handles import prefix_hit
from pdserve.observe.metrics import PREFILL
from pdserve.queue.base import PrefillQueue
from pdserve.runtime.tasks import isolate_errors
from pdserve.util.errors import ProtocolError, Unavailable

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RequestRunner:
    """After a request's last output, `Failed` or cancellation, nothing of it is left in the queue or an engine."""

    engine: Engine
    frontends: Frontends
    queue: PrefillQueue
    workers: PrefillWorkers
    prefixes: PrefillPrefixIndex
    remote: RemotePrefill
    links: KvLinks
    requests: DecodeRequests
    settings: LiveSettings
    quarantine: Quarantine
    estimator: Estimator
    slots: PromptSlots
    chunk: ChunkLimit
    start: Callable[[Coroutine[Any, Any, None]], object]
    """Starts a task that ends with the worker, and whose failure ends the worker."""
    is_stand_in: bool = False
    """A stand-in prefills all its prompts locally."""
    is_idle: Callable[[], bool] = lambda: False
    """Role `both`: whether this worker would pull a prompt from the queue at once."""
    on_start: Callable[[], None] = lambda: None
    """Called when a request enters the engine."""

    # from a frontend to the engine

    async def submit(self, frontend: str, submit: Submit) -> None:
        if (request := self.requests.add(frontend, submit)) is None:
            await self.frontends.send(frontend, Failed(submit.request_id, "this request id was used before"))
        else:
            self.start(self._run(request))

    async def _run(self, request: DecodeRequest) -> None:
        with isolate_errors("requests") as one:
            try:
                await self._place(request)
            except (ProtocolError, Unavailable) as error:
                logger.warning("request %s refused: %s", request.id, error)
                await self.frontends.fail(request, str(error), retry=isinstance(error, Unavailable))
        if one.error is not None:
            with isolate_errors("requests"):
                await self.frontends.fail(request, INTERNAL, retry=True)

    async def _place(self, request: DecodeRequest) -> None:
        if request.cancelled:  # before this task first ran
            self.requests.drop(request)
            return
        if time.monotonic() >= request.deadline:
            text = "the deadline passed before the request was started"
            await self.frontends.fail(request, text, retry=False)
            return
        decision, done = self._decide(request), None
        if decision.mode == "remote":
            why = f"{decision.reason}: {request.prefix}" if request.prefix else decision.reason
            done = await self.remote.prefill(request, why)
            if done is None:
                decision = Decision("local", OWN if request.outcome == OWN else "fallback")
        request.remote_tokens = 0
        if not request.cancelled:
            await self.quarantine.enter(request)
        await self._enter(request, decision, done)

    async def _enter(self, request: DecodeRequest, decision: Decision, done: PrefillDone | None) -> None:
        """Report the decision, then hand the request to the engine, unless it is cancelled or has ended."""
        handle = done.handle if done is not None else None
        first = None
        if not request.cancelled:
            first = await self._report(request, decision, done)
        finished = first is not None and first.finished
        after = first.tokens if first is not None else []
        if request.cancelled or finished:
            if handle is not None:
                await self.engine.reject(handle)
        elif handle is not None:
            await self._generate(request, handle, after)
        else:
            await self._compute(request, after)
        if finished:
            await self._first_step(request)
        if request.cancelled or finished:
            self.requests.drop(request)

    async def _report(
        self, request: DecodeRequest, decision: Decision, done: PrefillDone | None
    ) -> Output | None:
        """Report to the frontend how the prompt gets its KV. Then send the token that the prefill worker sampled, if
        any. It stands even if the KV is lost."""
        request.decision = decision
        if done is not None:
            request.cached = max(request.prefix_hit, prefix_hit(done.handle))
        elif not request.local_tokens:
            request.local_tokens = len(request.submit.prompt) - request.prefix_hit
        await self.frontends.send(request.frontend, request.placed)
        if done is None or not done.first or request.cancelled:
            return None
        submit = request.submit
        first = self.engine.first_output(request.id, submit.prompt, submit.body, done.first)
        if first is not None:
            request.tokens = len(first.tokens)
            request.missed_slo = time.monotonic() > request.due
            await self.frontends.send_outputs(request.frontend, [first])
        return first

    def _decide(self, request: DecodeRequest) -> Decision:
        """Choose local or remote prefill. Estimates for later requests count this request from here on."""
        submit, settings = request.submit, self.settings.current
        prompt, depth = len(submit.prompt), self.remote.publisher.ahead(submit.client)
        if settings.remote_prefill:
            request.names = self.engine.prompt_names(submit.prompt, submit.body)
        cache = self.engine.prefixes
        request.prefix_hit = cache.hit(request.names) if request.names else 0
        hit = max(request.prefix_hit, self._under_way(request))
        workers = self.workers.available()
        estimates = None
        cached = self.prefixes.cached(request, workers)
        if settings.remote_prefill and (settings.policy == "adaptive" or cached):
            compute, ids = prompt - hit, [worker.id for worker in workers]
            estimates = self.estimator.of(request, compute, prompt, ids, cached)
        decision = decide(
            prompt,
            hit,
            depth,
            len(workers),
            self.queue.connected,
            settings,
            supported=request.names is not None,
            migrated=submit.migrated,
            fits=self.remote.fits(submit, longest_prompt(workers)),
            estimates=estimates,
        )
        if self.is_stand_in:
            decision = Decision("local", STAND_IN)
        elif decision.mode == "remote" and self.is_idle():
            decision = Decision("local", OWN)
        text = "request %s: prefill %s (%s), prompt %d, hit %d, queue %d, workers %d; %s"
        numbers = prompt, hit, depth, len(workers), estimates or thresholds(settings)
        # not logged here, because a log line would delay the first token by 0.1 ms
        log = partial(logger.info, text, request.id, decision.mode, decision.reason, *numbers)
        asyncio.get_running_loop().call_soon(log)
        if decision.mode == "remote":
            if request.prefix_hit:  # with remote KV, vLLM reads no blocks from host memory
                request.prefix_hit = cache.hit(request.names, host=False) if request.names else 0
            request.remote_tokens = prompt
            if decision.reason == PREFIX and estimates is not None and estimates.prefix is not None:
                request.prefix = estimates.prefix
                request.remote_tokens -= request.prefix.cached
        else:
            request.local_tokens = prompt - hit
        return decision

    def _under_way(self, request: DecodeRequest) -> int:
        """Return how many leading tokens of the prompt this engine computes for earlier requests."""
        if request.names is None:
            return 0
        ahead = self.estimator.requests_ahead(is_flex(request.submit.client))
        local = (each.names for each in ahead if each.local_tokens and each is not request)
        size = self.engine.prefixes.block_size
        return size * request.names.shared(filter(None, local), size)

    async def _compute(self, request: DecodeRequest, after: Sequence[int]) -> None:
        """Generate without remote KV, once it is the prompt's turn."""
        since, tokens = time.monotonic(), len(request.submit.prompt) - request.prefix_hit
        order = request.submit.client, request.due, tokens * self.estimator.local_token_seconds
        async with self.slots.take(tokens, *order, request.begins) as waited:
            if waited:
                request.hops.add("turn", since, time.monotonic())
                if request.names:  # prompts before this one may have computed its prefix
                    hit = self.engine.prefixes.hit(request.names)
                    request.local_tokens = len(request.submit.prompt) - hit
            if not request.cancelled:
                await self._generate(request, None, after)
                await request.computed.wait()

    async def _generate(self, request: DecodeRequest, handle: KvHandle | None, after: Sequence[int]) -> None:
        """Hand the request to the engine. If it is cancelled during the call, cancel it again afterwards, because the
        engine may not have known it."""
        request.phase = Phase.RUNNING
        request.since = time.monotonic()
        self.on_start()
        submit = request.submit
        try:
            await self.engine.generate(request.id, submit.prompt, submit.body, handle, after)
        except (ProtocolError, Unavailable):
            if handle is not None:
                await self.engine.reject(handle)
            raise
        if request.cancelled:
            await self.engine.cancel([request.id])

    # from the engine to the frontends

    async def read_step(self, step: Step) -> None:
        """Record an engine step and send its outputs to their frontends."""
        with isolate_errors("transfers"):
            if step.transfers is not None:
                self.links.read(step.transfers)
            self.links.unreachable(step.unreachable)
            self.workers.avoid(step.unreachable)
            for request_id, why in step.unread.items():
                if request := self.requests.get(request_id):
                    self.links.unread(request, why)
        for frontend, outputs in (await self._by_frontend(step.outputs)).items():
            with isolate_errors("outputs") as one:
                await self.frontends.send_outputs(frontend, outputs)
            if one.error is not None:
                await self.frontends.lose(frontend, outputs)
        await self.chunk.stepped(step)

    async def _by_frontend(self, outputs: list[Output]) -> dict[str, list[Output]]:
        by_frontend: defaultdict[str, list[Output]] = defaultdict(list)
        now = time.monotonic()
        for output in outputs:
            if (request := self.requests.get(output.request_id)) is None:
                continue  # cancelled, or a prefill of role `both`
            with isolate_errors("outputs") as one:
                if await self._record(request, output, now):
                    by_frontend[request.frontend].append(output)
            if one.error is not None:
                await self.frontends.lose(request.frontend, [output])
        return by_frontend

    async def _record(self, request: DecodeRequest, output: Output, now: float) -> bool:
        """Record an output; return whether to send it to the frontend."""
        if output.failed:
            text = output.refused or "the engine failed this request"
            await self.frontends.fail(request, text, retry=not output.refused, invalid=bool(output.refused))
            return False
        request.missed_slo |= now - request.since > request.gap if request.tokens else now > request.due
        request.tokens += len(output.tokens)
        if not request.has_first_step:
            if output.recomputed and not request.kv_unread:
                self.links.unread(request, "it had to be computed again")
            if not request.kv_unread:
                self.estimator.first_token(request, now)
            await self._first_step(request, output)
        request.since = now
        if output.finished:
            self.requests.drop(request)
        return True

    async def _first_step(self, request: DecodeRequest, first: Output | None = None) -> None:
        """Count and report how the prompt got its KV, which is certain only now. `first` is None if the prefill
        worker's token was the request's last."""
        request.has_first_step = True
        request.engines_died = 0
        request.local_tokens = 0
        request.computed.set()
        self.quarantine.leave(request)
        if request.decision is None:
            return  # a warm-up
        if first is not None:
            self.links.first_step(request, first.begun)
            await self.frontends.send(request.frontend, request.placed)
        PREFILL.labels(self.workers.model, request.decision.mode, request.decision.reason).inc()
