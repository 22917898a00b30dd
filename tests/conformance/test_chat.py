"""`/v1/chat/completions` and `/v1/chat/completions/batch`: what is answered."""

from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT, long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

CHAT, BATCH = "/v1/chat/completions", "/v1/chat/completions/batch"
STREAM: dict[str, Any] = {"stream": True}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def chat(name: str, prompt: str = SHORT, path: str = CHAT, **fields: Any) -> Request:
    messages = [{"role": "user", "content": prompt}]
    return Request(f"chat {name}", path, {"model": "demo", "messages": messages, "max_tokens": 8, **fields})


BIG_BIAS = {str(token): -100 for token in range(300, 500)}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": STREAM,
    "stream with usage": USAGE,
    "stream with continuous usage": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "n": {"n": 3},
    "n, streamed": {"n": 3, **USAGE},
    "no bound": {"max_tokens": None, "stop": ["."]},
    "stop": {"stop": ["1", "2", "3"]},
    "stop, streamed": {"stop": ["1", "2", "3"], **STREAM},
    "stop, kept": {"stop": ["e"], "include_stop_str_in_output": True},
    "stop tokens": {"stop_token_ids": list(range(0, 1024, 2))},
    "min_tokens": {"stop_token_ids": list(range(0, 1024, 2)), "min_tokens": 4},
    "logit_bias": {"logit_bias": BIG_BIAS},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 24},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "seed": {"temperature": 1.0, "seed": 7},
    "top_p and top_k": {"temperature": 1.0, "seed": 8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "both bounds": {"max_tokens": 3, "max_completion_tokens": 5},
    "token ids": {"return_token_ids": True},
    "token ids, streamed": {"return_token_ids": True, **STREAM},
    "tokens as ids": {"return_tokens_as_token_ids": True, "logprobs": True},
    "skip no special tokens": {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 24},
    "no spaces between": {"spaces_between_special_tokens": False},
    "bad words": {"bad_words": ["1", "2"]},
    "allowed tokens": {"allowed_token_ids": list(range(300, 400))},
    "user and metadata": {"user": "me", "metadata": {"a": "b"}, "store": False},
    "service tier": {"service_tier": "auto"},
    "unknown field": {"no_such_field": 1},
    "echo": {"echo": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 20},
    "no special tokens": {"add_special_tokens": True},
    "template arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "no generation prompt": {"add_generation_prompt": False},
    "request id": {"request_id": "my-own-id"},
    "priority": {"priority": 0},
    "detokenize": {"detokenize": False},
    "length penalty": {"length_penalty": 1.5},
    "reasoning effort": {"reasoning_effort": "low"},
    "no reasoning": {"include_reasoning": False},
    "parallel tools": {"parallel_tool_calls": False},
}

LOCAL = {"echo", "prompt_logprobs", "truncate_prompt_tokens"}
"""prefilled where they are decoded, however long"""

MESSAGES: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": "Be short."}, {"role": "user", "content": SHORT}],
    "developer": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": SHORT}],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "it?"}]}
    ],
    "turns": [
        {"role": "user", "content": "The code of the red box is 4711."},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": SHORT},
    ],
    "names": [{"role": "user", "name": "me", "content": SHORT}],
    "empty content": [{"role": "user", "content": ""}],
    "no content": [{"role": "user", "content": SHORT}, {"role": "assistant", "content": None}],
    "unicode": [{"role": "user", "content": "äöü 漢字 🙂 \u0000 \u200b"}],
    "odd role": [{"role": "stranger", "content": SHORT}],
    "assistant last": [{"role": "user", "content": SHORT}, {"role": "assistant", "content": "The code is"}],
}
REQUESTS = [
    *(chat(f"{name}, {size}", prompt if size == "short" else long(name), **fields)
      for name, fields in VARIANTS.items() for size, prompt in (("short", SHORT), ("long", ""))),
    *(chat(f"messages: {name}", messages=messages) for name, messages in MESSAGES.items()),
    chat("continued", messages=MESSAGES["assistant last"], continue_final_message=True, add_generation_prompt=False),
    chat("continued, echo", messages=MESSAGES["assistant last"], continue_final_message=True,
         add_generation_prompt=False, echo=True, **STREAM),
    chat("batch", path=BATCH, messages=[[{"role": "user", "content": text}] for text in (SHORT, long("batch"))]),
    chat("batch of one", path=BATCH, messages=[[{"role": "user", "content": SHORT}]]),
    chat("batch, streamed", path=BATCH, messages=[[{"role": "user", "content": SHORT}]], **STREAM),
    chat("batch, flat", path=BATCH),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_chat(pair: Pair, request_: Request) -> None:
    ours = pair.same(request_)
    name = request_.name.removeprefix("chat ")
    if ours.status == 200 and name.endswith(", long") and name.removesuffix(", long") not in LOCAL:
        pair.remote(ours)


def test_ids_are_made_from_the_request_id(pair: Pair) -> None:
    ours, theirs = pair.both(Request("id", CHAT, chat("id").json, headers={"x-request-id": "my-own"}))
    assert ours.response.json()["id"] == theirs.response.json()["id"] == "chatcmpl-my-own"
