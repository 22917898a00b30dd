"""`/v1/messages`, which Anthropic's clients speak, and its `count_tokens`."""

from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT, long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": SHORT}]


def message(name: str, **fields: Any) -> Request:
    return Request(f"message {name}", PATH, {"model": "demo", "messages": HELLO, "max_tokens": 8, **fields})


def count(name: str, **fields: Any) -> Request:
    return Request(f"count {name}", COUNT, {"model": "demo", "messages": HELLO, **fields})


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


CONVERSATIONS: dict[str, dict[str, Any]] = {
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
    "tool result": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "4711"}]},
        ],
    },
    "thinking in the past": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, text("So.")]},
            *HELLO,
        ]
    },
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "stop sequences": {"stop_sequences": ["1", "2", "3"]},
    "temperature": {"temperature": 0.0, "top_p": 0.9, "top_k": 5},
    "metadata": {"metadata": {"user_id": "me"}},
    "one token": {"max_tokens": 1},
    "unknown field": {"no_such_field": 1},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "no thinking": {"thinking": {"type": "disabled"}},
    "service tier": {"service_tier": "auto"},
}
REQUESTS = [
    *(message(f"{name}{', streamed' if stream else ''}", stream=stream, **fields)
      for stream in (False, True) for name, fields in (CONVERSATIONS | OPTIONS).items()),
    *(count(name, **fields) for name, fields in CONVERSATIONS.items()),
    count("tools", tools=[{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}]),
    Request("message with Anthropic's headers", PATH, message("").json,
            headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"}),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_message(pair: Pair, request_: Request) -> None:
    pair.same(request_)
