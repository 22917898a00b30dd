"""What a server answered, in a form in which two servers can be compared."""

import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

_VOLATILE = {
    "id", "created", "created_at", "completed_at", "system_fingerprint", "item_id", "response_id", "request_id",
    "call_id", "tool_call_id",
}  # fmt: skip
_OWN_HEADERS = re.compile(
    r"date|server|connection|content-length|transfer-encoding|x-request-id|x-pdserve-.*"
)
_GROWS = {
    "content", "text", "reasoning", "delta", "arguments", "partial_json", "thinking", "token_ids", "tokens",
    "token_logprobs", "top_logprobs", "text_offset", "logprobs",
}  # fmt: skip
"""keys of strings and lists that come in parts, each as long as it happens"""
_RANDOM = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]+)*")


@dataclass(frozen=True)
class Request:
    """What is sent to both servers."""

    name: str
    path: str
    json: Any = None
    content: bytes | None = None
    """instead of `json`"""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    differs: str = ""
    """the name of a listed difference that it shows"""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Any
    """JSON without what is random; of a stream its events (`Events`); else text"""
    response: httpx.Response = field(compare=False, repr=False)

    @property
    def prefill(self) -> str:
        return str(self.response.headers.get("x-pdserve-prefill", ""))


def answer_of(response: httpx.Response) -> Answer:
    headers = {name: value for name, value in response.headers.items() if not _OWN_HEADERS.fullmatch(name)}
    if "location" in headers:
        headers["location"] = urlsplit(headers["location"]).path
    kind = headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return Answer(response.status_code, headers, events_of(response.text), response)
    try:
        body = masked(response.json())
    except ValueError:
        body = response.text
    return Answer(response.status_code, headers, body, response)


def masked(value: Any) -> Any:
    """Without what is random or a time. Ids keep their prefix; numbers are rounded, for what else is in the batch
    changes the last bits of a logprob now and then."""
    if isinstance(value, dict):
        return {key: _mask(part) if key in _VOLATILE else masked(part) for key, part in value.items()}
    if isinstance(value, list):
        return [masked(part) for part in value]
    return round(value, 3) if isinstance(value, float) else value


def _mask(value: Any) -> Any:
    if isinstance(value, str):
        return _RANDOM.sub("*", value)
    return "*" if isinstance(value, int | float) else masked(value)


def events_of(text: str) -> dict[str, Any]:
    """A stream of server-sent events, however its tokens were divided among them: for each output (`n`) the kinds of
    events in their order, each once, and all that they say, joined."""
    kinds: dict[str, list[Any]] = {}
    said: dict[str, Any] = {}
    for event in filter(None, re.split(r"\r?\n\r?\n", text)):
        fields = dict(line.split(": ", 1) if ": " in line else (line, "") for line in event.splitlines())
        name, data = fields.get("event", ""), fields.get("data", "")
        extra = sorted(fields.keys() - {"event", "data"})
        try:
            content = masked(json.loads(data))
        except ValueError:
            content = data
        choices = content.get("choices") if isinstance(content, dict) else None
        output = str(choices[0].get("index")) if choices else ""
        shape = [name, *extra, _without_growth(content, f"{name} {output}", said, bool(choices))]
        order = kinds.setdefault(output, [])
        if not order or order[-1] != shape:
            order.append(shape)
    return {"kinds": kinds, "said": said}


def _without_growth(value: Any, path: str, said: dict[str, Any], partial: bool) -> Any:
    """What all events of a kind have in common. The rest goes into `said`."""
    if isinstance(value, list):
        return [_without_growth(part, path, said, partial) for part in value]
    if not isinstance(value, dict):
        return value
    common: dict[str, Any] = {}
    for key, part in value.items():
        where = f"{path}.{key}"
        if key == "sequence_number":
            continue
        if partial and key == "usage" and part:  # counts what has come so far
            said[where] = part
            common[key] = "…"
        elif key in _GROWS and isinstance(part, str | list):
            said[where] = said.get(where, type(part)()) + part
            common[key] = "…"
        else:
            common[key] = _without_growth(part, where, said, partial)
    return common


def without(tree: Any, path: str) -> Any:
    """A copy in which the part at this path is `…`."""
    key, _, rest = path.partition(".")
    if not isinstance(tree, dict):
        return tree
    return {**tree, key: without(tree.get(key), rest) if rest else "…"}
