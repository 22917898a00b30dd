"""Migration: continue a generation at another decode worker after its worker is lost or gives it up; wait while there
is no other.

`next_attempt` makes the `Submit` message of each attempt, the first one included. The pure rules come first, then
`Migration`, which applies them. docs/migration.md explains them.
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
"""A request fails when this many workers have accepted and lost it. `HANDED_OVER` and `STALLED` do not count."""
MAX_STALLS = 2
"""A request leaves this many stalled workers, and stays at the next one, because it may be what stalls them."""
MAX_ENGINE_DEATHS = 2
"""A request fails when this many engines in a row have died while they computed its next token. After the first death,
it is retried without other suspects beside it (`decode/scheduling/quarantine.py`), so the second death shows that it
kills engines."""
MAX_PARAMETER_BYTES = 32 << 20
"""Maximum of bytes in a request's sampling parameters, summed over its sequences."""
RETRY_DELAY = 0.5
"""Seconds before a worker that failed a request gets it again, if there is no other worker."""

HANDED_OVER, STALLED = "handed-over", "stalled"
LOSSES = ("gone", "engine-died", "failed", "gave-up", "unreadable", HANDED_OVER, STALLED)
"""Reasons in the migration metric (docs/metrics.md). The last two do not count as losses of the request."""

_BOOT = secrets.token_hex(4)
_serial = itertools.count(1)
_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_SPACE = 1 << 63


# ── the rules ──────────────────────────────────────────────────────────────────────────────────────────


def seeded_for_replay(request: EngineCoreRequest) -> EngineCoreRequest:
    """Add a seed to a request that samples without one and may be replayed, so that a replay gives equal tokens."""
    params = request.sampling_params
    if params.seed is not None or params.temperature == 0 or not stateful_parameter(params):
        return request
    return with_params(request, seed=secrets.randbelow(_SEED_SPACE))


def next_attempt(generation: Generation) -> Submit:
    """Make the message that sends a generation to a worker: prompt and tokens so far (for a replay, only the prompt)
    under a new attempt id. Raises Unencodable."""
    attempt_id = f"{generation.id}#{generation.attempt + 1}-{_BOOT}{next(_serial):x}"
    encoded = encode_body(generation.request, attempt_id, generation.tokens)
    admission = generation.state.admission
    size = sum(map(len, encoded)) * (admission.size.sequences if admission is not None else 1)
    if size > MAX_PARAMETER_BYTES:
        raise Unencodable(
            f"the parameters of all outputs have {size} bytes; they may have {MAX_PARAMETER_BYTES}"
        )
    return Submit(
        attempt_id,
        generation.prompt + ([] if generation.must_replay else generation.tokens),
        max(0.0, generation.state.deadline - time.monotonic()),
        encoded,
        migrated=generation.losses > 0,
        engines_died=generation.engines_died,
        traceparent=generation.span.traceparent if generation.span is not None else "",
        client=admission.client_hash if admission is not None else "",
        promise=promise_left(generation),
    )


def promise_left(generation: Generation) -> Promise | UnsetType:
    """Return the time left until the next token is due by the promise. After the first token, each output that is held
    back adds a promised gap."""
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
    """Encode the request for a worker: under the attempt's id, without its prompt, and with the parameters that
    continue after `tokens`. If sampling depends on earlier tokens, the parameters stay as at the start. Raises
    Unencodable."""
    params = request.sampling_params
    changes: dict[str, object] = {"extra_args": _without_transfers(params.extra_args)}
    if tokens:  # the prompt's logprobs came with the first token
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
    if params.seed is not None:  # the same seed would repeat the random numbers used so far
        changes["seed"] = (params.seed + done * _SEED_STEP) % _SEED_SPACE
    return changes


def _without_transfers(extra: dict[str, object] | None) -> dict[str, object] | None:
    """Remove KV transfer parameters of the client, because only the decode worker decides where KV comes from."""
    kept = {key: value for key, value in (extra or {}).items() if not key.endswith("_transfer_params")}
    return kept or None


def loss_limit_failure(generation: Generation) -> RequestFailure | None:
    """Return the failure of a generation that was lost too often to be retried; None if it may be retried."""
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
    """The part of `RemoteCore` that a migration calls."""

    def place(self, generation: Generation, *, only_others: bool = False) -> None: ...

    def finish(self, generation: Generation) -> None: ...

    def fail(self, generation: Generation, failure: RequestFailure) -> None: ...

    def generations_of(self, state: RequestState) -> list[Generation]: ...


