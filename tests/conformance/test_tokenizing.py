"""`/tokenize`, `/detokenize` and `/generative_scoring`."""

from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT, long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

HELLO: list[dict[str, Any]] = [{"role": "user", "content": SHORT}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOKENIZE: dict[str, dict[str, Any]] = {
    "text": {"prompt": SHORT},
    "long text": {"prompt": long("tokenize")},
    "very long text": {"prompt": long("tokenize") * 300},
    "without a model": {"prompt": SHORT, "model": None},
    "strings": {"prompt": SHORT, "return_token_strs": True},
    "no special tokens": {"prompt": SHORT, "add_special_tokens": False},
    "unicode": {"prompt": "äöü 漢字 🙂 \u0000"},
    "chat": {"messages": HELLO},
    "chat, no generation prompt": {"messages": HELLO, "add_generation_prompt": False},
    "chat, strings": {"messages": HELLO, "return_token_strs": True},
    "chat, tools": {"messages": HELLO, "tools": [LOOK]},
    "chat, continued": {
        "messages": [*HELLO, {"role": "assistant", "content": "The"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "chat, arguments": {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}},
    "both": {"prompt": SHORT, "messages": HELLO},
    "unknown field": {"prompt": SHORT, "no_such_field": 1},
}
DETOKENIZE: dict[str, list[int]] = {"few": [60, 61, 62], "none": [], "many": list(range(20, 600))}
SCORING: dict[str, dict[str, Any]] = {
    "texts": {"query": "Is it red? ", "items": ["a red box", "a blue box"], "label_token_ids": [300, 301]},
    "softmax": {"query": "Is it red? ", "items": ["a"], "label_token_ids": [300, 301], "apply_softmax": False},
    "item first": {"query": "Is it?", "items": ["a", "b"], "label_token_ids": [300, 301], "item_first": True},
    "ids": {"query": [60, 61], "items": [[62], [63, 64]], "label_token_ids": [300, 301]},
    "one label": {"query": "a", "items": ["b"], "label_token_ids": [300]},
    "long": {"query": long("scoring"), "items": ["a", "b"], "label_token_ids": [300, 301]},
}  # fmt: skip
REQUESTS = [
    *(Request(f"tokenize {name}", "/tokenize", {"model": "demo", **fields}) for name, fields in TOKENIZE.items()),
    *(Request(f"detokenize {name}", "/detokenize", {"model": "demo", "tokens": tokens})
      for name, tokens in DETOKENIZE.items()),
    *(Request(f"scoring {name}", "/generative_scoring", {"model": "demo", **fields})
      for name, fields in SCORING.items()),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_tokenizing(pair: Pair, request_: Request) -> None:
    pair.same(request_)
