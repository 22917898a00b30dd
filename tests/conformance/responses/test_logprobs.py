"""Combinations of logprobs of tokens and prompts, `n`, several prompts, echo, and usage in streams."""

from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.asking import CHAT, COMPLETIONS, RESPONSES, Body, body, refused, table, whole
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT, ids, long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.usefixtures("begun")]


def top(count: int, **more: Any) -> Body:
    return {"logprobs": True, "top_logprobs": count, "max_tokens": 8, **more}


IN_CHAT: dict[str, Body] = {
    "no top": top(0),
    "top 20": top(20),
    "n, sampled": top(2, n=3, temperature=1.0, seed=5),
    "as ids": top(2, return_tokens_as_token_ids=True),
    "one token": top(2, max_tokens=1),
}
IN_COMPLETIONS: dict[str, Body] = {
    "logprobs 0": {"logprobs": 0},
    "several prompts": {"prompt": [SHORT, long("several"), "The"], "n": 2, "logprobs": 1},
    "several prompts as ids": {"prompt": [ids("a", 20), ids("b")], "logprobs": 2},
}
OF_PROMPTS: dict[str, Body] = {
    "prompt_logprobs": {"prompt_logprobs": 2, "max_tokens": 3},
    "prompt_logprobs and logprobs": {"prompt_logprobs": 0, "logprobs": 1, "max_tokens": 3},
    "prompt_logprobs, n": {"prompt_logprobs": 1, "n": 2, "max_tokens": 2},
    "echo and logprobs": {"echo": True, "logprobs": 2, "max_tokens": 3},
    "echo and logprobs, no token": {"echo": True, "logprobs": 1, "max_tokens": 0},
}
CHAT_PROMPTS = {"prompt_logprobs": {"prompt_logprobs": 1, "max_tokens": 3}}
REFUSED_IN_CHAT: dict[str, Body] = {
    "top_logprobs without logprobs": {"logprobs": False, "top_logprobs": 2},
    "prompt_logprobs, streamed": {"prompt_logprobs": 1, "stream": True},
}
REFUSED_IN_COMPLETIONS: dict[str, Body] = {
    "logprobs true": {"logprobs": True},
    "prompt_logprobs of all tokens": {"prompt_logprobs": -1},
    "prompt_logprobs, streamed": {"prompt_logprobs": 1, "stream": True},
    "echo, streamed": {"echo": True, "logprobs": 1, "stream": True},
}
USAGE: dict[str, Any] = {
    "usage": {"include_usage": True},
    "continuous usage": {"include_usage": True, "continuous_usage_stats": True},
    "continuous usage only": {"include_usage": False, "continuous_usage_stats": True},
    "no usage": {"include_usage": False},
    "empty": {},
    "a number": 3,
    "unknown": {"something": True},
}
REQUESTS = [
    *table(CHAT, IN_CHAT),
    *table(COMPLETIONS, IN_COMPLETIONS),
    # not streamed: the logprobs of vLLM's last event depend on which tokens came together
    *whole(table(RESPONSES, {"logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 3}})),
    *whole(table(COMPLETIONS, OF_PROMPTS)),
    *whole(table(CHAT, CHAT_PROMPTS)),
    *refused(CHAT, REFUSED_IN_CHAT),
    *refused(COMPLETIONS, REFUSED_IN_COMPLETIONS),
    *(
        Request(f"{path} {name}, n {n}", path, body(path, n=n, stream=True, stream_options=asked))
        for path in (CHAT, COMPLETIONS)
        for name, asked in USAGE.items()
        for n in (1, 2)
    ),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_responses_equal_vllms(pair: Pair, request_: Request) -> None:
    pair.same(request_)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_responses_equal_vllms_after_a_remote_prefill(pair: Pair, path: str) -> None:
    """The first token's logprobs come from the prefill worker, all others from the decode worker."""
    asked = top(3) if path == CHAT else {"logprobs": 3}
    ours = pair.same(Request(f"{path}, remote", path, body(path, long(f"test_logprobs {path}"), **asked)))
    pair.remote(ours)


def test_logprobs_of_chosen_token_ids_equal_vllms(pair: Pair) -> None:
    """Requests are sent one by one: in a batch, vLLM 0.32 returns the logprob of a wrong token (minus infinity)."""
    fields: Body = {"logprobs": True, "logprob_token_ids": [300, 301], "max_tokens": 4}
    for name, asked in (("whole", fields), ("streamed", {**fields, "stream": True})):
        pair.same(Request(name, CHAT, body(CHAT, **asked)))
