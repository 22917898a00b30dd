"""Responses and stream events of `/v1/responses`, `/v1/messages` and its `count_tokens`, `/tokenize`, `/detokenize` and
`/generative_scoring`."""

from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.asking import MESSAGES, RESPONSES, Body
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT, long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

COUNT = f"{MESSAGES}/count_tokens"
HELLO: list[Body] = [{"role": "user", "content": SHORT}]


def response(name: str, **fields: Any) -> Request:
    body = {"model": "demo", "input": SHORT, "max_output_tokens": 16, "store": False, **fields}
    return Request(f"response {name}", RESPONSES, body)


def message(name: str, **fields: Any) -> Request:
    body = {"model": "demo", "messages": HELLO, "max_tokens": 8, **fields}
    return Request(f"message {name}", MESSAGES, body)


def count(name: str, **fields: Any) -> Request:
    return Request(f"count {name}", COUNT, {"model": "demo", "messages": HELLO, **fields})


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


OF_RESPONSES: dict[str, Body] = {
    "plain": {},
    "long": {"input": long("responses")},
    "instructions": {"instructions": "Be short."},
    "items": {"input": [{"role": "user", "content": SHORT}]},
    "content parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": SHORT}]}]},
    "turns": {
        "input": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "The code of the red box is 4711."},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "output_text", "text": "I see.", "annotations": []}]},
            {"role": "user", "content": SHORT},
        ]
    },
    "developer": {"input": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": SHORT}]},
    "no bound": {"max_output_tokens": None},
    "metadata": {"metadata": {"a": "b"}, "user": "me"},
    "request id": {"request_id": "resp_my-own"},
    "unknown field": {"no_such_field": 1},
    "stored": {"store": True},
    "messages too": {"enable_response_messages": True},
}  # fmt: skip
CONVERSATIONS: dict[str, Body] = {
    "plain": {},
    "long": {"messages": [{"role": "user", "content": long("messages")}]},
    "system": {"system": "Be short."},
    "system blocks": {"system": [text("Be short."), text("Be kind.")]},
    "cached system": {"system": [{**text("Be short."), "cache_control": {"type": "ephemeral"}}]},
    "blocks": {"messages": [{"role": "user", "content": [text("What is"), text("the code?")]}]},
    "turns": {
        "messages": [
            {"role": "user", "content": "The code of the red box is 4711."},
            {"role": "assistant", "content": [text("I see.")]},
            {"role": "user", "content": SHORT},
        ]
    },
    "begun": {"messages": [*HELLO, {"role": "assistant", "content": "The code is"}]},
    "empty": {"messages": [{"role": "user", "content": ""}]},
}  # fmt: skip
OF_MESSAGES: dict[str, Body] = {
    "stop sequences": {"stop_sequences": ["1", "2", "3"]},
    "metadata": {"metadata": {"user_id": "me"}},
    "one token": {"max_tokens": 1},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "no thinking": {"thinking": {"type": "disabled"}},
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOKENIZE: dict[str, Body] = {
    "text": {"prompt": SHORT},
    "long text": {"prompt": long("tokenize")},
    "very long text": {"prompt": long("tokenize") * 300},
    "strings": {"prompt": SHORT, "return_token_strs": True},
    "no special tokens": {"prompt": SHORT, "add_special_tokens": False},
    "unicode": {"prompt": "äöü 漢字 🙂 \u0000"},
    "chat": {"messages": HELLO},
    "chat, no generation prompt": {"messages": HELLO, "add_generation_prompt": False},
    "chat, tools": {"messages": HELLO, "tools": [LOOK]},
    "chat, continued": {
        "messages": [*HELLO, {"role": "assistant", "content": "The"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "chat, template arguments": {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}},
    "unknown field": {"prompt": SHORT, "no_such_field": 1},
}
DETOKENIZE: dict[str, list[int]] = {
    "few tokens": [60, 61, 62],
    "no tokens": [],
    "many tokens": list(range(20, 600)),
}
SCORING: dict[str, Body] = {
    "texts": {"query": "Is it red? ", "items": ["a red box", "a blue box"], "label_token_ids": [300, 301]},
    "no softmax": {"query": "Is it red? ", "items": ["a"], "label_token_ids": [300, 301], "apply_softmax": False},
    "item first": {"query": "Is it?", "items": ["a", "b"], "label_token_ids": [300, 301], "item_first": True},
    "ids": {"query": [60, 61], "items": [[62], [63, 64]], "label_token_ids": [300, 301]},
    "one label": {"query": "a", "items": ["b"], "label_token_ids": [300]},
    "long": {"query": long("scoring"), "items": ["a", "b"], "label_token_ids": [300, 301]},
}  # fmt: skip
REQUESTS = [
    *(make(f"{name}{', streamed' if stream else ''}", stream=stream, **fields)
      for make, variants in ((response, OF_RESPONSES), (message, CONVERSATIONS | OF_MESSAGES))
      for stream in (False, True) for name, fields in variants.items()),
    *(count(name, **fields) for name, fields in CONVERSATIONS.items()),
    count("tools", tools=[{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}]),
    Request("message with Anthropic's headers", MESSAGES, message("").json,
            headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"}),
    *(Request(f"tokenize {name}", "/tokenize", {"model": "demo", **fields}) for name, fields in TOKENIZE.items()),
    *(Request(f"detokenize {name}", "/detokenize", {"model": "demo", "tokens": tokens})
      for name, tokens in DETOKENIZE.items()),
    *(Request(f"scoring {name}", "/generative_scoring", {"model": "demo", **fields})
      for name, fields in SCORING.items()),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_responses_equal_vllms(pair: Pair, request_: Request) -> None:
    pair.same(request_)


def test_tokens_that_were_cached_are_counted(pair: Pair) -> None:
    """The same prompt is sent twice, then a longer one. Prefix hits count with local and with remote prefill."""
    prompts = (long("cached"), long("cached"), f"{long('cached')} {SHORT}")
    usages = [pair.same(response("cached", input=prompt)).body["usage"] for prompt in prompts]
    counts = [usage["input_tokens_details"]["cached_tokens"] for usage in usages]
    assert counts[0] == 0
    assert counts[1] > 256
