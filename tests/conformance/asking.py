"""Requests to each generating route, from tables of cases."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.conformance.answers import Request
from tests.conformance.prompts import SHORT, long

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
Body = dict[str, Any]
_serial = itertools.count()


def body(path: str, prompt: str = SHORT, **fields: Any) -> Body:
    """A greedy request for at most 60 tokens."""
    messages = [{"role": "user", "content": prompt}]
    asked: Body = {
        CHAT: {"messages": messages, "max_tokens": 60},
        COMPLETIONS: {"prompt": prompt, "max_tokens": 20},
        RESPONSES: {"input": prompt, "max_output_tokens": 60},
        MESSAGES: {"messages": messages, "max_tokens": 60},
    }[path]
    return {"model": "demo", "temperature": 0, **asked, **fields}


def streamed(asked: Body, path: str) -> Body:
    usage = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    return {**asked, "stream": True, **usage}


def table(path: str, variants: Mapping[str, Body], prompt: str = SHORT) -> Iterator[Request]:
    """Yield each variant with a short prompt and with a long, remotely prefilled one, each whole and streamed."""
    for name, fields in variants.items():
        for size in ("short", "long"):
            text = prompt if size == "short" else f"{long(f'{path} {name}')} {prompt}"
            asked = body(path, **{"prompt": text, **fields})
            yield Request(f"{path} {name}, {size}", path, asked | _uncached(path, "whole"))
            yield Request(
                f"{path} {name}, {size}, streamed", path, streamed(asked, path) | _uncached(path, "streamed")
            )


def whole(requests: Iterable[Request]) -> Iterator[Request]:
    """The requests that are not streamed."""
    return (request for request in requests if not request.name.endswith("streamed"))


def _uncached(path: str, name: str) -> Body:
    """A cache salt for `/v1/responses`, whose count of cached tokens otherwise depends on earlier requests."""
    return {"cache_salt": f"{name} {next(_serial)}"} if path == RESPONSES else {}


def refused(path: str, variants: Mapping[str, Body]) -> Iterator[Request]:
    """Yield each variant once, with a short prompt."""
    for name, fields in variants.items():
        yield Request(f"{path} {name}", path, body(path, **fields))
