"""Requests of every shape: valid ones for every route that takes a body, with some changes each.

Values of other types, integers over 64 bits wherever a number may stand, NaN, lone surrogates, deep nesting, long text,
half a body, bytes that are no JSON; other codings, headers, methods, queries; some clients leave at a random moment.
"""

import gzip
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdserve_bench.fuzz.request import FuzzRequest

INTEGERS = (2**63 - 1, 2**63, -(2**63) - 1, 2**64 - 1, 2**64, -(2**64), 10**30, -(10**30), 10**400)
NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 1e-320, 2**31, 2**32, 65536, 129, 500)
SPELLED = ("+129", "1_29", "129.0", " 4 ")
NAMED = (float("nan"), float("inf"), float("-inf"))
# fmt: off
STRINGS = (
    "", " ", "\0", "\ud800", "\U0010ffff", "x" * 5000, "a\n\x1b[2J", "-1", "1e999", "null", "../..", "🙂" * 300,
)
HUGE = 200_000
"""characters"""
NUMERIC = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of", "seed",
    "top_k", "top_p", "min_p", "temperature", "logprobs", "top_logprobs", "prompt_logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "priority",
    "truncate_prompt_tokens", "thinking_token_budget", "max_tool_calls",
)
NESTED: Mapping[str, Callable[[Any], Any]] = {
    "stop_token_ids": lambda value: [value],
    "logit_bias": lambda value: {str(value): 1},
    "logit_bias value": lambda value: {"300": value},
    "allowed_token_ids": lambda value: [300, value],
    "bad_words": lambda value: [str(value)],
    "repetition_detection": lambda value: {"max_pattern_size": value, "min_pattern_size": 1, "min_count": 2},
    "repetition_detection min": lambda value: {"max_pattern_size": 4, "min_pattern_size": value, "min_count": value},
    "structured_outputs": lambda value: {"json": {"enum": [value]}},
    "structured_outputs const": lambda value: {"json": {"type": "object", "properties": {"a": {"const": value}}}},
    "structured_outputs bounds": lambda value: {"json": {"type": "integer", "minimum": value, "maximum": value}},
    "structured_outputs length": lambda value: {"json": {"type": "string", "maxLength": value, "minLength": value}},
    "structured_outputs choice": lambda value: {"choice": [value]},
    "structured_outputs regex": lambda value: {"regex": f"a{{{value}}}"},
    "response_format": lambda value: {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [value]}}},
    "stream_options": lambda value: {"include_usage": value, "continuous_usage_stats": value},
    "vllm_xargs": lambda value: {"x": value},
    "metadata": lambda value: {"x": value},
    "chat_template_kwargs": lambda value: {"x": value},
    "prompt": lambda value: [300, value],
    "tools": lambda value: [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"const": value}}}}}
    ],
    "stop": lambda value: [value],
    "documents": lambda value: [{"x": value}],
    "priority": lambda value: value,
    "cache_salt": lambda value: value,
    "request_id": lambda value: value,
}
"""where a value may stand inside another one, by field; what follows a space tells several of a field apart"""
# fmt: on


def make(seed: int, number: int, model: str) -> FuzzRequest:
    dice = random.Random(f"{seed}-{number}")
    path, body = dice.choice(_VALID)(dice, model)
    for _ in range(dice.choice((0, 1, 1, 1, 1, 2, 4))):
        dice.choice((_set_number, _set_nested, _set_nested, _replace, _retype, _duplicate, _drop))(dice, body)
    leaves = dice.choice((None, None, None, dice.random() * 0.1, dice.random()))
    raw, headers = _coded(dice, _spelled(dice, body))
    for _ in range(dice.choice((0, 0, 0, 0, 1, 3))):
        headers |= _header(dice)
    query = dice.choice(_QUERIES) if dice.random() < 0.05 else ""
    method = dice.choice(("GET", "PUT", "DELETE", "PATCH")) if dice.random() < 0.02 else "POST"
    if dice.random() < 0.03:
        path, raw = dice.choice(_OTHER_PATHS), dice.choice((b"", raw))
    return FuzzRequest(f"body {number}", path + query, raw, headers, method, leaves=leaves)


# valid ones, by route; short, so that thousands end soon


def _prompt(dice: random.Random) -> list[int]:
    return [dice.randint(300, 999) for _ in range(dice.choice((1, 8, 40, 100, 300)))]


