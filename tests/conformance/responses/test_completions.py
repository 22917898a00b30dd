"""Responses of `/v1/chat/completions`, its batches, and `/v1/completions`. (Combinations of sampling, stop and output
options: `test_mixed.py`.)"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.asking import CHAT, COMPLETIONS, Body
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT, ids, long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

BATCH = f"{CHAT}/batch"
STREAM: Body = {"stream": True}
USAGE: Body = {"stream": True, "stream_options": {"include_usage": True}}


def chat(name: str, prompt: str = SHORT, path: str = CHAT, **fields: Any) -> Request:
    messages = [{"role": "user", "content": prompt}]
    return Request(f"chat {name}", path, {"model": "demo", "messages": messages, "max_tokens": 8, **fields})


def completion(name: str, prompt: Any = SHORT, **fields: Any) -> Request:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 8, **fields}
    return Request(f"completion {name}", COMPLETIONS, body)


BOTH: dict[str, Body] = {
    "plain": {},
    "stream": STREAM,
    "stream with usage": USAGE,
    "echo": {"echo": True},
    "truncated": {"truncate_prompt_tokens": 20},
    "unknown field": {"no_such_field": 1},
    "request id": {"request_id": "my-own-id"},
}
OF_CHAT: dict[str, Body] = {
    "no bound": {"max_tokens": None, "stop": ["."]},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "both bounds": {"max_tokens": 3, "max_completion_tokens": 5},
    "no spaces between": {"spaces_between_special_tokens": False},
    "special tokens": {"add_special_tokens": True},
    "template arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "no generation prompt": {"add_generation_prompt": False},
    "detokenize": {"detokenize": False},
    "length penalty": {"length_penalty": 1.5},
    "reasoning effort": {"reasoning_effort": "low"},
    "no reasoning": {"include_reasoning": False},
}
OF_COMPLETIONS: dict[str, Body] = {
    "echo only": {"echo": True, "max_tokens": 0},
    "best_of": {"best_of": 1},
    "no bound": {"max_tokens": None},
    "one token, streamed": {"max_tokens": 1, **USAGE},
    "no token": {"max_tokens": 0},
    "no special tokens": {"add_special_tokens": False},
    "truncated from the right": {"truncate_prompt_tokens": 20, "truncation_side": "right"},
    "truncated to the context": {"truncate_prompt_tokens": -1},
    "response format": {"response_format": {"type": "json_object"}, "max_tokens": 12},
    "repetition detection": {
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
        "max_tokens": 32,
    },
}
LOCAL = {"echo", "echo only", "truncated", "truncated from the right"}
"""Cases that are prefilled locally, even with a long prompt."""

MESSAGES: dict[str, list[Body]] = {
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


def of_both_sizes() -> Iterator[Request]:
    kinds: dict[Callable[..., Request], dict[str, Body]] = {chat: OF_CHAT, completion: OF_COMPLETIONS}
    for make, own in kinds.items():
        for name, fields in (BOTH | own).items():
            yield make(f"{name}, short", SHORT, **fields)
            yield make(f"{name}, long", long(name), **fields)


REQUESTS = [
    *of_both_sizes(),
    *(chat(f"messages: {name}", messages=messages) for name, messages in MESSAGES.items()),
    chat("continued", messages=MESSAGES["assistant last"], continue_final_message=True, add_generation_prompt=False),
    chat("continued, echo", messages=MESSAGES["assistant last"], continue_final_message=True,
         add_generation_prompt=False, echo=True, **STREAM),
    chat("batch", path=BATCH, messages=[[{"role": "user", "content": text}] for text in (SHORT, long("batch"))]),
    chat("batch of one", path=BATCH, messages=[[{"role": "user", "content": SHORT}]]),
    chat("batch, streamed", path=BATCH, messages=[[{"role": "user", "content": SHORT}]], **STREAM),
    chat("batch, flat", path=BATCH),
    *(completion(f"prompt: {name}", prompt) for name, prompt in PROMPTS.items()),
    *(completion(f"prompt, streamed: {name}", prompt, **USAGE) for name, prompt in PROMPTS.items()),
    completion("texts and echo", [SHORT, "The code of"], echo=True),
    Request("chat with the id of its header", CHAT, chat("").json, headers={"x-request-id": "my-own"}),
    completion("no model", model=None),
    completion("empty model", model=""),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_responses_equal_vllms(pair: Pair, request_: Request) -> None:
    ours = pair.same(request_)
    name = request_.name.partition(" ")[2]
    if ours.status == 200 and name.endswith(", long") and name.removesuffix(", long") not in LOCAL:
        pair.remote(ours)


def test_a_cached_prompt_gets_the_same_response(pair: Pair) -> None:
    """The prompts share 320 tokens."""
    prompt = ids("again", 320)
    for end in ([], [300], [301, 302]):
        pair.same(completion("again", [*prompt, *end], **USAGE))
