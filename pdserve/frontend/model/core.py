"""vLLM's engine core, somewhere else: AsyncLLM talks to this as if it were the engine process beside it.

For each request of AsyncLLM (n > 1 makes several) a decode worker is chosen, the outputs are handed back
under AsyncLLM's own id, and where the worker is lost the request goes on at another one from prompt + tokens
so far: nothing above this class notices.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Concatenate, ParamSpec, TypeVar

from pdserve.frontend.admission.estimate import RequestEstimate
from pdserve.frontend.model import migration
from pdserve.frontend.model.generation import Generation, unsupported
from pdserve.frontend.model.link import Link, Router
from pdserve.frontend.model.vllm_api import (
    EngineCoreClient,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Unencodable,
    count_prefix_hit,
    decode_outputs,
    drop_tokens,
    outputs_now,
)
from pdserve.frontend.trace import RETRY_AFTER, RequestFailure, RequestTrace, current_trace
from pdserve.messages import Cancel, Failed, Outputs, Placed, Refused, ToFrontend
from pdserve.observe.metrics import ITL, MIGRATIONS, TTFT

logger = logging.getLogger(__name__)

MAX_LOSSES = 4
"""workers that may lose a request which they had taken up, whatever the reasons"""
MAX_ENGINES = 2
"""engines that may die in a row while they compute a request's next token. After the first death each of the requests
that were in that engine is tried again beside nothing else that is unproven (`decode/trials.py`): the second one tells
which of them kills."""
PAUSE = 0.5
"""seconds before a worker that failed a request gets it again, where there is no other"""

P = ParamSpec("P")
T = TypeVar("T")


def _by_itself(
    act: "Callable[Concatenate[RemoteCore, Generation, P], T]",
) -> "Callable[Concatenate[RemoteCore, Generation, P], T | None]":
    """Whatever goes wrong with one request ends that request with an error, and nothing else."""

    @wraps(act)
    def guarded(core: "RemoteCore", generation: Generation, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return act(core, generation, *args, **kwargs)
        except Unencodable as error:
            core._fail(generation, RequestFailure(400, str(error)))
        except Exception:
            logger.exception("request %s failed in the frontend", generation.id)
            core._fail(generation, RequestFailure(500, "internal error in the frontend"))
        return None

    return guarded


class RemoteCore(EngineCoreClient):  # type: ignore[misc]  # vLLM's base answers NotImplementedError, a 501, for the rest
    """One per model. All methods run in the event loop; none of those that AsyncLLM calls ever waits, except
    for outputs, so that a cancelled HTTP request cannot leave half of a request behind."""

    def __init__(self, model: str, tasks: list[str], max_model_len: int, request_timeout: float) -> None:
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.router: Router
        """set before the first request"""
        self.fail_request: Callable[[str, str, int], list[str]]
        """ends a request of AsyncLLM with an error; set when AsyncLLM is there"""
        self.on_capacity: Callable[[], None] = lambda: None
        """called when there may be more capacity at the workers than before"""
        self.estimate = RequestEstimate()
        self._model = model
        self._tasks = tuple(tasks)
        self._max_model_len = max_model_len
        self._request_timeout = request_timeout
        self._replaced = False
        self._generations: dict[str, Generation] = {}
        self._emptied = asyncio.Event()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    # what AsyncLLM calls

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return self._tasks

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Never raises: AsyncLLM has registered the request already, and would keep it for ever."""
        trace = current_trace.get()
        deadline = time.monotonic() + self._request_timeout if trace is None else trace.deadline
        generation = Generation(request, trace, deadline)
        self._generations[request.request_id] = generation
        self._begin(generation)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if generation := self._generations.get(request_id):
                self._leave_worker(generation)
                self._forget(generation)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def reset_mm_cache_async(self) -> None:
        """Nothing is cached here: only text is served."""

    async def reset_prefix_cache_async(
        self, reset_running: bool = False, reset_connector: bool = False
    ) -> bool:
        return False

    async def is_sleeping_async(self) -> bool:
        return False

    async def is_scheduler_paused_async(self) -> bool:
        return False

    def dp_engines_running(self) -> bool:
        return bool(self._generations)

    def shutdown(self, timeout: float | None = None) -> None:
        """Fails what is in flight: whoever waits for it would wait for ever. May be called twice."""
        self.resources.engine_dead = True
        for generation in list(self._generations.values()):
            self._fail(generation, RequestFailure(503, "the frontend is shutting down", RETRY_AFTER))

    # what the processor asks

    async def idle(self) -> None:
        """Until nothing is in flight."""
        while self._generations:
            self._emptied.clear()
            await self._emptied.wait()

    @property
    def running(self) -> int:
        """Sequences that a worker has."""
        return sum(generation.link is not None for generation in self._generations.values())

    def pause(self, trace: RequestTrace) -> None:
        """Give the places of its sequences to others until `resume`, but for those that would have to be replayed."""
        for generation in [one for one in self._generations.values() if one.trace is trace]:
            if generation.link is not None and generation.permit is not None and not generation.replays:
                self._leave_worker(generation)
                generation.permit.release()
        self.on_capacity()

    def resume(self, trace: RequestTrace) -> None:
        for generation in [one for one in self._generations.values() if one.trace is trace]:
            if generation.permit is not None and not generation.permit.requested:
                generation.permit.request()

    def replace(self, replaced: bool) -> None:
        """Whether another model has this one's name, and no worker is left here."""
        self._replaced = replaced
        for generation in [one for one in self._generations.values() if one.link is None]:
            self._give_back(generation)

    # what links tell

    def link_up(self, link: Link) -> None:
        waiting = [one for one in self._generations.values() if one.link is None and one.begun]
        for generation in waiting:
            self._place(generation)
        self.on_capacity()

    def link_lost(self, link: Link, reason: str) -> None:
        if link.generations:
            logger.warning("%s: moving %d requests from %s", reason, len(link.generations), link.instance)
        for generation in list(link.generations.values()):
            self._lost(generation, reason)

    def arrived(self, link: Link, message: ToFrontend) -> None:
        match message:
            case Outputs(body):
                self._take_outputs(link, body)
            case Placed(request_id):
                if generation := link.generations.get(request_id):
                    generation.placed = True
                    generation.prefill, generation.cached = message.prefill, message.cached
            case Failed(request_id):
                if generation := link.generations.get(request_id):
                    self._failed_there(generation, link, message)
            case Refused(text):
                link.refused = True
                logger.warning("%s takes no requests from this frontend: %s", link.instance, text)

    @_by_itself
    def _begin(self, generation: Generation) -> None:
        request, trace = generation.request, generation.trace
        if reason := unsupported(request):
            self._fail(generation, RequestFailure(400, reason))
            return
        generation.size = self._size(request)
        generation.request = migration.repeatable(request)
        if trace is not None:
            trace.add_prompt(request.external_req_id or request.request_id, len(generation.prompt))
        if trace is None or trace.admission is None:
            self._place(generation)
            return
        if trace.failure is not None:  # a sibling (n > 1) has just ended all of them
            self._forget(generation)
            return
        begin, drop = partial(self._place, generation), partial(self._forget, generation)
        generation.permit = trace.admission.permit(begin, drop)
        generation.permit.request()

    # outputs

    def _take_outputs(self, link: Link, body: list[bytes]) -> None:
        try:
            outputs = decode_outputs(body)
        except Exception as error:
            # Tokens are lost and nobody knows whose: every request at this worker goes on elsewhere.
            logger.exception("undecodable outputs from %s", link.instance)
            self._desert(link, f"{link.instance} sent outputs that cannot be read: {error}")
            return
        found = [(link.generations.get(output.request_id), output) for output in outputs.outputs]
        # no generation: it was aborted, or went on elsewhere
        kept = [output for generation, output in found if generation and self._take(generation, link, output)]
        if kept:
            self._outputs.put_nowait(outputs_now(kept, outputs.timestamp))
        self.on_capacity()

    @_by_itself
    def _take(self, generation: Generation, link: Link, output: EngineCoreOutput) -> bool:
        """Whether AsyncLLM should see it."""
        if generation.link is not link:
            return False  # ended together with a sibling (n > 1) in this very step
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._lost(generation, f"{link.instance} gave it up ({output.finish_reason})")
            return False
        output.request_id = generation.id
        if generation.trace is not None and generation.prefill:
            generation.trace.prefilled(generation.prefill)
        if output.prefill_stats is not None:
            count_prefix_hit(output.prefill_stats, generation.cached)
        if generation.ahead and not self._replayed(generation, output):
            return False
        if generation.tokens and generation.attempt > 1:
            output.events = None  # the first worker's already set the times that these would overwrite
        self._count(generation, output.new_token_ids)
        if output.finished:
            generation.detach()
            self._learn(generation)
            self._forget(generation)
        return True

    def _replayed(self, generation: Generation, output: EngineCoreOutput) -> bool:
        """Take away what AsyncLLM has seen before; whether anything is left."""
        again = generation.heard_again(output.new_token_ids)
        if again is None or (output.finished and generation.ahead):
            why = f"{generation.last_loss}, and another worker's answer began differently; send it again"
            self._fail(generation, RequestFailure(503, why, 1.0))
            return False
        drop_tokens(output, again)
        return bool(output.new_token_ids) or output.finished

    def _learn(self, generation: Generation) -> None:
        if generation.attempt == 1 and generation.tokens:
            first, last = generation.first_token, generation.last_token
            self.estimate.learn(len(generation.tokens), first - generation.sent, last - first)

    def _size(self, request: EngineCoreRequest) -> float:
        params = request.sampling_params
        return len(request.prompt_token_ids or ()) + self.estimate.tokens(params and params.max_tokens)

    def _count(self, generation: Generation, tokens: list[int]) -> None:
        first = generation.trace is not None and generation.trace.first_token is None
        gap = generation.take(tokens)
        if gap is not None:
            ITL.labels(self._model).observe(gap)
        elif first and generation.trace is not None and generation.trace.ttft is not None:
            TTFT.labels(self._model).observe(generation.trace.ttft)

    # placing and moving

    @_by_itself
    def _place(self, generation: Generation, only_others: bool = False) -> None:
        """Give it to a worker, or let it wait for one. It is written out before anybody counts it as the worker's:
        what cannot be encoded is nobody's."""
        link = self.router.pick(generation.avoid, only_others)
        if link is None:
            self._wait(generation)
            if only_others:  # a worker that just failed it may do better in a moment
                generation.later(PAUSE, self._place)
            self._give_back(generation)
            return
        submit = generation.submit()
        generation.detach()
        generation.attach(link, submit.request_id)
        if generation.trace is not None:
            generation.trace.sent_to(link.instance)
        link.post(submit)

    def _wait(self, generation: Generation) -> None:
        if not generation.timers:
            generation.later(max(0.0, generation.deadline - time.monotonic()), self._gave_up_waiting)

    @_by_itself
    def _give_back(self, generation: Generation) -> None:
        """End it where it is better begun anew, with its siblings (n, several prompts), elsewhere. One at which an
        engine died is not tried at the other model's workers: they would count its victims from 0 again."""
        trace = generation.trace
        if not self._replaced or trace is None or generation.id not in self._generations or trace.first_token:
            return  # where it has tokens, another worker of what it began with may still come
        together = [one for one in self._generations.values() if one.trace is trace]
        if not any(one.link for one in together):
            suspect = any(one.engines_died for one in together)
            self._fail(generation, RequestFailure.model_replaced(self._model, redirect=not suspect))

    def _gave_up_waiting(self, generation: Generation) -> None:
        self._fail(generation, RequestFailure.no_worker(self._model, generation.last_loss))

    @_by_itself
    def _failed_there(self, generation: Generation, link: Link, failed: Failed) -> None:
        generation.engines_died = max(generation.engines_died, failed.engines_died)
        if failed.retry:
            reason = f"{link.instance}: {failed.message}" if failed.engines_died else failed.message
            self._lost(generation, reason)
            return
        late = time.monotonic() >= generation.deadline
        status = 400 if failed.invalid else 504 if late else 500
        self._fail(generation, RequestFailure(status, failed.message))

    @_by_itself
    def _lost(self, generation: Generation, reason: str) -> None:
        """Its worker will not finish it: go on elsewhere, end it where it is complete, or fail it."""
        if generation.id not in self._generations:
            return  # ended together with a sibling (n > 1)
        link = generation.detach()
        if link is not None:
            generation.avoid.add(link.instance)
        generation.losses += generation.placed
        generation.last_loss = reason
        if generation.tokens and generation.is_complete(self._max_model_len):
            self._finish(generation)
        elif generation.engines_died >= MAX_ENGINES:
            why = f"{generation.engines_died} engines in a row died while they computed this request's next token"
            self._fail(generation, RequestFailure(500, f"{why}; it is not tried again (the last: {reason})"))
        elif generation.losses >= MAX_LOSSES:
            why = f"{generation.losses} decode workers lost this request; the last: {reason}"
            self._fail(generation, RequestFailure(503, why, RETRY_AFTER))
        else:
            MIGRATIONS.labels(self._model).inc()
            logger.info(
                "request %s goes on elsewhere after %d tokens: %s",
                generation.id,
                len(generation.tokens),
                reason,
            )
            self._place(generation, only_others=True)

    def _finish(self, generation: Generation) -> None:
        """All of its tokens came, and only the word that it is finished was lost."""
        output = EngineCoreOutput(generation.id, [], finish_reason=FinishReason.LENGTH)
        self._forget(generation)
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))

    def _desert(self, link: Link, reason: str) -> None:
        generations = list(link.generations.values())
        link.post(Cancel([one.wire_id for one in generations]))
        for generation in generations:
            self._lost(generation, reason)

    def _forget(self, generation: Generation) -> None:
        del self._generations[generation.id]
        if generation.permit is not None:
            generation.permit.release()
        if not self._generations:
            self._emptied.set()
        self.on_capacity()

    def _leave_worker(self, generation: Generation) -> None:
        wire_id = generation.wire_id
        if link := generation.detach():
            link.post(Cancel([wire_id]))

    def _fail(self, generation: Generation, failure: RequestFailure) -> None:
        """End it, and with it the others of the same HTTP request, with this error for the client."""
        if generation.trace is not None:
            generation.trace.failure = failure
        for request_id in [generation.id, *self.fail_request(generation.id, failure.message, failure.status)]:
            if other := self._generations.get(request_id):
                self._leave_worker(other)
                self._forget(other)