class Migration:
    """Handles a model's generations that have lost their worker or wait for one."""

    def __init__(self, core: GenerationOwner, model: str, max_model_len: int) -> None:
        self.is_replaced = False
        """another model now has this one's name, and no worker of this one is left"""
        self._core = core
        self._model = model
        self._moved = {word: MIGRATIONS.labels(model, word) for word in LOSSES}  # all series start at 0
        self._max_model_len = max_model_len
        self.waiting: dict[Generation, list[asyncio.TimerHandle]] = {}
        """generations that wait for a worker, with the timers of their deadline and of retries"""

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
        """Finish a lost generation if it is complete, fail it if it was lost too often, or place it at another worker.
        `word`: one of `LOSSES`."""
        link = generation.detach(reason)
        if link is None:
            return  # it ended together with a sibling (n > 1)
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
            logger.info("request %s migrates after %d tokens: %s", generation.id, tokens, reason)
            self._core.place(generation, only_others=True)

    def replay(self, generation: Generation, output: EngineCoreOutput) -> bool:
        """Remove from a replayed output the tokens that the client already has; return whether anything is left. Fail
        the generation if the worker generates other tokens."""
        again = min(generation.replay_left, len(output.new_token_ids))
        start = len(generation.tokens) - generation.replay_left
        same = output.new_token_ids[:again] == generation.tokens[start : start + again]
        generation.replay_left -= again
        if not same or (output.finished and generation.replay_left):
            why = f"{generation.last_loss}, and another worker generated other tokens; send the request again"
            self._core.fail(generation, RequestFailure(503, why, 1.0))
            return False
        drop_tokens(output, again)
        return bool(output.new_token_ids) or output.finished

    # the worker was a stand-in and a decode worker is back, or the worker is stalled

    def hand_over(self, generation: Generation, *, begun: bool, stalled: bool) -> None:
        """Move a generation to another worker if it has no token of this attempt. `begun`: move it even with tokens,
        unless it must be replayed. No generation leaves more than `MAX_STALLS` stalled workers."""
        stays = generation.last_token_at > generation.sent_at and (generation.must_replay or not begun)
        stays |= stalled and generation.stalls >= MAX_STALLS
        if (link := generation.link) is not None and not stays:
            link.post(Cancel([generation.attempt_id]))
            generation.stalls += stalled
            if stalled:
                self.lost(generation, f"{link.instance} is stalled", STALLED)
            else:
                self.lost(generation, "a decode worker is back", HANDED_OVER)

    # no worker is available

    def wait(self, generation: Generation, *, retry: bool) -> None:
        """Wait for a worker until the deadline. With `retry`, workers that lost it may get it again after
        `RETRY_DELAY`."""
        loop, timers = asyncio.get_running_loop(), self.waiting.setdefault(generation, [])
        if not timers:
            left = max(0.0, generation.state.deadline - time.monotonic())
            timers.append(loop.call_later(left, self._give_up, generation))
        generation.hops.held(NO_WORKER)
        if retry:
            timers.append(loop.call_later(RETRY_DELAY, self._core.place, generation))
        self.redirect_if_replaced(generation)

    def place_waiting(self) -> None:
        """Place the waiting generations, because a worker became available."""
        for generation in list(self.waiting):
            if generation in self.waiting:  # it may have ended together with a sibling (n > 1)
                self._core.place(generation)

    def stop_waiting(self, generation: Generation) -> None:
        for timer in self.waiting.pop(generation, ()):
            timer.cancel()

    def _give_up(self, generation: Generation) -> None:
        self._core.fail(generation, RequestFailure.no_worker(self._model, generation.last_loss))

    def redirect_if_replaced(self, generation: Generation) -> None:
        """If the model is replaced, end all sequences of a request that has no token and no worker: the edge then sends
        it to the new model. A suspect fails instead, because the new model's workers would count engine deaths
        from 0."""
        state = generation.state
        if not self.is_replaced or state.first_token:
            return
        siblings = self._core.generations_of(state)
        if generation in siblings and not any(sibling.link for sibling in siblings):
            suspect = any(sibling.engines_died for sibling in siblings)
            self._core.fail(generation, RequestFailure.model_replaced(self._model, redirect=not suspect))
