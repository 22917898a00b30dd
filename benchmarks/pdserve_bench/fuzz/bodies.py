"""Bodies of every shape: valid ones for every route that takes one, with some changes each.

Values of other types, integers over 64 bits wherever a number may stand, NaN, lone surrogates, deep nesting, long text,
half a body, bytes that are no JSON; some clients leave at a random moment.
"""

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

INTEGERS = (2**63 - 1, 2**63, -(2**63) - 1, 2**64 - 1, 2**64, -(2**64), 10**30, -(10**30), 10**400)
NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 1e-320, 2**31, 2**32, 65536, 129, 500)
NAMED = (float("nan"), float("inf"), float("-inf"))
# fmt: off
STRINGS = (
    "", " ", "\0", "\ud800", "a\udc00b", "\U0010ffff", "x" * 5000, "%s%n", "-1", "1e999", "null", "../..", "🙂" * 300,
)
# fmt: on
HUGE = 200_000
"""characters"""
# fmt: off
NUMERIC = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of", "seed",
    "top_k", "top_p", "min_p", "temperature", "logprobs", "top_logprobs", "prompt_logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "priority",
    "truncate_prompt_tokens", "thinking_token_budget", "max_tool_calls",
)
# fmt: on
NESTED: Mapping[str, Callable[[Any], Any]] = {
    "stop_token_ids": lambda value: [value],
    "logit_bias": lambda value: {str(value): 1},
    "logit_bias value": lambda value: {"300": value},
    "allowed_token_ids": lambda value: [300, value],
    "bad_words": lambda value: [str(value)],
    "repetition_detection": lambda value: {"max_pattern_size": value, "min_pattern_size": 1, "min_count": 2},
    "repetition_detection min": lambda value: {
        "max_pattern_size": 4,
        "min_pattern_size": value,
        "min_count": value,
    },
    "structured_outputs": lambda value: {"json": {"enum": [value]}},
    "structured_outputs const": lambda value: {
        "json": {"type": "object", "properties": {"a": {"const": value}}}
    },
    "structured_outputs bounds": lambda value: {
        "json": {"type": "integer", "minimum": value, "maximum": value}
    },
    "structured_outputs length": lambda value: {
        "json": {"type": "string", "maxLength": value, "minLength": value}
    },
    "structured_outputs choice": lambda value: {"choice": [value]},
    "structured_outputs regex": lambda value: {"regex": f"a{{{value}}}"},
    "response_format": lambda value: {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": [value]}},
    },
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


@dataclass(frozen=True)
class FuzzBody:
    """One request, the same for a number of a seed."""

    number: int
    path: str
    raw: bytes
    leaves: float | None = None
    """seconds after which its client goes away; None: it reads to the end"""

    def __str__(self) -> str:
        text = self.raw if len(self.raw) <= 1500 else self.raw[:700] + b" ... " + self.raw[-700:]
        return f"body {self.number}, POST {self.path}, {len(self.raw)} bytes: {text!r}"


def make(seed: int, number: int, model: str) -> FuzzBody:
    dice = random.Random(f"{seed}-{number}")
    path, body = dice.choice(_VALID)(dice, model)
    for _ in range(dice.choice((0, 1, 1, 1, 1, 2, 4))):
        dice.choice((_set_number, _set_nested, _set_nested, _replace, _drop))(dice, body)
    leaves = dice.choice((None, None, None, dice.random() * 0.1, dice.random()))
    return FuzzBody(number, path, _spelled(dice, body), leaves)


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


def _batch(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    messages = [[{"role": "user", "content": _text(dice)}] for _ in range(2)]
    return "/v1/chat/completions/batch", {"model": model, "messages": messages, "max_tokens": 4}


def _responses(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": model, "input": _text(dice), **_sampling(dice, "max_output_tokens")}


def _anthropic(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    path = dice.choice(("/v1/messages", "/v1/messages", "/v1/messages/count_tokens"))
    return path, {"model": model, "messages": [{"role": "user", "content": _text(dice)}], **_sampling(dice)}


def _tokenizing(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    if dice.random() < 0.5:
        return "/tokenize", {"model": model, "prompt": _text(dice)}
    return "/detokenize", {"model": model, "tokens": _prompt(dice)}


def _scoring(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    return "/generative_scoring", {
        "model": model,
        "query": _text(dice),
        "items": [_text(dice)],
        "label_token_ids": [300, 301],
    }


_VALID = (
    *[_completions] * 3,
    *[_chat] * 3,
    *(_batch, _responses, _anthropic, _tokenizing, _scoring),
)


# changes, in place


def _nasty(dice: random.Random) -> Any:
    kind = dice.randrange(8)
    if kind < 3:
        return dice.choice(INTEGERS)
    if kind == 3:
        return dice.choice(NUMBERS)
    if kind == 4:
        return dice.choice(NAMED)
    if kind == 5:
        return dice.choice(STRINGS)
    return dice.choice(
        (None, True, False, [], {}, [None], {"": None}, [[]], [{}] * 50, {"a": {"b": [1]}}, ["x"] * 3000)
    )


def _set_number(dice: random.Random, body: dict[str, Any]) -> None:
    body[dice.choice(NUMERIC)] = dice.choice((*INTEGERS, *NUMBERS, _nasty(dice)))


def _set_nested(dice: random.Random, body: dict[str, Any]) -> None:
    name = dice.choice(sorted(NESTED))
    body[name.partition(" ")[0]] = NESTED[name](dice.choice((dice.choice(INTEGERS), _nasty(dice))))


def _replace(dice: random.Random, body: dict[str, Any]) -> None:
    """A value somewhere inside."""
    here: Any = body
    while True:
        key = dice.choice(list(here) if isinstance(here, dict) else range(len(here)))
        if not isinstance(here[key], dict | list) or not here[key] or dice.random() < 0.3:
            break
        here = here[key]
    here[key] = _nasty(dice)


def _drop(dice: random.Random, body: dict[str, Any]) -> None:
    body.pop(dice.choice(list(body)), None)
    if not body:
        body["x"] = 1


def _spelled(dice: random.Random, body: dict[str, Any]) -> bytes:
    """As bytes; now and then such as no JSON library would write."""
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
