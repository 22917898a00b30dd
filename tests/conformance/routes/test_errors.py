"""Errors: status, `type`, `code`, `param` and message."""

import json
from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

HELLO: list[dict[str, Any]] = [{"role": "user", "content": SHORT}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": HELLO, "max_tokens": 4},
    "/v1/chat/completions/batch": {"model": "demo", "messages": [HELLO], "max_tokens": 4},
    "/v1/completions": {"model": "demo", "prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"model": "demo", "input": "Hello", "max_output_tokens": 16},
    "/v1/messages": {"model": "demo", "max_tokens": 4, "messages": HELLO},
    "/v1/messages/count_tokens": {"model": "demo", "messages": HELLO},
    "/tokenize": {"model": "demo", "prompt": "Hello"},
    "/detokenize": {"model": "demo", "tokens": [60, 61]},
    "/generative_scoring": {"model": "demo", "query": "a", "items": ["b"], "label_token_ids": [300, 301]},
}
FORMS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")
"""Routes that get unreadable bodies. These four are enough, because all routes read bodies alike."""
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
DEEP = b'{"model": "demo", "messages": ' + b"[" * 900 + b"]" * 900 + b"}"
RAW: dict[str, bytes] = {
    "no JSON": b"hello",
    "cut": b'{"model": "demo", "prompt": "Hel',
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "empty object": b"{}",
    "deep": DEEP,
    "deeper": DEEP.replace(b"[", b"[" * 200).replace(b"]", b"]" * 200),
    "long number": b'{"model": "demo", "max_tokens": ' + b"1" * 5000 + b"}",
}


def raw(path: str, name: str, content: bytes, **more: Any) -> Request:
    return Request(f"{path} {name}", path, content=content, **more)


def changed(path: str, name: str, differs: str = "", **fields: Any) -> Request:
    return Request(f"{path} {name}", path, GOOD[path] | fields, differs=differs)


def lacking(path: str) -> Request:
    """A body without its first required field after the model."""
    body = dict(GOOD[path])
    del body[required := list(body)[1]]
    return Request(f"{path} without {required}", path, body)


def with_text(path: str, name: str, content: str) -> Request:
    """A body that ends with this raw text of JSON, for example a key that occurs twice."""
    body = json.dumps(GOOD[path])[:-1] + f", {content}}}"
    return raw(path, name, body.encode())


SAMPLING: dict[str, Any] = {
    "max_tokens": [-1, 0, 1.5, "4", "many", 10**6, 2**70, [], {}, True, 4097],
    "temperature": [-1, "warm", None, [], 3],
    "top_p": [0, -0.1, 1.1, "all", None],
    "top_k": [-2, 0, 1.5, "all", 2**40],
    "min_p": [-1, 2, "x"],
    "n": [0, -1, "two", 1.5, True],
    "seed": [-1, 2**65, "x", 1.5],
    "stop": [1, [1], {}, [""], "", None, ["a"] * 20, [None]],
    "stop_token_ids": ["x", ["x"], [-1], [10**9], None],
    "min_tokens": [-1, 100, "x"],
    "presence_penalty": [3, -3, "x"],
    "frequency_penalty": [3, "x"],
    "repetition_penalty": [0, -1, "x"],
    "logit_bias": [{"x": 1}, {"5": 1000}, {"-1": 1}, {"99999": 1}, [], "x", {"5": "x"}],
    "logprobs": [-2, 100, "x"],
    "prompt_logprobs": [-2, 100, "x", 1],
    "stream": ["maybe", 2],
    "stream_options": [{"include_usage": True}, {"x": 1}, "x", []],
    "echo": ["maybe"],
    "ignore_eos": ["maybe"],
    "allowed_token_ids": [[], [-1], [10**9], "x"],
    "bad_words": ["x", [1], [""]],
    "truncate_prompt_tokens": [-2, 0, 10**6, "x"],
    "response_format": [
        {"type": "x"},
        {"type": "json_schema"},
        "json",
        {"type": "json_schema", "json_schema": {}},
    ],
    "priority": ["x", 1],
    "cache_salt": ["", 1],
    "request_id": [1],
    "use_beam_search": [True, "x"],
    "model": [None, "", 1, [], "no-such-model"],
    "logits_processors": [["x"]],
    "vllm_xargs": ["x", {"a": None}, {"a": 1}],
    "return_token_ids": ["x"],
}
CHAT_ONLY: dict[str, Any] = {
    "messages": [None, "x", [], [1], {}, [{}], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}],
                 [{"role": "user", "content": 1}], [{"role": "user", "content": [{"type": "x"}]}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]}],
                 [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
                 [{"role": "tool", "content": "x"}], [{"role": "assistant", "tool_calls": [{}], "content": None}],
                 [{"role": "user", "content": "x " * 9000}]],
    "top_logprobs": [-1, 100, 5, "x"],
    "tools": ["x", [1], [{}], [{"type": "function"}], []],
    "tool_choice": ["x", "required", {"type": "function", "function": {"name": "x"}}, {}, 1],
    "chat_template": ["{{", "{{ messages }}", 1],
    "chat_template_kwargs": ["x", [], {"tokenize": True}],
    "continue_final_message": [True],
    "max_completion_tokens": [-1, 0, 4097, "x"],
    "add_generation_prompt": ["x"],
    "reasoning_effort": ["x", 1],
    "media_io_kwargs": ["x"],
    "documents": ["x", [1]],
    "modalities": [["audio"]],
}  # fmt: skip
COMPLETION_ONLY: dict[str, Any] = {
    "prompt": [None, "", [], [[]], [""], 1, {}, [1.5], ["a", 1], [-1], [10**9], [10**30], ["a", [1]], "x " * 9000,
               [300] * 4096, [300] * 4095, [300] * 5000],
    "suffix": ["x"],
    "best_of": [0, 2, "x"],
    "prompt_embeds": ["x", [], ""],
    "add_special_tokens": ["x"],
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "input": [None, 1, {}, [], [1], [{}], [{"role": "user"}], [{"role": "user", "content": [{"type": "x"}]}],
              [{"type": "x"}], "x " * 9000,
              [{"role": "user", "content": [{"type": "input_image", "image_url": "http://localhost/x.png",
                                             "detail": "auto"}]}]],
    "max_output_tokens": [0, -1, "x", 10**6, 4096, 1.5],
    "temperature": [-1, "x", 3],
    "top_p": [0, 2],
    "top_logprobs": [-1, 30],
    "truncation": ["x", "auto", "disabled"],
    "text": ["x", {"format": {"type": "x"}}, {"format": {"type": "json_schema"}}],
    "tools": ["x", [{}], [{"type": "x"}], [{"type": "web_search_preview"}]],
    "tool_choice": ["x", "required"],
    "include": [["x"], "x", ["message.output_text.logprobs"]],
    "instructions": [1],
    "metadata": ["x"],
    "model": [None, "", "no-such-model", 1],
    "stream": ["x"],
    "reasoning": ["x", {"effort": "x"}],
    "service_tier": ["x"],
    "prompt": [{"id": "x"}],
    "previous_response_id": ["resp_1", "", "../x", 1],
    "background": [True, "yes", "x"],
    "store": ["x"],
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "messages": [None, "x", [], [1], [{}], [{"role": "system", "content": "x"}], [{"role": "x", "content": "x"}],
                 [{"role": "user", "content": [{"type": "x"}]}], [{"role": "user", "content": 1}],
                 [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                                                            "data": ""}}]}],
                 [{"role": "user", "content": "x " * 9000}]],
    "max_tokens": [0, -1, "x", 10**6, None, 1.5],
    "system": [1, [1], [{}]],
    "temperature": [-1, "x", 3],
    "top_p": [0, 2],
    "top_k": [-5, "x"],
    "stop_sequences": ["x", [1], [""]],
    "stream": ["x"],
    "tools": ["x", [{}], [{"name": "x"}]],
    "tool_choice": ["x", {"type": "x"}, {"type": "any"}, {"type": "tool", "name": "x"}],
    "thinking": ["x", {"type": "x"}],
    "metadata": ["x"],
    "model": [None, "", "no-such-model", 1],
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions/batch": {
        "messages": [None, [], [[]], HELLO, [[1]]],
        "n": [2],
        "model": ["no-such-model"],
        "tools": [[{"type": "function", "function": {"name": "x"}}]],
    },
    "/v1/messages/count_tokens": {
        "messages": [None, [], [1]],
        "model": [None, "no-such-model"],
        "system": [1],
    },
    "/tokenize": {
        "prompt": [None, 1, ["x"], ""],
        "model": [None, "no-such-model"],
        "add_special_tokens": ["x"],
    },
    "/detokenize": {"tokens": [None, "x", [-1], [10**9], [1.5], [10**30], []], "model": ["no-such-model"]},
    "/generative_scoring": {
        "items": [None, [], [1], ["x " * 9000], "x"],
        "query": [None, 1, ""],
        "label_token_ids": [None, [], [1], [10**9, 1], ["x"], [-1, 1]],
        "model": ["no-such-model", None],
        "item_first": ["x"],
    },
}


