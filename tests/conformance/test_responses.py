"""`/v1/responses` without a store: what is answered, and the events of its streams."""

from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT, long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PATH = "/v1/responses"


def response(name: str, **fields: Any) -> Request:
    body = {"model": "demo", "input": SHORT, "max_output_tokens": 16, "store": False, **fields}
    return Request(f"response {name}", PATH, body)


VARIANTS: dict[str, dict[str, Any]] = {
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
    "sampling": {"temperature": 0.0, "top_p": 0.9},
    "metadata": {"metadata": {"a": "b"}, "user": "me"},
    "truncation": {"truncation": "disabled"},
    "format": {"text": {"format": {"type": "text"}}},
    "top logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "request id": {"request_id": "resp_my-own"},
    "salt": {"cache_salt": "salt"},
    "unknown field": {"no_such_field": 1},
    "reasoning": {"reasoning": {"effort": "low"}},
    "stored": {"store": True},
    "messages too": {"enable_response_messages": True},
    "service tier": {"service_tier": "auto"},
    "parallel tools": {"parallel_tool_calls": False, "max_tool_calls": 3},
    "ignore_eos": {"ignore_eos": True},
    "stop": {"stop": ["1", "2"]},
    "seed": {"temperature": 1.0, "seed": 3},
}  # fmt: skip
REQUESTS = [
    response(f"{name}{', streamed' if stream else ''}", stream=stream, **fields)
    for stream in (False, True)
    for name, fields in VARIANTS.items()
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_response(pair: Pair, request_: Request) -> None:
    pair.same(request_)


def test_tokens_that_were_cached_are_counted(pair: Pair) -> None:
    """The whole prompt again, and a longer one: what a prefix cache has, wherever the prompt was prefilled before."""
    for text in (long("cached"), long("cached"), f"{long('cached')} {SHORT}"):
        pair.same(response("cached", input=text))
