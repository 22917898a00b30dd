"""Structured outputs on every route, and the errors of invalid ones."""

from typing import Any

import pytest

from tests.conformance.answers import Request
from tests.conformance.asking import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Body, body, refused, table
from tests.conformance.pair import Pair, same
from tests.conformance.prompts import long

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.usefixtures("begun")]

FORECAST: Body = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def schema(of: Any, **more: Any) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": of, "strict": True, **more}}


TAGS: Body = {"structures": [{"begin": "<f>", "schema": FORECAST, "end": "</f>"}], "triggers": ["<f>"]}
KINDS: dict[str, Body] = {
    "regex": {"regex": "[a-c]{4} [0-9]{3}"},
    "choice": {"choice": ["red", "blue", "green"]},
    "JSON": {"json": FORECAST},
    "JSON as text": {"json": '{"type": "integer", "minimum": 10, "maximum": 99}'},
    "JSON object": {"json_object": True},
    "grammar": {"grammar": 'root ::= "yes " [0-9] | "no"'},
    "Lark grammar": {"grammar": 'start: "yes" | "no"'},
    "no whitespace": {"json": FORECAST, "disable_any_whitespace": True},
}
OUTPUTS = {name: {"structured_outputs": asked} for name, asked in KINDS.items()}
IN_CHAT: dict[str, Body] = {
    **OUTPUTS,
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": schema(FORECAST)},
    "json_schema, n": {"response_format": schema(FORECAST), "n": 2, "logprobs": True, "top_logprobs": 1},
    "structural tag": {"response_format": {"type": "structural_tag", **TAGS}},
    "text": {"response_format": {"type": "text"}},
    "regex and penalties": {**OUTPUTS["regex"], "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "regex, cut": {**OUTPUTS["regex"], "max_tokens": 2},
    "regex, sampled": {**OUTPUTS["regex"], "temperature": 1.0, "seed": 3},
}
IN_RESPONSES: dict[str, Body] = {
    "json_schema": {
        "text": {"format": {"type": "json_schema", "name": "f", "schema": FORECAST, "strict": True}}
    },
    "json_object": {"text": {"format": {"type": "json_object"}}},
}
IN_MESSAGES = {"json_schema": {"output_config": {"format": {"type": "json_schema", "schema": FORECAST}}}}
BAD: dict[str, Any] = {
    "a bad regex": {"regex": "("},
    "a lookahead": {"regex": "(?=a)b"},
    "no choices": {"choice": []},
    "choices that are numbers": {"choice": [1, 2]},
    "a schema of an unknown type": {"json": {"type": "nothing"}},
    "a schema that is cut": {"json": "{"},
    "a number for a schema": {"json": 3},
    "a reference to nothing": {"json": {"$ref": "#/$defs/x"}},
    "multipleOf": {"json": {"type": "integer", "multipleOf": 3}},
    "a bad pattern": {"json": {"type": "string", "pattern": "("}},
    "a bad grammar": {"grammar": "root ::= ("},
    "an empty grammar": {"grammar": ""},
    "two kinds": {"regex": "a", "choice": ["b"]},
    "no kind": {},
    "an unknown kind": {"something": 1},
    "a bad tag": {"structural_tag": "{}"},
}
BAD_OUTPUTS = {name: {"structured_outputs": asked} for name, asked in BAD.items()}
BAD_FORMATS: dict[str, Body] = {
    "a format of an unknown type": {"response_format": schema({"type": "nothing"})},
    "a number for a format's schema": {"response_format": schema(3)},
    "a number for a format": {"response_format": 3},
    "a format and a regex": {"response_format": schema(FORECAST), "structured_outputs": {"regex": "a"}},
}
BAD_TEXT: dict[str, Body] = {
    "a format of an unknown type": {
        "text": {"format": {"type": "json_schema", "name": "f", "schema": {"type": "nothing"}}}
    },
}
REQUESTS = [
    *table(CHAT, IN_CHAT),
    *table(COMPLETIONS, OUTPUTS),
    *table(RESPONSES, IN_RESPONSES),
    *table(MESSAGES, IN_MESSAGES),
    *refused(CHAT, BAD_OUTPUTS | BAD_FORMATS),
    *refused(COMPLETIONS, BAD_OUTPUTS),
    *refused(RESPONSES, BAD_TEXT),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_responses_equal_vllms(pair: Pair, request_: Request) -> None:
    pair.same(request_)


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_a_stream_is_refused_with_the_same_error(pair: Pair, name: str) -> None:
    whole, stream = (
        Request(name, CHAT, body(CHAT, **BAD_OUTPUTS[name], stream=stream)) for stream in (False, True)
    )
    theirs = pair.both(whole)[1]
    if theirs.status >= 400:
        same(whole, pair.both(stream)[0], theirs)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, IN_CHAT["json_schema"]),
        (COMPLETIONS, OUTPUTS["regex"]),
        (RESPONSES, IN_RESPONSES["json_object"]),
        (MESSAGES, IN_MESSAGES["json_schema"]),
    ],
)
def test_responses_equal_vllms_after_a_remote_prefill(pair: Pair, path: str, asked: Body) -> None:
    prompt = long(f"test_structured {path}")
    pair.remote(pair.same(Request(f"{path}, remote", path, body(path, prompt, **asked))))


NO_SPACES = {"200": -100, "201": -100, "223": -100}
"""A `logit_bias` against tokens of spaces, with which the model would otherwise fill the JSON."""
