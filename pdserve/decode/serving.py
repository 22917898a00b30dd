"""The requests of a decode worker on their way: from a frontend to the engine, and back as tokens, one message for each
engine step and frontend.

This is the plain story. Requests that are cancelled, fail or lose their frontend or engine are in `frontends.py`."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pdserve.decode.frontends import Frontends
from pdserve.decode.policy import Decision, LiveSettings, decide
from pdserve.decode.prefill_workers import PrefillWorkers
from pdserve.decode.quarantine import Quarantine
from pdserve.decode.remote import RemotePrefill
from pdserve.decode.requests import DecodeRequest, DecodeRequests, Phase
from pdserve.engine.base import Engine, Output, Transfers
from pdserve.errors import EngineDead, ProtocolError
from pdserve.kv.handles import expired, prefix_hit
from pdserve.messages import Failed, KvHandle, Outputs, Placed, Submit
from pdserve.observe.metrics import KV_TRANSFER_BYTES, KV_TRANSFER_SECONDS, PREFILL, REMOTE_PREFILL_FAILURES
from pdserve.queue.base import PrefillQueue

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RequestRunner:
    """Every request that enters leaves by its last output, a `Failed`, or a cancellation, and in each case
    nothing of it stays in the queue or in an engine."""

    engine: Engine
    frontends: Frontends
    queue: PrefillQueue
    workers: PrefillWorkers
    remote: RemotePrefill
    requests: DecodeRequests
    settings: LiveSettings
    quarantine: Quarantine
    start: Callable[[Coroutine[Any, Any, None]], object]
    """runs a task of the worker, which ends with it and whose failure ends it"""

    # from a frontend to the engine

    async def submit(self, frontend: str, submit: Submit) -> None:
        request = self.requests.add(frontend, submit)
        if request is None:
            await self.frontends.send(frontend, Failed(submit.request_id, "this request id was used before"))
        else:
            self.start(self._run(request))

    async def _run(self, request: DecodeRequest) -> None:
        try:
            await self._place(request)
        except EngineDead:
            raise
        except ProtocolError as error:
            log.warning("request %s refused: %s", request.id, error)
            await self.frontends.fail(request, str(error), retry=False)
        except Exception:
            log.exception("request %s failed before it reached the engine", request.id)
            await self.frontends.fail(request, "internal error in the decode worker", retry=True)

    async def _place(self, request: DecodeRequest) -> None:
        if request.cancelled:  # before this task had its first turn
            self.requests.drop(request)
            return
        if time.monotonic() >= request.deadline:
            await self.frontends.fail(
                request, "the deadline passed before the request was started", retry=False
            )
            return
        decision = self._decide(request)
        handle = None
        if decision.mode == "remote":
            handle = await self.remote.prefill(request)
            if handle is None:
                decision = Decision("local", "fallback")
        if not request.cancelled:
            await self.quarantine.enter(request)
        if handle is not None and not request.cancelled and expired(handle):
            await self.engine.reject(handle)
            decision, handle = Decision("local", "fallback"), None
        if not request.cancelled:
            request.decision = decision
            cached = prefix_hit(handle) if handle is not None else 0
            await self.frontends.send(
                request.frontend, Placed(request.id, decision.mode, decision.reason, cached)
            )
        if not request.cancelled:
            await self._generate(request, handle)
        elif handle is not None:
            await self.engine.reject(handle)
        if request.cancelled:
            self.requests.drop(request)

    def _decide(self, request: DecodeRequest) -> Decision:
        submit, settings = request.submit, self.settings.current
        prompt, depth = len(submit.prompt), self.queue.depth
        found = self.engine.prefix_hit(submit.prompt, submit.body) if settings.remote_prefill else 0
        hit = found or 0
        workers = len(self.workers.available())
        decision = decide(
            prompt,
            hit,
            depth,
            workers,
            self.queue.connected,
            settings,
            supported=found is not None,
            migrated=submit.migrated,
            fits=self.remote.fits(submit),
        )
        log.info(
            "request %s: prefill %s (%s), prompt %d, hit %d, to compute %d of %d, queue %d of %d, workers %d",
            request.id,
            decision.mode,
            decision.reason,
            prompt,
            hit,
            prompt - hit,
            settings.max_local_prefill_length,
            depth,
            settings.max_prefill_queue_size,
            workers,
        )
        return decision

    async def _generate(self, request: DecodeRequest, handle: KvHandle | None) -> None:
        """RUNNING before the engine is asked: a cancel that comes during the call reaches the engine after
        it."""
        request.phase, request.since = Phase.RUNNING, time.monotonic()
        submit = request.submit
        try:
            await self.engine.generate(request.id, submit.prompt, submit.body, handle)
        except ProtocolError as error:
            if handle is None:
                raise
            # the lease of its KV ran out since it was looked at: a frontend may take a second to be told
            log.warning("request %s: its KV is refused (%s), prefilling locally", request.id, error)
            await self.engine.reject(handle)
            request.decision = Decision("local", "fallback")
            await self.frontends.send(request.frontend, Placed(request.id, "local", "fallback"))
            await self.engine.generate(request.id, submit.prompt, submit.body, None)
        if request.cancelled:
            await self.engine.cancel([request.id])

    # from the engine to the frontends

    async def read_engine(self) -> None:
        """For ever, or until EngineDead."""
        while True:
            step = await self.engine.step()
            if step.transfers is not None:
                _count(step.transfers)
            self.workers.avoid(step.unreachable)
            self._note_unread(step.unread)
            for frontend, outputs in (await self._by_frontend(step.outputs)).items():
                await self.frontends.send(frontend, Outputs(self.engine.pack(outputs)))

    async def _by_frontend(self, outputs: list[Output]) -> dict[str, list[Output]]:
        found: defaultdict[str, list[Output]] = defaultdict(list)
        now = time.monotonic()
        for output in outputs:
            request = self.requests.get(output.request_id)
            if request is None:
                continue  # cancelled
            if output.failed:
                text = output.refused or "the engine failed this request"
                await self.frontends.fail(
                    request, text, retry=not output.refused, invalid=bool(output.refused)
                )
                continue
            found[request.frontend].append(output)
            request.since = now
            if not request.proven:
                request.proven, request.engines_died = True, 0
                self.quarantine.leave(request)
                await self._account(request, output.recomputed)
            if output.finished:
                self.requests.drop(request)
        return found

    def _note_unread(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                request.unread = True
            if request is None or not request.warms:
                REMOTE_PREFILL_FAILURES.labels("transfer").inc()

    async def _account(self, request: DecodeRequest, recomputed: bool) -> None:
        """Count how its prompt got its KV; with the first output, since only then it is certain."""
        if request.decision is None:
            return  # a warm-up
        if recomputed:
            request.decision = Decision("local", "transfer")
            await self.frontends.send(request.frontend, Placed(request.id, "local", "transfer"))
        PREFILL.labels(request.decision.mode, request.decision.reason).inc()


def _count(transfers: Transfers) -> None:
    KV_TRANSFER_BYTES.inc(transfers.bytes)
    for seconds in transfers.seconds:
        KV_TRANSFER_SECONDS.observe(seconds)
