"""What becomes of a generation whose decode worker is lost or gives it up, or that finds no worker.

First the rules, which are pure, then their application. docs/migration.md explains them.
"""

import asyncio
import itertools
import logging
import secrets
import time
from typing import Protocol

from msgspec import UNSET, UnsetType

from pdserve.contract.messages import Cancel, Failed, Promise, Submit
from pdserve.contract.sampling import stateful_parameter
from pdserve.frontend.edge.request_state import NO_WORKER, RETRY_AFTER, RequestFailure, RequestState
from pdserve.frontend.sequence.generation import Generation
from pdserve.frontend.vllm.api_server import (
    EngineCoreOutput,
    EngineCoreRequest,
    SamplingParams,
    Unencodable,
    drop_tokens,
    encode_request,
    with_params,
)
from pdserve.observe.metrics import MIGRATIONS

logger = logging.getLogger(__name__)

MAX_LOSSES = 4
"""workers that may lose a request after taking it up, for any reason"""
MAX_STALLS = 2
"""stalled workers that a request leaves; it stays at the next one, because it may be what makes engines hang"""
MAX_ENGINE_DEATHS = 2
"""engines that may die in a row while they compute a request's next token. After the first death each of the requests
that were in that engine is tried again beside no other unproven request
(`decode/scheduling/quarantine.py`): the second one tells which of them kills."""
MAX_PARAMETER_BYTES = 32 << 20
"""bytes of a request's parameters, which each of its outputs takes along to a worker"""
RETRY_DELAY = 0.5
"""seconds before a worker that failed a request gets it again, if there is no other"""

HANDED_OVER, STALLED = "handed-over", "stalled"
LOSSES = ("gone", "engine-died", "failed", "gave-up", "unreadable", HANDED_OVER, STALLED)
"""why a worker lost a request, in the metric (docs/metrics.md); the last two do not count against the request"""

_BOOT = secrets.token_hex(4)
_serial = itertools.count(1)
_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_SPACE = 1 << 63


# ── the rules ──────────────────────────────────────────────────────────────────────────────────────────


