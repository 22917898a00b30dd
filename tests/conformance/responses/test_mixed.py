"""Requests with several random options (the same ones in each run), prefilled locally and remotely."""

import random
from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.pair import Pair
from tests.conformance.prompts import ids, long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

COUNT = 120
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.3, "seed": 6, "top_p": 0.8},
    {"temperature": 1.0, "seed": 7, "top_k": 5},
    {"temperature": 1.0, "seed": 8, "min_p": 0.05},
    {"temperature": 0, "presence_penalty": 1.5},
    {"temperature": 0, "frequency_penalty": 1.0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "logit_bias": {"300": 3.0, "310": -100}},
    {"temperature": 0, "bad_words": ["a", " the"]},
    {"temperature": 0.9, "seed": 9, "allowed_token_ids": list(range(20, 600))},
]
ENDING: list[dict[str, Any]] = [
    {},
    {"stop": ["1", "4 "]},
    {"stop": ["e", "x"], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(0, 1024, 7))},
    {"stop_token_ids": list(range(0, 1024, 3)), "min_tokens": 5},
    {"ignore_eos": True},
    {"stop": ["zzzz"], "ignore_eos": True},
]
SHOWN: list[dict[str, Any]] = [
    {},
    {"return_token_ids": True},
    {"skip_special_tokens": False},
    {"logprobs": 2},
    {"n": 2},
    {"echo": True},
    {"prompt_logprobs": 0},
    {"cache_salt": "mixed"},
]
STREAMED: list[dict[str, Any]] = [
    {},
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
LENGTHS = (1, 31, 32, 33, 127, 128, 129, 160, 300, 512, 1000)


def drawn(number: int) -> Request:
    chance = random.Random(number)
    fields = {"model": "demo", "max_tokens": chance.choice((1, 2, 8, 20))}
    for options in (SAMPLING, ENDING, SHOWN, STREAMED):
        fields |= chance.choice(options)
    if number % 3:
        prompt: Any = ids(f"mixed {number}", chance.choice(LENGTHS))
        if number % 5 == 0:
            prompt = [prompt, ids(f"mixed too {number}", chance.choice(LENGTHS))]
        return Request(f"mixed {number}", "/v1/completions", fields | {"prompt": prompt})
    if isinstance(fields.get("logprobs"), int):
        fields |= {"logprobs": True, "top_logprobs": 2}
    text = long(f"mixed {number}")[: chance.choice((20, 200, 2000))]
    messages = [{"role": "user", "content": text}]
    return Request(f"mixed {number}", "/v1/chat/completions", fields | {"messages": messages})


REQUESTS = [drawn(number) for number in range(COUNT)]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_responses_equal_vllms(pair: Pair, request_: Request) -> None:
    pair.same(request_)
