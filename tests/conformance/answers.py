"""Normalize a server's response, so that two servers can be compared."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

_VOLATILE = {
    "id", "created", "created_at", "completed_at", "system_fingerprint", "item_id", "response_id", "request_id",
    "call_id", "tool_call_id", "signature",
}  # fmt: skip
_OWN_HEADERS = re.compile(
    r"date|server|connection|content-length|transfer-encoding|x-request-id|x-pdserve-.*|server-timing"
)
_GROWS = {
    "content", "text", "reasoning", "delta", "arguments", "partial_json", "thinking", "token_ids", "tokens",
    "token_logprobs", "top_logprobs", "text_offset", "logprobs", "prompt_token_ids",
}  # fmt: skip
"""Keys whose values are split arbitrarily over events, or that only an output's first chunk has."""
MIDDLE = "in the middle"
"""Key of `events_of`'s result: each output's chunks without role and finish."""
CLOSE = 0.002
"""Maximum difference of logprobs that count as equal."""
_RANDOM = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]+)*")


@dataclass(frozen=True)
class Request:
    name: str
    path: str
    json: Any = None
    content: bytes | None = None
    """A raw body instead of `json`."""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    differs: str = ""
    """The two servers' responses show this difference, a key of `DIFFERENCES`."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Any
    """JSON with random values masked, a stream's events (`events_of`), or text."""
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
    """Mask random values and times in JSON. Ids keep their prefix."""
    if isinstance(value, dict):
        return {key: _mask(part) if key in _VOLATILE else masked(part) for key, part in value.items()}
    if isinstance(value, list):
        return [masked(part) for part in value]
    return value


def _mask(value: Any) -> Any:
    if isinstance(value, str):
        return _RANDOM.sub("*", value)
    return "*" if isinstance(value, int | float) else masked(value)


def events_of(text: str) -> dict[str, Any]:
    """Normalize a stream of server-sent events, so that the division of tokens into events does not matter. Return the
    kinds of events of each output (`n`) in order, without repetitions, and their joined texts. Roles, finishes, usage,
    `[DONE]` and chunks after the output's finish are kept even if repeated."""
    finished: set[str] = set()
    kinds: dict[str, list[Any]] = {}
    middle: dict[str, list[Any]] = {}
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
        in_parts = _is_middle(choices) and output not in finished
        order = (middle if in_parts else kinds).setdefault(output, [])
        once = choices is not None or content == "[DONE]"
        if not order or order[-1] != shape or (once and not in_parts):
            order.append(shape)
        if choices and choices[0]["finish_reason"]:
            finished.add(output)
    # vLLM's parser drops `</think>` if it is a chunk of its own, and keeps it if tokens came together
    said = {
        where: part.replace("</think>", "") if isinstance(part, str) else part for where, part in said.items()
    }
    return {"kinds": kinds, MIDDLE: middle, "said": said}


def _is_middle(choices: list[Any] | None) -> bool:
    """Whether a chunk has no role and no finish. A stream lacks such a chunk if its tokens came in another one."""
    return bool(choices) and "role" not in choices[0].get("delta", {}) and choices[0]["finish_reason"] is None  # type: ignore[index]


def _without_growth(value: Any, path: str, said: dict[str, Any], partial: bool) -> Any:
    """Return what all events of a kind have in common; collect the rest in `said`."""
    if isinstance(value, list):
        return [_without_growth(part, path, said, partial) for part in value]
    if not isinstance(value, dict):
        return value
    common: dict[str, Any] = {}
    for key, part in value.items():
        where = f"{path}.{key}"
        if key == "sequence_number" or (partial and key in _GROWS and part is None):
            continue  # the key is null or absent in a chunk, depending on which steps came together
        if not _collect(key, part, where, said, partial):
            common[key] = _without_growth(part, where, said, partial)
        elif key == "usage" or (key in _GROWS and not partial):
            common[key] = "…"
    return common


def _collect(key: str, part: Any, where: str, said: dict[str, Any], partial: bool) -> bool:
    """Add a part that grows over the stream to `said`. Return False if it does not grow."""
    if partial and key == "usage" and part:  # usage so far: keep that of the last chunk
        said[where] = part
    elif partial and key == "tool_calls" and part:
        for call in part:
            _add_call(said.setdefault(f"{where} {call['index']}", {}), call)
    elif key in _GROWS and isinstance(part, str | list):
        said[where] = said.get(where, type(part)()) + part
    else:
        return False
    return True


def _add_call(call: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict):
            _add_call(call.setdefault(key, {}), value)
        else:
            call[key] = call[key] + value if key == "arguments" and key in call else value


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield the differences of two responses as sentences. Logprobs may differ slightly, because the batch changes
    their last bits."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            if MIDDLE not in path or (key in ours and key in theirs):
                yield from differences(ours.get(key, "absent"), theirs.get(key, "absent"), f"{path}.{key}")
    elif path.rpartition(".")[0].endswith(MIDDLE) and len(ours) != len(theirs):
        if not _is_part_of(*sorted((ours, theirs), key=len)):
            yield f"{path}: {ours!r}, not {theirs!r}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif ours != theirs and not _are_close(ours, theirs):
        yield f"{path}: {ours!r}, not {theirs!r}"


def _is_part_of(shorter: list[Any], longer: list[Any]) -> bool:
    """Whether the longer stream has all chunks of the shorter one, in order. The shorter one lacks chunks whose tokens
    came together with others."""
    rest = iter(longer)
    return all(any(not any(differences(one, other)) for other in rest) for one in shorter)


def _are_close(ours: Any, theirs: Any) -> bool:
    return isinstance(ours, float) and isinstance(theirs, float) and not abs(ours - theirs) > CLOSE


def without(tree: Any, path: str) -> Any:
    """Return a copy in which the part at this path is `…`."""
    key, _, rest = path.partition(".")
    if not isinstance(tree, dict):
        return tree
    return {**tree, key: without(tree.get(key), rest) if rest else "…"}