def variants(path: str, fields: dict[str, list[Any]]) -> list[Request]:
    return [
        changed(path, f"{field}={json.dumps(value)[:60]}", **{field: value})
        for field, values in fields.items()
        for value in values
    ]


ENDLESS = 'a grammar or schema without finite text (`{"$ref": "#"}`)'

REQUESTS = [
    *(raw(path, name, content, differs="lists and objects of a body" if name == "deeper" else "")
      for path in FORMS for name, content in RAW.items()),
    *(lacking(path) for path in GOOD),
    *(raw(path, "as text", json.dumps(body).encode(), headers={"content-type": "text/plain"})
      for path, body in GOOD.items()),
    *(raw(path, "as a form", b"model=demo", headers={"content-type": "application/x-www-form-urlencoded"})
      for path in FORMS),
    *(raw(path, f"as {kind or 'no type'}", json.dumps(GOOD[path]).encode(), headers={"content-type": kind})
      for path in FORMS for kind in ("", "application/json; charset=utf-8")),
    *(raw(path, "as UTF-16", json.dumps(GOOD[path]).encode("utf-16")) for path in FORMS),
    *(raw(path, "with a byte order mark", b"\xef\xbb\xbf" + json.dumps(GOOD[path]).encode()) for path in FORMS),
    *(with_text(path, name, text) for path in FORMS for name, text in {
        "NaN": '"temperature": NaN', "infinity": '"temperature": -Infinity', "a second model": '"model": "other"',
        "the same model twice": '"model": "demo"', "surrogate": '"user": "\\ud800"', "huge": '"seed": 1e999',
        "nul": '"user": "\\u0000"'}.items()),
    *(with_text(path, "surrogate in the prompt", text) for path, text in {
        "/v1/completions": '"prompt": "a\\ud800b"', "/tokenize": '"prompt": "a\\ud800b"',
        "/v1/chat/completions": '"messages": [{"role": "user", "content": "\\ud800"}]'}.items()),
    *variants("/v1/chat/completions", SAMPLING | CHAT_ONLY),
    *variants("/v1/completions", SAMPLING | COMPLETION_ONLY),
    *variants("/v1/responses", RESPONSES),
    *(changed("/v1/responses", f"in the background {fields}", "", background=True, **fields)
      for fields in ({"store": True}, {"store": False}, {"store": None}, {"stream": True}, {"model": "no-such-model"})),
    changed("/v1/responses", "in the background, store as text",
            '`background` with `store: "false"`, as text', background=True, store="false"),
    *(changed(path, f"KV transfer {fields}", "`kv_transfer_params`, `ec_transfer_params`, `kv_hints`", **fields)
      for path in GENERATING for fields in ({"kv_transfer_params": {"a": 1}},)),
    *(Request(f"{path} structured outputs that are text", path, GOOD[path] | {"structured_outputs": "x"},
              headers={"connection": "close"}, differs="`structured_outputs` that is no object")
      for path in ("/v1/chat/completions", "/v1/completions")),
    *(changed(path, "schema without finite text", ENDLESS, structured_outputs={"json": {"$ref": "#"}})
      for path in ("/v1/chat/completions", "/v1/completions")),
    *(changed(path, name, "`request_id`", request_id=value) for path in GENERATING
      for name, value in (("a long id", "x" * 129), ("an odd id", "a\nb"))),
    *(changed(path, "many logprobs", "logprobs of the prompt (`prompt_logprobs`, `echo` with `logprobs`)",
              prompt=[[300] * 4000] * 3, n=2, temperature=0.5, max_tokens=1, **asked)
      for path in ("/v1/completions",) for asked in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20})),
    changed("/v1/completions", "many parameters", "parameters (schemas, stop strings, ...) x `n` x prompts",
            vllm_xargs={"a": "x" * 600_000}, n=64, temperature=0.5, max_tokens=1),
    changed("/generative_scoring", "129 items", "`items` of `/generative_scoring`", items=["b"] * 129),
    *(changed(path, "too many outputs", "`n` x prompts", n=20_000)
      for path in ("/v1/chat/completions", "/v1/completions")),
    *variants("/v1/messages", MESSAGES),
    *(request for path, fields in OTHERS.items() for request in variants(path, fields)),
    *(changed(path, f"{field} streamed", "", stream=True, **{field: value})
      for path, field, value in (
          ("/v1/chat/completions", "max_tokens", 5000), ("/v1/completions", "max_tokens", 5000),
          ("/v1/chat/completions", "temperature", -1), ("/v1/responses", "max_output_tokens", 5000),
          ("/v1/responses", "temperature", -1), ("/v1/messages", "max_tokens", 5000),
          ("/v1/messages", "temperature", -1), ("/v1/chat/completions", "model", "no-such-model"),
          ("/v1/messages", "model", "no-such-model"), ("/v1/responses", "model", "no-such-model"))),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_errors_equal_vllms(pair: Pair, request_: Request) -> None:
    pair.same(request_)
