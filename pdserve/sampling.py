"""What sampling parameters say of a request that goes on in another engine, after tokens that it has already. They are
vLLM's SamplingParams, which need not be imported for this."""

from typing import Any


def looks_back(params: Any) -> str | None:
    """What makes the engine look at the output tokens so far, in state that no other engine has: such a request cannot
    go on from them as from a longer prompt. None where it simply goes on."""
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


MAX_LOGPROBS = 20
"""of a first token that crosses the queue: a message holds no whole vocabulary's"""


def first_elsewhere(params: Any) -> bool:
    """Whether the first token may be sampled in one engine and the others in another: not where they share random
    numbers, either, or where a plugin has parameters of its own."""
    drawn = params.seed is not None and params.temperature != 0
    small = 0 <= (params.num_logprobs or 0) <= MAX_LOGPROBS
    return small and not (drawn or params.extra_args or looks_back(params))
