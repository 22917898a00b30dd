"""Requests that are refused before vLLM runs them: no worker can serve them, or their grammar would kill the process
that compiles it. Pure."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from vllm.v1.engine import EngineCoreRequest

MAX_PROMPT_LOGPROBS = 500_000
"""Maximum of prompt logprobs of a request. A response holds them all at once, some 50 bytes each."""
VOCABULARY_SIZE = 100_000
"""Assumed number of logprobs per token for -1, which asks for the whole vocabulary."""
MIN_UPPER_BOUND = -9.2e18
"""Smallest upper bound of an integer range in a schema. If the bound is near the smallest 64-bit integer, llguidance
recurses until the process crashes. (vLLM uses llguidance if xgrammar refuses a schema.)"""
_UPPER = ("maximum", "exclusiveMaximum")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def fatal_grammar(params: Any) -> tuple[str, str] | None:
    """Return the field of the sampling parameters that must be refused, and the reason; None if there is none."""
    asked = params.structured_outputs
    if asked and (why := _schema_problem(asked.json, asked.structural_tag) or _lark_problem(asked.grammar)):
        return "structured_outputs", why
    if any(map(_SURROGATE.search, params.bad_words or ())):  # vLLM answers 500
        return "bad_words", "bad_words must be Unicode text"
    return None


def _schema_problem(*schemas: object) -> str:
    """Why one of these JSON schemas or structural tags (objects or text) must be refused; empty if none must."""
    for schema in schemas:
        for name, value in _bounds(_read(schema)):
            if value < MIN_UPPER_BOUND:
                return f"a JSON schema's {name} must not be below {MIN_UPPER_BOUND:g}"
    return ""


def _lark_problem(grammar: object) -> str:
    """Why a Lark grammar must be refused; empty if it need not be. It may contain schemas (`%json`). Checks all numbers
    rather than the bounds, because escapes can hide the bounds' names."""
    numbers = _NEGATIVE.findall(grammar) if isinstance(grammar, str) else ()
    if any(float(number) < MIN_UPPER_BOUND for number in numbers):
        return f"a grammar's numbers must not be below {MIN_UPPER_BOUND:g}"
    return ""


def _read(schema: object) -> object:
    if isinstance(schema, str):
        with suppress(ValueError, RecursionError):
            return json.loads(schema)
    return schema


def _bounds(schema: object) -> Iterator[tuple[str, int | float]]:
    """Yield all upper bounds in a schema. Does not recurse, because a client may nest it arbitrarily deep."""
    unread = [schema]
    while unread:
        part = unread.pop()
        if isinstance(part, Mapping):
            unread += part.values()
            for name in _UPPER:
                value = part.get(name)
                if isinstance(value, int | float):
                    yield name, value
        elif isinstance(part, list):
            unread += part


def unsupported(request: EngineCoreRequest, prompt_tokens: int, n: int) -> str | None:
    """Why no worker can serve the request; None if one can. `prompt_tokens`: of the HTTP request's prompts so far."""
    kinds = {feature.modality for feature in request.mm_features or ()} - {"image"}
    if kinds or request.prompt_embeds is not None:
        return "only text and images are served: audio, video and prompt embeddings are not"
    if request.sampling_params is None:
        return "this model generates text: pooling and embedding requests are not served"
    if request.resumable:
        return "streaming input is not served"
    if (count := request.sampling_params.prompt_logprobs) is not None:
        count = VOCABULARY_SIZE if count < 0 else count
        if (logprobs := prompt_tokens * (count + 1) * n) > MAX_PROMPT_LOGPROBS:
            text = f"prompt tokens x (logprobs + 1) x n make {logprobs} logprobs of the prompt"
            return f"{text}; one request may have {MAX_PROMPT_LOGPROBS}"
    return None
