"""Reads prefill workers' answers, and rejects KV that no request takes (docs/decisions/0007-lost-answers.md)."""

import logging
from dataclasses import dataclass

from pdserve.contract.messages import (
    RETURNED,
    KvHandle,
    PrefillAnswer,
    PrefillDone,
    PrefillFailed,
    PrefillProgress,
    PrefillStarted,
)
from pdserve.decode.peers.prefill_prefixes import PrefillPrefixIndex
from pdserve.decode.peers.prefill_workers import UNKNOWN, UNREACHABLE, PrefillWorkers
from pdserve.decode.remote.publisher import PromptPublisher
from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.engine.base import Engine
from pdserve.kv.handles import check_handle, source
from pdserve.queue.base import PrefillQueue
from pdserve.runtime.tasks import isolate_errors
from pdserve.util.errors import ProtocolError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class AnswerReader:
    instance: str
    engine: Engine
    queue: PrefillQueue
    workers: PrefillWorkers
    requests: DecodeRequests
    publisher: PromptPublisher
    prefixes: PrefillPrefixIndex

    async def read(self) -> None:
        """Give each answer to the request that waits for it, for ever."""
        async for answer in self.queue.answers(self.instance):
            with isolate_errors("prefill answers"):
                await self._dispatch(answer)

    async def _dispatch(self, answer: PrefillAnswer) -> None:
        self.workers.heard()
        request = self.requests.get(answer.request_id)
        match answer:
            case PrefillStarted() if request is not None:
                self._started(request, answer)
            case PrefillProgress(handle=handle) if request is not None:
                await self._read_ahead(request, handle)
            case PrefillDone():
                await self._done(request, answer)
            case PrefillFailed(reason=reason) if request is not None:
                if reason == RETURNED:
                    request.preferred_begun(False)
                else:
                    request.resolve(answer)

    def _started(self, request: DecodeRequest, started: PrefillStarted) -> None:
        worker = started.worker
        request.preferred_begun(True)
        self.prefixes.computes(request, worker)
        if request.awaits_answer:  # else, for example, another worker has answered
            request.prefiller = worker
            request.hops.pulled(worker, started.queued)
        if not self.workers.is_known(worker):
            request.resolve(UNKNOWN)
        elif self.workers.is_avoided(worker):
            request.resolve(UNREACHABLE)
        self.publisher.publish_next()

    async def _read_ahead(self, request: DecodeRequest, handle: KvHandle) -> None:
        """Read the KV that is computed so far. It is used only if the prefill's answer confirms it
        (`kv/read_ahead/blocks.py`)."""
        worker, facts = handle.engine_id, self.engine.facts
        if not request.awaits_answer or not self.workers.is_known(worker) or self.workers.is_avoided(worker):
            return
        try:
            fingerprint = self.engine.kv_fingerprint(request.submit.body)
            check_handle(handle, handle.num_tokens, facts.block_size, fingerprint)
            if handle.num_tokens > len(request.submit.prompt):
                raise ProtocolError(f"KV of {handle.num_tokens} tokens, more than its prompt has")
        except ProtocolError as error:
            logger.warning("request %s: not read ahead: %s", request.id, error)
            return
        before, request.read_ahead = request.read_ahead, handle
        if before is not None and source(before) != source(handle):
            await self.engine.drop_ahead(before)
        if request.awaits_answer:  # else nothing would drop this KV
            await self.engine.read_ahead(handle, request.prefix_hit)

    async def _done(self, request: DecodeRequest | None, answer: PrefillDone) -> None:
        """Give the answer to its request, or reject KV that no request takes, to free its blocks at once. A repeated
        answer is not rejected if a live request took its KV, which may be read right now. An unknown worker is not sent
        a rejection: it repeats the answer until it is registered or the KV lease ends."""
        worker = answer.handle.engine_id
        if not self.workers.is_known(worker):
            logger.info("request %s: %s is not a live prefill worker", answer.request_id, worker)
            if request is not None:
                request.resolve(UNKNOWN)
            return
        if request is not None and self.workers.is_avoided(worker):
            request.resolve(UNREACHABLE)
        if request is not None and request.awaits_answer and request.published:
            request.resolve(answer)
        elif request is None or not request.took(answer.handle):
            logger.info("request %s: late answer of %s rejected", answer.request_id, worker)
            await self.engine.reject(answer.handle)
