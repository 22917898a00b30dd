"""What may go on elsewhere when a decode worker is lost, and how. The rules are explained in
docs/migration.md."""

import secrets

from pdserve.frontend.model.vllm_api import EngineCoreRequest, SamplingParams, encode_request, with_params

_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_SPACE = 1 << 63


def looks_back(params: SamplingParams) -> str | None:
    """What makes the engine look at the output tokens so far, in state that only the lost one had: such a
    request cannot go on from them as a prompt, and is replayed. None where it simply goes on."""
    checks = {
        "structured output": params.structured_outputs is not None,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "bad_words": any(len(words) > 1 for words in params.bad_words_token_ids or ()),
        "thinking_token_budget": params.thinking_token_budget is not None,
        "repetition_detection": params.repetition_detection is not None,
        "trace_decode_token_ids": bool(params.trace_decode_token_ids),
    }
    return next((name for name, applies in checks.items() if applies), None)


def repeatable(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request such that, where it has to be replayed, the same tokens come again: sampling gets a seed."""
    params = request.sampling_params
    if params is None or params.seed is not None or params.temperature == 0 or not looks_back(params):
        return request
    return with_params(request, seed=secrets.randbelow(_SEED_SPACE))


def body(request: EngineCoreRequest, wire_id: str, tokens: list[int]) -> list[bytes]:
    """The request as it travels: without its prompt, under its wire id, continuing after `tokens` or, where
    it looks back at them, from its start."""
    params = request.sampling_params
    changes: dict[str, object] = {"extra_args": _without_transfers(params.extra_args)}
    if tokens:  # the prompt's logprobs came with the first of them
        changes |= {"prompt_logprobs": None, "prompt_logprob_token_ids": None}
    if tokens and not looks_back(params):
        changes |= _continued(params, len(tokens))
    request = with_params(request, **changes)
    request.request_id = wire_id
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
    """Where KV comes from is decided by the decode worker and nobody else."""
    kept = {key: value for key, value in (extra or {}).items() if not key.endswith("_transfer_params")}
    return kept or None