def seeded_for_replay(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request, with a seed if it samples and may have to be replayed, so that the same tokens come again."""
    params = request.sampling_params
    if params.seed is not None or params.temperature == 0 or not stateful_parameter(params):
        return request
    return with_params(request, seed=secrets.randbelow(_SEED_SPACE))


def next_attempt(generation: Generation) -> Submit:
    """Prompt + tokens so far, or the prompt alone for a replay, under a new id. Raises Unencodable."""
    attempt_id = f"{generation.id}#{generation.attempt + 1}-{_BOOT}{next(_serial):x}"
    encoded, admission = (
        encode_body(generation.request, attempt_id, generation.tokens),
        generation.state.admission,
    )
    size = sum(map(len, encoded)) * (admission.size.sequences if admission is not None else 1)
    if size > MAX_PARAMETER_BYTES:
        raise Unencodable(
            f"its parameters have {size} bytes in all outputs; they may have {MAX_PARAMETER_BYTES}"
        )
    return Submit(
        attempt_id,
        generation.prompt + ([] if generation.must_replay else generation.tokens),
        max(0.0, generation.state.deadline - time.monotonic()),
        encoded,
        migrated=generation.losses > 0,
        engines_died=generation.engines_died,
        traceparent=generation.span.traceparent if generation.span is not None else "",
        client=generation.state.admission.client_hash if generation.state.admission is not None else "",
        promise=promise_left(generation),
    )


def promise_left(generation: Generation) -> Promise | UnsetType:
    """What is left of the promise. The next token of a request that has some is due a gap after those before, which may
    still be held back."""
    promised, state = generation.state.promised, generation.state
    if not promised:
        return UNSET
    since, within = state.started, promised.ttft
    if generation.tokens:
        since, within = generation.last_passed or time.monotonic(), promised.gap
        if within is not None and generation.reserve is not None:
            within *= 1 + len(generation.reserve)
    return Promise(None if within is None else since + within - time.monotonic(), promised.gap)


def encode_body(request: EngineCoreRequest, attempt_id: str, tokens: list[int]) -> list[bytes]:
    """Encode the request as the worker gets it: without its prompt, under the attempt's id, going on after `tokens` or,
    for sampling that looks back at them, from its start. Raises Unencodable."""
    params = request.sampling_params
    changes: dict[str, object] = {"extra_args": _without_transfers(params.extra_args)}
    if tokens:  # the prompt's logprobs came with the first of them
        changes |= {"prompt_logprobs": None, "prompt_logprob_token_ids": None}
    if tokens and not stateful_parameter(params):
        changes |= _continued(params, len(tokens))
    request = with_params(request, **changes)
    request.request_id = attempt_id
    request.prompt_token_ids = None
    return encode_request(request)


def _continued(params: SamplingParams, done: int) -> dict[str, object]:
    changes: dict[str, object] = {
        "max_tokens": params.max_tokens - done,
        "min_tokens": max(0, params.min_tokens - done),
    }
    if params.seed is not None:  # the same seed again would repeat the random numbers already used
        changes["seed"] = (params.seed + done * _SEED_STEP) % _SEED_SPACE
    return changes


def _without_transfers(extra: dict[str, object] | None) -> dict[str, object] | None:
    """The decode worker alone decides where KV comes from."""
    kept = {key: value for key, value in (extra or {}).items() if not key.endswith("_transfer_params")}
    return kept or None


def loss_limit_failure(generation: Generation) -> RequestFailure | None:
    """Why a lost generation is not tried again; None if it is."""
    died, losses = generation.engines_died, generation.losses
    if died >= MAX_ENGINE_DEATHS:
        why = f"{died} engines in a row died while they computed this request's next token"
        return RequestFailure(500, f"{why}; it is not tried again (the last: {generation.last_loss})")
    if losses >= MAX_LOSSES:
        why = f"{losses} decode workers lost this request; the last: {generation.last_loss}"
        return RequestFailure(503, why, RETRY_AFTER)
    return None


# ── their application ──────────────────────────────────────────────────────────────────────────────────


class GenerationOwner(Protocol):
    """What a migration comes to, as `RemoteCore` does it."""

    def place(self, generation: Generation, *, only_others: bool = False) -> None: ...

    def finish(self, generation: Generation) -> None: ...

    def fail(self, generation: Generation, failure: RequestFailure) -> None: ...

    def generations_of(self, state: RequestState) -> list[Generation]: ...


class Migration:
    """Takes over a model's generations that have lost their worker or found none, until they are placed at another
    worker, finished or failed."""

    def __init__(self, core: GenerationOwner, model: str, max_model_len: int) -> None:
        self.is_replaced = False
        """another model has this one's name, and no worker is left here"""
        self._core = core
        self._model = model
        self._moved = {word: MIGRATIONS.labels(model, word) for word in LOSSES}  # from 0 on
        self._max_model_len = max_model_len
        self.waiting: dict[Generation, list[asyncio.TimerHandle]] = {}
        """generations that wait for a worker, until their deadline"""

    # the worker is lost

    def failed(self, generation: Generation, failed: Failed) -> None:
        """Handle a worker's report that it will not finish the generation."""
        assert generation.link is not None
        generation.engines_died = max(generation.engines_died, failed.engines_died)
        if failed.retry:
            instance = f"{generation.link.instance}: " if failed.engines_died else ""
            self.lost(
                generation, instance + failed.message, "engine-died" if failed.engines_died else "failed"
            )
            return
        late = time.monotonic() >= generation.state.deadline
        status = 400 if failed.invalid else 504 if late else 500
        self._core.fail(generation, RequestFailure(status, failed.message))

    def lost(self, generation: Generation, reason: str, word: str) -> None:
        """Finish a lost generation here if it is complete, fail it, or go on at another worker. `word`: of `LOSSES`."""
        link = generation.detach(reason)
        if link is None:
            return  # it has ended together with a sibling (n > 1)
        generation.lost_by.add(link.instance)
        generation.losses += generation.placed is not None and word not in (HANDED_OVER, STALLED)
        generation.last_loss = reason
        if generation.tokens and generation.is_complete(self._max_model_len):
            self._core.finish(generation)
        elif failure := loss_limit_failure(generation):
            self._core.fail(generation, failure)
        else:
            self._moved[word].inc()
            generation.hops.migrated(reason)
            generation.state.retries += 1
            tokens = len(generation.tokens)
            logger.info("request %s goes on elsewhere after %d tokens: %s", generation.id, tokens, reason)
            self._core.place(generation, only_others=True)

    def replay(self, generation: Generation, output: EngineCoreOutput) -> bool:
        """Compare the output with the tokens that the client already has, and take these out of it; whether anything is
        left. Fail the generation if the worker generates other tokens."""
        again = min(generation.replay_left, len(output.new_token_ids))
        start = len(generation.tokens) - generation.replay_left
        same = output.new_token_ids[:again] == generation.tokens[start : start + again]
        generation.replay_left -= again
        if not same or (output.finished and generation.replay_left):
            why = f"{generation.last_loss}, and another worker's answer began differently; send it again"
            self._core.fail(generation, RequestFailure(503, why, 1.0))
            return False
        drop_tokens(output, again)
        return bool(output.new_token_ids) or output.finished

    # its worker stood in and a decode worker is back, or its worker is stalled

    def hand_over(self, generation: Generation, *, begun: bool, stalled: bool) -> None:
        """Move a generation to another worker; one that has tokens of this worker only if `begun`, and never one that
        would have to be replayed, or has left `MAX_STALLS` stalled workers."""
        stays = generation.last_token_at > generation.sent_at and (generation.must_replay or not begun)
        stays |= stalled and generation.stalls >= MAX_STALLS
        if (link := generation.link) is not None and not stays:
            link.post(Cancel([generation.attempt_id]))
            generation.stalls += stalled
            why = (
                (f"{link.instance} is stalled", STALLED)
                if stalled
                else ("a decode worker is back", HANDED_OVER)
            )
            self.lost(generation, *why)

    # no worker is there

    def wait(self, generation: Generation, *, retry: bool) -> None:
        """Wait for a worker until the deadline. With `retry`, also try the workers that lost it after `RETRY_DELAY`."""
        loop, timers = asyncio.get_running_loop(), self.waiting.setdefault(generation, [])
        if not timers:
            left = max(0.0, generation.state.deadline - time.monotonic())
            timers.append(loop.call_later(left, self._give_up, generation))
        generation.hops.held(NO_WORKER)
        if retry:
            timers.append(loop.call_later(RETRY_DELAY, self._core.place, generation))
        self.redirect_if_replaced(generation)

    def place_waiting(self) -> None:
        """Place the waiting generations: a worker has come."""
        for generation in list(self.waiting):
            if generation in self.waiting:  # it may have ended together with a sibling (n > 1)
                self._core.place(generation)

    def stop_waiting(self, generation: Generation) -> None:
        for timer in self.waiting.pop(generation, ()):
            timer.cancel()

    def _give_up(self, generation: Generation) -> None:
        self._core.fail(generation, RequestFailure.no_worker(self._model, generation.last_loss))

    def redirect_if_replaced(self, generation: Generation) -> None:
        """If the model is replaced, end a request that has no token and no worker, with its siblings (n, several
        prompts), so that the other model serves it. A request at which an engine died is not tried there: those workers
        would count its victims from 0 again. A request that has tokens waits for another worker of its own model."""
        state = generation.state
        if not self.is_replaced or state.first_token:
            return
        siblings = self._core.generations_of(state)
        if generation in siblings and not any(sibling.link for sibling in siblings):
            suspect = any(sibling.engines_died for sibling in siblings)
            self._core.fail(generation, RequestFailure.model_replaced(self._model, redirect=not suspect))