def _text(dice: random.Random) -> str:
    return " ".join(
        dice.choice(("the", "sun", "is", "a", "small", "star")) for _ in range(dice.choice((1, 9, 90)))
    )


def _sampling(dice: random.Random, bound: str = "max_tokens") -> dict[str, Any]:
    return {bound: dice.randint(1, 24), "stream": dice.random() < 0.5, "temperature": dice.choice((0, 0.7))}


def _completions(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    prompt = dice.choice((_text(dice), _prompt(dice), [_text(dice)] * 2))
    return "/v1/completions", {"model": model, "prompt": prompt, "ignore_eos": True, **_sampling(dice)}


def _chat(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": _text(dice)}]
    return "/v1/chat/completions", {"model": model, "messages": messages, **_sampling(dice)}


def _tools(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": "of a city", "parameters": parameters},
    }
    asked = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "call_1", "type": "function", "function": asked}
    path, body = _chat(dice, model)
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": _text(dice)}]},
    ]
    choice = dice.choice(("none", "auto", "required", {"type": "function", "function": {"name": "weather"}}))
    return path, body | {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": True}


def _structured(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", "y"]}},
    }
    asked = dice.choice(
        ({"json": schema}, {"regex": "[a-c]{1,9}"}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"+'})
    )
    path, body = dice.choice((_completions, _chat))(dice, model)
    body["structured_outputs"] = asked
    if path.endswith("chat/completions") and dice.random() < 0.5:
        del body["structured_outputs"]
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return path, body


def _batch(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    messages = [[{"role": "user", "content": _text(dice)}] for _ in range(2)]
    return "/v1/chat/completions/batch", {"model": model, "messages": messages, "max_tokens": 4}


def _responses(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    turns = [{"role": "user", "content": [{"type": "input_text", "text": _text(dice)}]}]
    asked = dice.choice((_text(dice), turns))
    body = {"model": model, "input": asked, **_sampling(dice, "max_output_tokens")}
    if dice.random() < 0.3:
        tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
        body |= {"tools": [tool], "tool_choice": "auto", "instructions": _text(dice), "metadata": {"a": "b"}}
    return "/v1/responses", body


def _anthropic(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    path = dice.choice(("/v1/messages", "/v1/messages", "/v1/messages/count_tokens"))
    content = dice.choice((_text(dice), [{"type": "text", "text": _text(dice)}]))
    body = {"model": model, "messages": [{"role": "user", "content": content}], **_sampling(dice)}
    if dice.random() < 0.3:
        tool = {"name": "weather", "input_schema": {"type": "object"}}
        use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
        sunny = [{"type": "text", "text": "sunny"}]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": sunny}
        body["messages"] += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        body |= {"tools": [tool], "system": [{"type": "text", "text": _text(dice)}], "stop_sequences": ["x"]}
    return path, body


def _tokenizing(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    if dice.random() < 0.5:
        return "/tokenize", {"model": model, "prompt": _text(dice)}
    return "/detokenize", {"model": model, "tokens": _prompt(dice)}


def _scoring(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    scored = {"query": _text(dice), "items": [_text(dice)], "label_token_ids": [300, 301]}
    return "/generative_scoring", {"model": model, **scored}


_VALID = (
    *[_completions] * 3,
    *[_chat] * 3,
    *[_responses, _anthropic, _structured] * 2,
    *(_tools, _batch, _tokenizing, _scoring),
)
# fmt: off
_OTHER_PATHS = (
    "/", "/health", "/ping", "/load", "/version", "/metrics", "/v1/models", "/v1/models/demo", "/openapi.json", "/docs",
    "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/responses/..%2f", "/pause", "/v1/embeddings", "/%00",
)
_QUERIES = (
    "?", "?model=no-model", "?model=%00", "?stream=true&starting_after=-1", "?" + "x" * 3000,
    "?a[]=1&a[]=2", "?%ff=%fe",
)
_HEADERS = (
    "x-request-timeout", "x-request-timeout", "x-request-id", "x-request-id", "x-data-parallel-rank", "x-session-id",
    "traceparent", "accept", "authorization", "anthropic-version", "x-forwarded-for",
)
_HEADER_VALUES = (
    "0.05", "1e-9", "3", "nan", "-1", "same-id", "cmpl-same-id", "\xff\xfe", "a" * 4000, "%0d%0a", "9" * 40, "",
)
# fmt: on


# changes, in place


def _nasty(dice: random.Random) -> Any:
    ordinary: Sequence[Sequence[Any]] = (INTEGERS, INTEGERS, INTEGERS, NUMBERS, NAMED, STRINGS)
    if (kind := dice.randrange(8)) < len(ordinary):
        return dice.choice(ordinary[kind])
    return dice.choice(
        (None, True, False, [], {}, [None], {"": None}, [[]], [{}] * 50, {"a": {"b": [1]}}, ["x"] * 3000)
    )


def _set_number(dice: random.Random, body: dict[str, Any]) -> None:
    body[dice.choice(NUMERIC)] = dice.choice((*INTEGERS, *NUMBERS, *SPELLED, _nasty(dice)))


def _set_nested(dice: random.Random, body: dict[str, Any]) -> None:
    name = dice.choice(sorted(NESTED))
    body[name.partition(" ")[0]] = NESTED[name](dice.choice((dice.choice(INTEGERS), _nasty(dice))))


def _replace(dice: random.Random, body: dict[str, Any]) -> None:
    """A value somewhere inside."""
    here, key = _inner(dice, body)
    here[key] = _nasty(dice)


def _inner(dice: random.Random, body: dict[str, Any]) -> tuple[Any, Any]:
    """A list or object somewhere inside that is not empty, and a key of it."""
    here: Any = body
    while True:
        key = dice.choice(list(here) if isinstance(here, dict) else range(len(here)))
        if not isinstance(here[key], dict | list) or not here[key] or dice.random() < 0.3:
            return here, key
        here = here[key]


def _retype(dice: random.Random, body: dict[str, Any]) -> None:
    """The same value, otherwise typed."""
    here, key = _inner(dice, body)
    value = here[key]
    here[key] = dice.choice((str(value), [value], {"": value}, bool(value), [value] * 300, json.dumps(value)))


def _duplicate(dice: random.Random, body: dict[str, Any]) -> None:
    """An element again beside itself, or a field under a name that is nearly its own."""
    here, key = _inner(dice, body)
    if isinstance(here, list):
        here += [here[key]] * dice.choice((1, 1, 100))
    else:
        here[dice.choice((key.upper(), f"{key} ", f"{key}\0", key * 2, "__class__"))] = here[key]


def _drop(dice: random.Random, body: dict[str, Any]) -> None:
    """A field somewhere inside, or one of the outermost."""
    here, key = _inner(dice, body) if dice.random() < 0.5 else (body, dice.choice(list(body)))
    del here[key]
    if not body:
        body["x"] = 1


def _spelled(dice: random.Random, body: dict[str, Any]) -> bytes:
    """Encode the body, sometimes as no JSON library would."""
    sys.set_int_max_str_digits(10_000)
    raw = json.dumps(body, ensure_ascii=True)
    match dice.randrange(40):
        case 0:
            return raw.encode()[: dice.randrange(len(raw))]
        case 1:
            return dice.randbytes(dice.randrange(2000))
        case 2:
            depth = dice.choice((50, 500, 5000, 100_000))
            return f'{raw[:-1]}, "metadata": {"[" * depth}{"]" * depth}}}'.encode()
        case 3:
            return f'{raw[:-1]}, "user": "{"y" * dice.randrange(HUGE)}"}}'.encode()
        case 4:
            return f'{raw[:-1]}, "temperature": {"9" * 5000}}}'.encode()
        case 5:
            return raw.replace('"max', '"n": 3, "max', 1).encode() + b"\x00"
        case 6:
            return json.dumps(json.dumps(body)).encode()
        case 7:
            at = dice.randrange(len(raw))
            return raw[:at].encode() + dice.randbytes(3) + raw[at:].encode()
        case _:
            return raw.encode()


def _coded(dice: random.Random, raw: bytes) -> tuple[bytes, dict[str, str]]:
    """Now and then in another coding than a client's."""
    match dice.randrange(60):
        case 0:
            return gzip.compress(raw), {"content-encoding": "gzip"}
        case 1:
            return raw, {"content-encoding": dice.choice(("gzip", "deflate", "br", "x", ""))}
        case 2:
            headers = {"content-type": "application/json; charset=utf-16"}
            return raw.decode("latin-1").encode("utf-16"), headers
        case 3:
            return b"\xef\xbb\xbf" + raw, {}
        case 4:
            kind = dice.choice(("text/plain", "multipart/form-data", "", "application/json;"))
            return raw, {"content-type": kind}
        case _:
            return raw, {}


def _header(dice: random.Random) -> dict[str, str]:
    return {dice.choice(_HEADERS): dice.choice(_HEADER_VALUES)}
