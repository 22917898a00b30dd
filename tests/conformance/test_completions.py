"""`/v1/completions`: what is answered."""

from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT, ids, long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PATH = "/v1/completions"
STREAM: dict[str, Any] = {"stream": True}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def completion(name: str, prompt: Any = SHORT, **fields: Any) -> Request:
    return Request(f"completion {name}", PATH, {"model": "demo", "prompt": prompt, "max_tokens": 8, **fields})


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": STREAM,
    "stream with usage": USAGE,
    "stream with continuous usage": CONTINUOUS,
    "echo": {"echo": True},
    "echo, streamed": {"echo": True, **STREAM},
    "echo only": {"echo": True, "max_tokens": 0},
    "n": {"n": 3},
    "n, streamed": {"n": 3, **USAGE},
    "n and echo": {"n": 2, "echo": True},
    "best_of": {"best_of": 1},
    "no bound": {"max_tokens": None},
    "one token": {"max_tokens": 1},
    "one token, streamed": {"max_tokens": 1, **USAGE},
    "no token": {"max_tokens": 0},
    "stop": {"stop": ["1", "2", "3"]},
    "stop, streamed": {"stop": ["1", "2", "3"], **STREAM},
    "stop, kept": {"stop": ["e"], "include_stop_str_in_output": True},
    "stop tokens": {"stop_token_ids": list(range(0, 1024, 2))},
    "stop tokens, streamed": {"stop_token_ids": list(range(0, 1024, 2)), **USAGE},
    "min_tokens": {"stop_token_ids": list(range(0, 1024, 2)), "min_tokens": 4},
    "logit_bias": {"logit_bias": {str(token): -100 for token in range(300, 500)}},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 24},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "seed": {"temperature": 1.0, "seed": 7},
    "top_p and top_k": {"temperature": 1.0, "seed": 8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "token ids": {"return_token_ids": True},
    "token ids, streamed": {"return_token_ids": True, **STREAM},
    "no special tokens": {"add_special_tokens": False},
    "all special tokens": {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 24},
    "truncated": {"truncate_prompt_tokens": 20},
    "truncated from the right": {"truncate_prompt_tokens": 20, "truncation_side": "right"},
    "truncated to the context": {"truncate_prompt_tokens": -1},
    "bad words": {"bad_words": ["1", "2"]},
    "allowed tokens": {"allowed_token_ids": list(range(300, 400))},
    "user": {"user": "me"},
    "unknown field": {"no_such_field": 1},
    "request id": {"request_id": "my-own-id"},
    "structured": {"structured_outputs": {"choice": ["red", "blue"]}},
    "response format": {"response_format": {"type": "json_object"}, "max_tokens": 12},
    "prompt logprobs": {"prompt_logprobs": 1},
    "salt": {"cache_salt": "salt"},
    "repetition detection": {
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
        "max_tokens": 32,
    },
}
LOCAL = {
    "echo",
    "echo, streamed",
    "echo only",
    "n and echo",
    "prompt logprobs",
    "truncated",
    "truncated from the right",
}
"""prefilled where they are decoded, however long"""
PROMPTS: dict[str, Any] = {
    "texts": [SHORT, "The code of"],
    "long texts": [long("a"), long("b"), SHORT],
    "ids": ids("short", 20),
    "long ids": ids("long"),
    "lists of ids": [ids("x", 20), ids("y")],
    "list of one text": [SHORT],
    "one token": [300],
    "unicode": "äöü 漢字 🙂 \u0000 \u200b",
    "whitespace": "  \n\t ",
    "the longest": ids("longest", 4088),
}
REQUESTS = [
    *(
        completion(f"{name}, {size}", prompt, **fields)
        for name, fields in VARIANTS.items()
        for size, prompt in (("short", SHORT), ("long", long(name)))
    ),
    *(completion(f"prompt: {name}", prompt) for name, prompt in PROMPTS.items()),
    *(completion(f"prompt, streamed: {name}", prompt, **USAGE) for name, prompt in PROMPTS.items()),
    completion("texts and n, streamed", [SHORT, "The code of"], n=2, **USAGE),
    completion("texts and echo", [SHORT, "The code of"], echo=True),
    completion("no model", model=None),
    completion("empty model", model=""),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_completion(pair: Pair, request_: Request) -> None:
    ours = pair.same(request_)
    name = request_.name.removeprefix("completion ")
    if ours.status == 200 and name.endswith(", long") and name.removesuffix(", long") not in LOCAL:
        pair.remote(ours)


def test_an_old_prompt_comes_from_the_cache(pair: Pair) -> None:
    """Again, and with another end: nothing that a client sees says from where the rest came."""
    prompt = ids("again", 320)
    for end in ([], [300], [301, 302]):
        pair.same(completion("again", [*prompt, *end], **USAGE))


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_long_prompt_locally_and_remotely(pair: Pair, stream: bool) -> None:
    assert pair.same(completion("length", ids(f"{stream}", 120), stream=stream)).prefill == "local"
    pair.remote(pair.same(completion("length", ids(f"{stream}", 300), stream=stream)))
