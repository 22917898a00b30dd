"""Reasoning on every route, whole and streamed, also with grammars; and `priority`."""

import pytest

from tests.conformance.answers import Request
from tests.conformance.asking import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Body, body, refused, table, whole
from tests.conformance.pair import Pair
from tests.conformance.parsers.thinking import NOT_THINKING
from tests.conformance.responses.test_structured import FORECAST, schema

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.usefixtures("begun")]

HELLO = "Hello, how are you?"
THOUGHTS = "Hello! I am the tiny demo model of pdserve. I remember codes: tell me the code of a box or a door"
ANSWER = " then ask me for it."
EARLIER_TURNS: list[Body] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "reasoning": "I think.", "content": "Yes."},
    {"role": "user", "content": HELLO},
]
IN_CHAT: dict[str, Body] = {
    "thoughts": {},
    "thoughts, cut": {"max_tokens": 10},
    "thoughts, n and logprobs": {"n": 2, "logprobs": True, "top_logprobs": 2},
    "thoughts, token ids": {"return_token_ids": True, "max_tokens": 50},
    "thoughts not shown": {"include_reasoning": False},
    "no thoughts": NOT_THINKING,
    "a budget": {"thinking_token_budget": 5},
    "a budget of 0": {"thinking_token_budget": 0},
    "effort": {"reasoning_effort": "low"},
    "effort none": {"reasoning_effort": "none"},
    "then JSON": {"response_format": schema(FORECAST)},
    "then a regex": {"structured_outputs": {"regex": "[a-c]{4}"}},
    "turns": {"messages": EARLIER_TURNS},
    "an open thought": {
        "messages": [*EARLIER_TURNS, {"role": "assistant", "content": "<think>I am"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "priority": {"priority": -3},
}  # fmt: skip
STOPPED: Body = {"stop": ["remember"]}
IN_RESPONSES: dict[str, Body] = {
    "thoughts": {},
    "effort": {"reasoning": {"effort": "low"}},
    "effort none": {"reasoning": {"effort": "none"}},
    "a summary": {"reasoning": {"summary": "auto"}},
    "then JSON": {
        "text": {"format": {"type": "json_schema", "name": "f", "schema": FORECAST, "strict": True}}
    },
    "priority": {"priority": 7},
}
IN_MESSAGES: dict[str, Body] = {
    "thoughts": {},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    "no thinking": {"thinking": {"type": "disabled"}},
    "turns": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "I think.", "signature": "s"},
                                              {"type": "text", "text": "Yes."}]},
            {"role": "user", "content": HELLO},
        ],
    },
}  # fmt: skip
REFUSED: dict[str, Body] = {
    "a budget of -2": {"thinking_token_budget": -2},
    "a budget in words": {"thinking_token_budget": "some"},
    "a large priority": {"priority": 10**20},
    "a fractional priority": {"priority": 1.5},
}
REQUESTS = [
    *table(CHAT, IN_CHAT, HELLO),
    *whole(table(CHAT, {"a stop string in the thoughts": STOPPED}, HELLO)),
    # without usage: if vLLM 0.32 holds text back for a stop string, its count of reasoning tokens depends on which
    # tokens came together
    Request("a stop string in the thoughts, streamed", CHAT, body(CHAT, HELLO, stream=True, **STOPPED)),
    *table(RESPONSES, IN_RESPONSES, HELLO),
    *table(MESSAGES, IN_MESSAGES, HELLO),
    *table(
        COMPLETIONS,
        {"plain": {}, "a budget": {"thinking_token_budget": 3}, "priority": {"priority": 2}},
        HELLO,
    ),
    *refused(CHAT, REFUSED),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_responses_equal_vllms(pair: Pair, request_: Request) -> None:
    pair.same(request_)


def test_thoughts_and_answer_are_apart(pair: Pair) -> None:
    """Both servers put the same text into the reasoning and into the content."""
    ours = pair.same(Request("whole", CHAT, body(CHAT, HELLO)))
    (choice,) = ours.body["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (THOUGHTS, ANSWER)
    streamed = pair.same(Request("streamed", CHAT, body(CHAT, HELLO, stream=True)))
    said = streamed.body["said"]
    assert said[" 0.choices.delta.reasoning"] == THOUGHTS
    assert said[" 0.choices.delta.content"] == ANSWER
    short = pair.same(Request("budget", CHAT, body(CHAT, HELLO, thinking_token_budget=5)))
    (choice,) = short.body["choices"]
    assert len(choice["message"]["reasoning"]) < len(THOUGHTS) / 2
