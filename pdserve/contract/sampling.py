"""Whether a request can continue in another engine, by its sampling parameters (vLLM's SamplingParams)."""

from typing import Any


def stateful_parameter(params: Any) -> str | None:
    """Return the name of a parameter for which the engine keeps state about the output tokens; None if there is none.
    Another engine lacks that state, so it cannot continue the request with these tokens as part of the prompt."""
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
"""Maximum of logprobs for a first token in a message: those of a whole vocabulary are too many."""


def can_split_after_first_token(params: Any) -> bool:
    """Return whether one engine may sample the first token and another the rest. Seeded sampling does not allow it: all
    tokens share one sequence of random numbers."""
    is_seeded = params.seed is not None and params.temperature != 0
    is_small = 0 <= (params.num_logprobs or 0) <= MAX_LOGPROBS
    return is_small and not (is_seeded or params.extra_args or stateful_parameter(params))
