"""Find grammars that would end the process that compiles them, before vLLM compiles them. Pure."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

LOWEST = -9.2e18
"""llguidance, which vLLM uses if xgrammar refuses a schema, ends the process (an endless recursion) at an integer range
whose upper bound is next to the smallest of 64 bits; it clips bounds beyond"""
_UPPER = ("maximum", "exclusiveMaximum")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def problem(params: Any) -> tuple[str, str] | None:
    """The field of these sampling parameters that must be refused, and why; None if there is none."""
    asked = params.structured_outputs
    if asked and (why := schema_problem(asked.json, asked.structural_tag) or lark_problem(asked.grammar)):
        return "structured_outputs", why
    if any(map(_SURROGATE.search, params.bad_words or ())):  # vLLM answers 500
        return "bad_words", "bad_words must be Unicode text"
    return None


def schema_problem(*schemas: object) -> str:
    """Why these JSON schemas (or structural tags, as objects or as text) must be refused; empty if they need not."""
    for schema in schemas:
        for name, value in _bounds(_read(schema)):
            if value < LOWEST:
                return f"a JSON schema's {name} must not be below {LOWEST:g}"
    return ""


def lark_problem(grammar: object) -> str:
    """The same for a grammar in Lark's form, which may hold schemas (`%json`). Only their numbers are looked at: a
    client may write everything else with escapes."""
    numbers = _NEGATIVE.findall(grammar) if isinstance(grammar, str) else ()
    if any(float(number) < LOWEST for number in numbers):
        return f"a grammar's numbers must not be below {LOWEST:g}"
    return ""


def _read(schema: object) -> object:
    if isinstance(schema, str):
        with suppress(ValueError, RecursionError):
            return json.loads(schema)
    return schema


def _bounds(schema: object) -> Iterator[tuple[str, int | float]]:
    """All upper bounds in a schema; without recursion, since a client may nest it arbitrarily deep."""
    rest = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, Mapping):
            rest += part.values()
            for name in _UPPER:
                value = part.get(name)
                if isinstance(value, int | float):
                    yield name, value
        elif isinstance(part, list):
            rest += part
