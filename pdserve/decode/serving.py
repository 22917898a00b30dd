"""The path of a request through a decode worker: from the frontend, by local or remote prefill, into the engine, and
back as tokens, in one message for each engine step and frontend.

Requests that are cancelled, fail, or lose their frontend or engine are in `replies.py`."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.contract.messages import Failed, KvHandle, Submit
from pdserve.decode.live_updates import LiveSettings, thresholds
from pdserve.decode.peers.links import KvLinks
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.policy.decision import Decision, decide
from pdserve.decode.remote.client import RemotePrefill
from pdserve.decode.replies import INTERNAL, Frontends
from pdserve.decode.requests import OWN, STAND_IN, DecodeRequest, DecodeRequests, Phase
from pdserve.decode.scheduling.chunk_size import ChunkLimit
from pdserve.decode.scheduling.prefill_slots import PromptSlots
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
    """Every request ends with its last output, a `Failed`, or a cancellation. In each case nothing of it stays in the
    queue or in an engine."""

    engine: Engine
    frontends: Frontends
    queue: PrefillQueue
    workers: PrefillWorkers
    remote: RemotePrefill
    links: KvLinks
    requests: DecodeRequests
    settings: LiveSettings
    quarantine: Quarantine
    estimator: Estimator
    slots: PromptSlots
    chunk: ChunkLimit
    start: Callable[[Coroutine[Any, Any, None]], object]
    """start a task that ends with the worker and whose failure ends the worker"""
    stands_in: bool = False
    """a prefill worker that decodes: it computes all prompts of its requests itself"""
    has_time: Callable[[], bool] = lambda: False
    """role `both`: whether this worker would pull a prompt from the queue at once"""
    busy: Callable[[], None] = lambda: None
    """called when a request enters the engine"""

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
            await self.frontends.fail(
                request, "the deadline passed before the request was started", retry=False
            )
            return
        decision = self._decide(request)
        done = await self.remote.prefill(request, decision.reason) if decision.mode == "remote" else None
        handle = done.handle if done is not None else None
        if decision.mode == "remote" and handle is None:
            decision = Decision("local", OWN if request.outcome == OWN else "fallback")
        request.awaits_tokens = 0
        if not request.cancelled:
            await self.quarantine.enter(request)
        first = None
        if not request.cancelled:
            first = await self._report(request, decision, handle, done.first if done is not None else [])
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
            await self._prove(request)
        if request.cancelled or finished:
            self.requests.drop(request)

    async def _report(
        self, request: DecodeRequest, decision: Decision, handle: KvHandle | None, packed: list[bytes]
    ) -> Output | None:
        """Report to the frontend how the prompt gets its KV. Then send the token that the prefill worker sampled, if it
        did (`packed`), without waiting for the KV: even if that is lost, the request continues after the token."""
        request.decision = decision
        if handle is not None:
            request.cached = max(request.hit, prefix_hit(handle))
        elif not request.computes:
            request.computes = len(request.submit.prompt) - request.hit
        await self.frontends.send(request.frontend, request.placed)
        if not packed or request.cancelled:
            return None
        first = self.engine.first_output(request.id, request.submit.prompt, request.submit.body, packed)
        if first is not None:
            request.tokens, request.broken = len(first.tokens), time.monotonic() > request.due
            await self.frontends.send_outputs(request.frontend, [first])
        return first

    def _decide(self, request: DecodeRequest) -> Decision:
        submit, settings = request.submit, self.settings.current
        prompt, depth = len(submit.prompt), self.remote.publisher.ahead(submit.client)
        prefix_hit = self.engine.prefix_hit(submit.prompt, submit.body) if settings.remote_prefill else 0
        hit = request.hit = prefix_hit or 0
        workers = len(self.workers.available())
        adaptive = settings.remote_prefill and settings.policy == "adaptive"
        estimates = self.estimator.of(request, prompt - hit, prompt) if adaptive else None
        known = prompt, hit, depth, workers, self.queue.connected, settings
        supported, migrated, fits = prefix_hit is not None, submit.migrated, self.remote.fits(submit)
        decision = decide(*known, supported=supported, migrated=migrated, fits=fits, estimates=estimates)
        if self.stands_in:
            decision = Decision("local", STAND_IN)
        elif decision.mode == "remote" and self.has_time():
            decision = Decision("local", OWN)
        remote = decision.mode == "remote"  # the next requests' estimates count this one from here on
        if remote and hit:  # all that is not in the cache is read from there
            request.hit = self.engine.prefix_hit(submit.prompt, submit.body, host=False) or 0
        request.awaits_tokens, request.computes = (prompt, 0) if remote else (0, prompt - hit)
        text = "request %s: prefill %s (%s), prompt %d, hit %d, queue %d, workers %d; %s"
        numbers = prompt, hit, depth, workers, estimates or thresholds(settings)
        logger.info(text, request.id, decision.mode, decision.reason, *numbers)
        return decision

    async def _compute(self, request: DecodeRequest, after: Sequence[int]) -> None:
        """Generate without remote KV, when it is the prompt's turn to be computed."""
        since, tokens = time.monotonic(), request.computes
        order = request.submit.client, request.due, tokens * self.estimator.token_seconds_here
        async with self.slots.take(tokens, *order, request.begins) as waited:
            if waited:
                request.hops.add("turn", since, time.monotonic())
            if not request.cancelled:
                await self._generate(request, None, after)
                await request.computed.wait()

    async def _generate(self, request: DecodeRequest, handle: KvHandle | None, after: Sequence[int]) -> None:
        """Hand the request to the engine. It is RUNNING before the call, so that a cancellation during the call reaches
        the engine after it."""
        request.phase, request.since = Phase.RUNNING, time.monotonic()
        self.busy()
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
        """Send the outputs of an engine step to their frontends. Outputs of warm-ups, and of the prefill half of role
        `both`, may be among them. A request whose output is lost goes on elsewhere."""
        with isolate_errors("transfers"):
            if step.transfers is not None:
                self.links.read(step.transfers)
            self.links.unreachable(step.unreachable)
            self.workers.avoid(step.unreachable)
            self._note_unread(step.unread)
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
                if await self._note(request, output, now):
                    by_frontend[request.frontend].append(output)
            if one.error is not None:
                await self.frontends.lose(request.frontend, [output])
        return by_frontend

    async def _note(self, request: DecodeRequest, output: Output, now: float) -> bool:
        """Note an output; return whether the frontend gets it."""
        if output.failed:
            text = output.refused or "the engine failed this request"
            await self.frontends.fail(request, text, retry=not output.refused, invalid=bool(output.refused))
            return False
        request.broken |= now - request.since > request.gap if request.tokens else now > request.due
        request.tokens += len(output.tokens)
        if not request.proven:
            if output.recomputed and not request.unread:
                self.links.unread(request, "it had to be computed again")
            if not request.unread:
                self.estimator.first_token(request, now)
            await self._prove(request, output)
        request.since = now
        if output.finished:
            self.requests.drop(request)
        return True

    def _note_unread(self, unread: dict[str, str]) -> None:
        for request_id, why in unread.items():
            if request := self.requests.get(request_id):
                self.links.unread(request, why)

    async def _prove(self, request: DecodeRequest, first: Output | None = None) -> None:
        """The engine has done the request's first step, or will not have to. Count and report how the prompt got its
        KV, which is certain only now."""
        request.proven, request.engines_died, request.computes = True, 0, 0
        request.computed.set()
        self.quarantine.leave(request)
        if request.decision is None:
            return  # a warm-up
        if first is not None:
            self.links.first_step(request, first.begun)
            await self.frontends.send(request.frontend, request.placed)
        PREFILL.labels(self.workers.model, request.decision.mode, request.decision.reason).inc()
