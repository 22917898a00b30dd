"""Tools with the parsers from the YAML: `auto`, named, required, none; several calls; results; streams."""

import json
from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.asking import CHAT, MESSAGES, RESPONSES, Body, body, refused, table, whole
from tests.conformance.pair import Pair
from tests.conformance.parsers.thinking import NOT_THINKING
from tests.conformance.prompts import long
from tests.conformance.responses.test_structured import FORECAST, NO_SPACES

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.usefixtures("begun")]

HELLO = "Hello, how are you?"
ZONE: Body = {
    "type": "object",
    "properties": {"zone": {"type": "string", "enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
FUNCTIONS: list[Body] = [
    {"name": "get_weather", "description": "Of the coming days.", "parameters": FORECAST},
    {"name": "get_time", "parameters": ZONE},
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FLAT = [{"type": "function", **function} for function in FUNCTIONS]
ANTHROPIC = [{"name": function["name"], "input_schema": function["parameters"]} for function in FUNCTIONS]

# The model would never call a tool by itself: a grammar makes it write calls in the parser's format.
ONE = (
    r'<tool_call>\{"name": "get_weather", "arguments": \{"city": "[a-z]{3,5}", "days": [1-9]\}\}</tool_call>'
)
TWO = ONE + r'\n<tool_call>\{"name": "get_time", "arguments": \{"zone": "utc"\}\}</tool_call>'
NO_CALL = r"<tool_call>\{[a-z]{5}\}</tool_call>"


def written(regex: str, **fields: Any) -> Body:
    return {
        "tools": TOOLS,
        "structured_outputs": {"regex": regex},
        "max_tokens": 200,
        **NOT_THINKING,
        **fields,
    }


def call(number: int) -> Body:
    arguments = json.dumps({"city": "rome", "days": number})
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


TURNS: list[Body] = [
    {"role": "user", "content": HELLO},
    {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]},
    {"role": "tool", "tool_call_id": "call_1", "content": long("result")},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
]
IN_CHAT: dict[str, Body] = {
    "auto, no call": {"tools": TOOLS, **NOT_THINKING},
    "auto": written(ONE),
    "auto, two calls": written(TWO),
    "auto, two calls, not parallel": written(TWO, parallel_tool_calls=False),
    "auto, text before": written(f"I [a-z ]{{5}} {ONE}"),
    "auto, cut": written(ONE, max_tokens=20),
    "auto, no JSON": written(NO_CALL),
    "auto, strict": {"tools": [{"type": "function", "function": {**FUNCTIONS[0], "strict": True}}], **NOT_THINKING},
    "auto, stop in the call": written(ONE, stop=["days"]),
    "named": {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200, "logit_bias": NO_SPACES, **NOT_THINKING},
    "named, after thoughts": {
        "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}, "max_tokens": 200,
    },
    "required, one call": {
        "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200,
        "logit_bias": NO_SPACES, **NOT_THINKING,
    },
    "none": {"tools": TOOLS, "tool_choice": "none", **NOT_THINKING},
    "null": {"tools": TOOLS, "tool_choice": None, **NOT_THINKING},
    "results": {"messages": TURNS, "tools": TOOLS, **NOT_THINKING},
    "results, after thoughts": {"messages": TURNS, "tools": TOOLS},
    "results, without tools": {"messages": TURNS},
}  # fmt: skip
CUT_IN_CHAT: dict[str, Body] = {
    "required": {"tools": TOOLS, "tool_choice": "required", **NOT_THINKING},
    "required, after thoughts": {"tools": TOOLS, "tool_choice": "required"},
    "required, cut": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 12, **NOT_THINKING},
    "required, n and logprobs": {
        "tools": TOOLS, "tool_choice": "required", "n": 2, "logprobs": True, "top_logprobs": 2, **NOT_THINKING,
    },
}  # fmt: skip
"""Not streamed, because what vLLM 0.32 sends of an unfinished call depends on how tokens are grouped."""
IN_RESPONSES: dict[str, Body] = {
    "auto": {"tools": FLAT},
    "named": {
        "tools": FLAT,
        "tool_choice": {"type": "function", "name": "get_time"},
        "max_output_tokens": 200,
    },
    "results": {
        "tools": FLAT,
        "input": [
            {"role": "user", "content": HELLO},
            {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": '{"zone": "utc"}'},
            {"type": "function_call_output", "call_id": "c", "output": "noon"},
        ],
    },
}
CUT_IN_RESPONSES = {"required": {"tools": FLAT, "tool_choice": "required"}}
USE: Body = {"type": "tool_use", "id": "t", "name": "get_time", "input": {"zone": "utc"}}
IN_MESSAGES: dict[str, Body] = {
    "auto": {"tools": ANTHROPIC, "tool_choice": {"type": "auto"}},
    "tool": {"tools": ANTHROPIC, "tool_choice": {"type": "tool", "name": "get_time"}, "max_tokens": 200},
    "results": {
        "messages": [
            {"role": "user", "content": HELLO},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "noon"}]},
        ],
    },
}  # fmt: skip
CUT_IN_MESSAGES: dict[str, Body] = {
    "any": {"tools": ANTHROPIC, "tool_choice": {"type": "any"}},
    "any, not parallel": {"tools": ANTHROPIC, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
}  # fmt: skip
REFUSED: dict[str, Body] = {
    "a choice without tools": {"tool_choice": "auto"},
    "none without tools": {"tool_choice": "none"},
    "an unknown choice": {"tools": TOOLS, "tool_choice": "some"},
    "an unknown name": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}},
    "no name": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
    "an unknown type": {"tools": [{"type": "thing", "function": FUNCTIONS[0]}]},
    "a schema of an unknown type": {
        "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "nothing"}}}],
        "tool_choice": "required",
        **NOT_THINKING,
    },
    "a number for a schema": {"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]},
    "no parameters": {
        "tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": "required", **NOT_THINKING,
    },
    "allowed tools": {
        "tools": TOOLS,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
    },
    "a result without a call": {"messages": [{"role": "tool", "content": "sun"}], **NOT_THINKING},
    "arguments that are no JSON": {
        "messages": [
            {"role": "user", "content": HELLO},
            {"role": "assistant", "tool_calls": [{**call(1), "function": {"name": "a", "arguments": "{"}}]},
        ],
        **NOT_THINKING,
    },
}  # fmt: skip
REQUESTS = [
    *table(CHAT, IN_CHAT, HELLO),
    *table(RESPONSES, IN_RESPONSES, HELLO),
    *table(MESSAGES, IN_MESSAGES, HELLO),
    *whole(table(CHAT, CUT_IN_CHAT, HELLO)),
    *whole(table(RESPONSES, CUT_IN_RESPONSES, HELLO)),
    *whole(table(MESSAGES, CUT_IN_MESSAGES, HELLO)),
    *refused(CHAT, REFUSED),
    *refused(
        RESPONSES,
        {"an unknown name": {"tools": FLAT, "tool_choice": {"type": "function", "name": "nothing"}}},
    ),
    *refused(MESSAGES, {"a tool without a schema": {"tools": [{"name": "a"}]}}),
    *refused(
        MESSAGES,
        {"an unknown tool": {"tools": ANTHROPIC, "tool_choice": {"type": "tool", "name": "nothing"}}},
    ),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_responses_equal_vllms(pair: Pair, request_: Request) -> None:
    pair.same(request_)


def test_both_servers_find_both_calls(pair: Pair) -> None:
    answer = pair.same(Request("two calls", CHAT, body(CHAT, HELLO, **written(TWO)))).body
    (choice,) = answer["choices"]
    names = [made["function"]["name"] for made in choice["message"]["tool_calls"]]
    assert names == ["get_weather", "get_time"]
    assert choice["finish_reason"] == "tool_calls"


def test_responses_equal_vllms_after_a_remote_prefill(pair: Pair) -> None:
    for name, fields in (("thoughts", {"tools": TOOLS}), ("a call", written(TWO))):
        ours = pair.same(Request(f"{name}, remote", CHAT, body(CHAT, long(f"{name}, remote"), **fields)))
        pair.remote(ours)
