"""Remote engine core: AsyncLLM uses it like vLLM's own engine core, but it runs each request at a decode worker.

AsyncLLM adds a generation (several for n > 1, each with its own permit); `place` submits it to a decode worker;
`received` hands its outputs to AsyncLLM; `_end` ends it. `Migration` continues it at another worker if its worker is
lost, which AsyncLLM does not notice. The package's docstring has the whole life cycle.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from pdserve.contract.messages import Cancel, Failed, Outputs, Placed, ToFrontend, WorkerLoad
from pdserve.contract.records import ModelCard
from pdserve.contract.sampling import stateful_parameter
from pdserve.frontend.admission.wait_estimate import RequestEstimate
from pdserve.frontend.edge.deltas import DeltaStream
from pdserve.frontend.edge.request_state import (
    PAUSED,
    SHUTTING_DOWN,
    RequestFailure,
    RequestState,
    current_request,
)
from pdserve.frontend.model import ModelContext
from pdserve.frontend.sequence.generation import Generation
from pdserve.frontend.sequence.migration import Migration, next_attempt, seeded_for_replay
from pdserve.frontend.sequence.pacing import Pacer, reserve_for
from pdserve.frontend.vllm.api_server import (
    VERSION,
    EngineCoreClient,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
    Unencodable,
    count_prefix_hit,
    decode_outputs,
    in_our_time,
)
from pdserve.frontend.vllm.refusals import unsupported
from pdserve.frontend.workers.link import Link
from pdserve.frontend.workers.pool import WorkerPool
from pdserve.observe.metrics import ITL, TTFT
from pdserve.util.errors import BadRequest

logger = logging.getLogger(__name__)


class RemoteCore(EngineCoreClient):  # type: ignore[misc]  # vLLM's base raises NotImplementedError for the rest, which no route reaches
    """One per model. All methods run in the event loop. Those that AsyncLLM calls never wait (except
    `get_output_async`), so that a cancelled HTTP request leaves no half-added generation behind."""

    def __init__(self, card: ModelCard, context: ModelContext) -> None:
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.fail_request: Callable[[str, str, int], list[str]]
        """ends a request of AsyncLLM with an error; this and the next two are set once AsyncLLM exists"""
        self.process: Callable[[EngineCoreOutputs], list[str]]
        """processes one engine step's outputs; returns the ids of requests that the engine must abort"""
        self.stream_deltas: Callable[[str, DeltaStream, bool], None]
        """lets `edge/deltas.py` make most chunks of a plain stream, without vLLM's app"""
        self.plain_paths: Mapping[str, bool] = {}
        """routes on which to call `stream_deltas`; the value is its argument `empty`"""
        self.on_capacity: Callable[[], None] = lambda: None
        """called when the workers may have more capacity"""
        self.estimate = RequestEstimate()
        self.workers = WorkerPool(context.router, VERSION, context.connect, self)
        self._ttft, self._itl = TTFT.labels(card.name), ITL.labels(card.name)
        self._tasks = tuple(card.supported_tasks)
        self._migration = Migration(self, card.name, card.max_model_len)
        self.waiting = self._migration.waiting
        self._pacer = Pacer[Generation, EngineCoreOutput](self._pass_on)
        self._generations: dict[str, Generation] = {}
        """by AsyncLLM's id"""
        self._emptied = asyncio.Event()

    # called by AsyncLLM

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Never raises, because AsyncLLM has registered the request already and would keep it for ever."""
        state = current_request.get()
        assert state is not None, "every generation belongs to an HTTP request"
        generation = Generation(request, state)
        self._generations[generation.id] = generation
        with self.isolated(generation):
            self._begin(generation)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Never returns: `process` handles each step when it arrives, so AsyncLLM's own output task has no work."""
        return await asyncio.get_running_loop().create_future()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if generation := self._generations.get(request_id):
                self._end(generation)

    def shutdown(self, timeout: float | None = None) -> None:
        """Fail all requests, because AsyncLLM would wait for them for ever. May be called twice."""
        self.resources.engine_dead = True
        for generation in list(self._generations.values()):
            self.fail(generation, SHUTTING_DOWN)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return self._tasks

    # a generation, from its beginning to its end

    def _begin(self, generation: Generation) -> None:
        """Check the request and ask admission for a permit; `place` runs once it is granted."""
        request, state = generation.request, generation.state
        assert state.admission is not None, f"{state.path} generates, and has no admission"
        if request.prompt_token_ids is not None:
            state.add_prompt(generation.prompt_key, len(generation.prompt))
        if reason := unsupported(request, state.prompt_tokens, state.admission.size.n):
            self.fail(generation, RequestFailure(400, reason))
            return
        generation.must_replay = stateful_parameter(request.sampling_params) is not None
        generation.request = seeded_for_replay(request)
        generation.kv_tokens = len(generation.prompt) + self.estimate.tokens(generation.max_tokens)
        if state.failure is not None:  # a sibling (n > 1, beams) has just ended the whole request
            self._drop(generation)
            return
        if state.deltas is not None and state.path in self.plain_paths:
            self.stream_deltas(generation.id, state.deltas, self.plain_paths[state.path])
        generation.reserve = reserve_for(request, state)
        begin, drop = partial(self.place, generation), partial(self._drop, generation)
        pause = partial(self._pause, generation)
        generation.permit = state.admission.permit(begin, drop, pause, can_pause=not generation.must_replay)
        generation.permit.request()

    def place(self, generation: Generation, *, only_others: bool = False) -> None:
        """Submit the generation to a worker, or let it wait for one. With `only_others`, no worker that lost it is
        chosen. Encodes the request before it is counted at the worker, because a request that cannot be encoded must
        not take capacity."""
        with self.isolated(generation):
            link = self.workers.pick(generation, only_others=only_others)
            if link is None:
                self._migration.wait(generation, retry=only_others)
                return
            generation.begin_span(link.instance)
            submit = next_attempt(generation)
            self._migration.stop_waiting(generation)
            generation.attach(link, submit.request_id)
            generation.state.sent_to(link.instance)
            link.post(submit)

    def received(self, link: Link, message: ToFrontend) -> None:
        match message:
            case Placed(request_id):
                if generation := link.generations.get(request_id):
                    generation.placed = message
                    generation.hops.reported(message.hops)
            case Outputs(body):
                self._take_outputs(link, body)
            case Failed(request_id):
                if generation := link.generations.get(request_id):
                    with self.isolated(generation):
                        self._migration.failed(generation, message)
            case WorkerLoad():
                self.on_capacity()

    def _take_outputs(self, link: Link, body: list[bytes]) -> None:
        """Hand one engine step's outputs to AsyncLLM in one call."""
        try:
            outputs = decode_outputs(body)
        except Exception as error:  # it is unknown whose tokens are lost: migrate all requests of this worker
            logger.exception("undecodable outputs from %s", link.instance)
            link.post(Cancel(list(link.generations)))
            self.link_lost(link, f"{link.instance} sent outputs that cannot be read: {error}", "unreadable")
            return
        taken, now = list[EngineCoreOutput](), time.monotonic()
        for output in outputs.outputs:
            generation = link.generations.get(output.request_id)
            if generation is None:
                continue  # it was aborted or has migrated
            in_our_time(output, now - outputs.timestamp)
            try:  # not `isolated`: a context manager for each token would cost more than the rest of this loop
                taken += self._take(generation, link, output)
            except Exception as error:
                self._fail_alone(generation, error)
        self._process(taken)
        self.on_capacity()

    def _pass_on(self, held: list[tuple[Generation, EngineCoreOutput]]) -> None:
        """Hand AsyncLLM the outputs that were held back."""
        for generation, output in held:
            self._count(generation, output.new_token_ids)
        self._process([output for _, output in held])

    def _process(self, outputs: list[EngineCoreOutput]) -> None:
        if not outputs:
            return
        for request_id in self.process(EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())):
            if generation := self._generations.get(request_id):
                self._end(generation)

    def _take(self, generation: Generation, link: Link, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Record an output; return the outputs that AsyncLLM gets now."""
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            why = f"{link.instance} gave it up ({output.finish_reason})"
            self._migration.lost(generation, why, "gave-up")
            return []
        output.request_id = generation.id
        if generation.placed is not generation.recorded_placed:
            self._note_placed(generation)
        if output.prefill_stats is not None:
            self._note_cached(generation, link, output.prefill_stats)
        if generation.replay_left and not self._migration.replay(generation, output):
            return []
        if generation.tokens and output.prefill_stats is not None:
            output.events = None  # they would overwrite the times of the first engine's events
        generation.add_tokens(output.new_token_ids)
        passed = self._pacer.add(generation, generation.reserve, output, last=output.finished)
        for each in passed:
            self._count(generation, each.new_token_ids)
        if output.finished:
            generation.detach()
            unusual = generation.attempt > 1 or generation.state.is_flex or generation.is_beam
            if generation.tokens and not unusual:
                self.estimate.record(*generation.timing)
            self._end(generation)
        return passed

    def _note_placed(self, generation: Generation) -> None:
        """Copy the worker's report on the prefill into the request state, at the first output after it."""
        generation.recorded_placed = generation.placed
        generation.hops.decoding()
        if generation.placed is not None:
            generation.state.prefilled(generation.id, generation.placed)

    def _note_cached(self, generation: Generation, link: Link, stats: PrefillStats) -> None:
        count_prefix_hit(stats, generation.placed.cached if generation.placed else 0, link.block_size)
        stats.num_cached_tokens = generation.state.add_cached(generation.prompt_key, stats.num_cached_tokens)

    def _count(self, generation: Generation, tokens: list[int]) -> None:
        state = generation.state
        first = state.first_token is None
        gap = generation.count_passed(len(tokens))
        if gap is not None:
            self._itl.observe(gap)
        elif first and state.ttft is not None:
            self._ttft.observe(state.ttft)

    def finish(self, generation: Generation) -> None:
        """Finish a generation that has all its tokens but lost the output with the finish reason."""
        self._pacer.flush(generation)
        self._end(generation)
        self._process([EngineCoreOutput(generation.id, [], finish_reason=FinishReason.LENGTH)])

    def fail(self, generation: Generation, failure: RequestFailure) -> None:
        """End all generations of the HTTP request with this error for the client."""
        if held := self._pacer.drop(generation):
            self._fail_behind(held, generation, failure)
            return
        generation.state.failure = failure
        for request_id in [generation.id, *self.fail_request(generation.id, failure.message, failure.status)]:
            if other := self._generations.get(request_id):
                self._end(other)

    def _drop(self, generation: Generation) -> None:
        """End a generation whose HTTP request is over, such as another beam after one has failed: vLLM does not end
        it."""
        failure = generation.state.failure
        self.fail(generation, failure or RequestFailure(500, "its HTTP request is over"))
        generation.state.failure = failure  # None if the client has left

    def _fail_behind(
        self, held: list[EngineCoreOutput], generation: Generation, failure: RequestFailure
    ) -> None:
        """Pass on the held outputs, then fail the generation. The error is sent in the next event loop turn,
        because now it would replace the outputs in AsyncLLM's collector."""
        generation.state.failure = failure
        self._pass_on([(generation, output) for output in held])
        if generation.id in self._generations:
            self._end(generation)
        fail = partial(self.fail_request, generation.id, failure.message, failure.status)
        asyncio.get_running_loop().call_soon(fail)

    def _end(self, generation: Generation) -> None:
        """End the generation; its worker stops it."""
        self._pacer.drop(generation)
        self._leave_worker(generation)
        del self._generations[generation.id]
        self._migration.stop_waiting(generation)
        if generation.permit is not None:
            generation.permit.release()
            generation.permit = None  # else a reference cycle would wait for the garbage collector
        if not self._generations:
            self._emptied.set()
        self.on_capacity()

    def _pause(self, generation: Generation) -> bool:
        """Preempt the generation: leave the worker until the permit is granted again. Returns False, and does nothing,
        if that would free no slot for others."""
        if not (generation.placed or generation.state.is_flex) or not self.workers.accepts_requests(
            generation.link
        ):
            return False
        self._leave_worker(generation)
        generation.hops.held(PAUSED)
        return True

    def _leave_worker(self, generation: Generation) -> None:
        if link := generation.detach():
            link.post(Cancel([generation.attempt_id]))

    @contextmanager
    def isolated(self, generation: Generation) -> Iterator[None]:
        """Let an error in the block fail only the HTTP request of this generation."""
        try:
            yield
        except Exception as error:
            self._fail_alone(generation, error)

    def _fail_alone(self, generation: Generation, error: Exception) -> None:
        if isinstance(error, Unencodable | BadRequest):
            self.fail(generation, RequestFailure(400, str(error)))
            return
        logger.error("request %s failed in the frontend", generation.id, exc_info=error)
        self.fail(generation, RequestFailure(500, "internal error in the frontend"))

    # events of links (`LinkListener`)

    def link_up(self, link: Link) -> None:
        self._migration.place_waiting()
        self.on_capacity()

    def link_lost(self, link: Link, reason: str, word: str = "gone") -> None:
        if link.generations:
            logger.warning("%s: migrating %d requests from %s", reason, len(link.generations), link.instance)
        for generation in list(link.generations.values()):
            with self.isolated(generation):
                self._migration.lost(generation, reason, word)

    def hand_over(self, link: Link, *, begun: bool, stalled: bool = False) -> None:
        for generation in list(link.generations.values()):
            if self.workers.has_capacity(generation, full=stalled):
                with self.isolated(generation):
                    self._migration.hand_over(generation, begun=begun, stalled=stalled)

    def replace(self, replaced: bool) -> None:
        """Set whether another model has this name now and no worker of this one is left."""
        self._migration.is_replaced = replaced
        for generation in [waiting for waiting in self._generations.values() if waiting.link is None]:
            with self.isolated(generation):
                self._migration.redirect_if_replaced(generation)

    # for the HTTP edge

    def generations_of(self, state: RequestState) -> list[Generation]:
        return [generation for generation in self._generations.values() if generation.state is state]

    @property
    def running(self) -> int:
        """Number of generations at workers."""
        return sum(generation.link is not None for generation in self._generations.values())

    async def idle(self) -> None:
        """Wait until no generation is left."""
        while self._generations:
            self._emptied.clear()
            await self._emptied.wait()
