"""Check responses to fuzzed requests. Pure."""

import json
from contextlib import suppress
from typing import Any

from pdserve_bench.fuzz.request import FuzzRequest

OVERLOAD = frozenset({429, 503, 504})
"""Statuses of overload and deadlines. Of these, only 429 is allowed for every request."""
EXCUSED = {
    "'ResponseOutputRefusal' object has no attribute 'text'": "vLLM: a refusal among the input of /v1/responses",
}
"""Allowed messages of a 5xx, with reasons."""
UNSTREAMED = (b"stream=True", b"Streaming is not")
"""Messages of refusals caused by `stream` itself."""
_LAST = {"message_stop", "error", "response.completed", "response.incomplete", "response.failed"}
UNREADABLE = b"Invalid HTTP request received."
"""Start of responses to invalid HTTP heads. Such requests have no route, so no error format applies."""


def problem(request: FuzzRequest, status: int, kind: str, answer: bytes) -> str:
    """Return what is wrong with the response, else an empty text. `status` 0: no response; `kind`: its content type."""
    if request.expected is not None and status not in request.expected and status != 429:
        return f"status {status}, not {sorted(request.expected)}: {_short(answer)}"
    if status == 0:
        return "" if request.expected else "no answer"
    if status >= 500 and not _is_excused(request, status, answer):
        return f"status {status}: {_short(answer)}"
    if kind.startswith("text/event-stream"):
        return _stream_problem(request, answer)
    if status >= 400 and not answer.startswith(UNREADABLE):
        return _error_problem(request.path, status, answer)
    if kind.startswith("application/json") and request.method != "HEAD":
        with suppress(ValueError):
            json.loads(answer)
            return ""
        return f"no JSON: {_short(answer)}"
    return ""


def twin_problem(status: int, answer: bytes, without: int) -> str:
    """Return what is wrong if a streamed request and its twin without `stream` have different statuses."""
    by_chance = OVERLOAD & {status, without} or any(text in answer for text in UNSTREAMED)
    if status == without or by_chance:
        return ""
    return f"status {status}, without `stream` {without}: {_short(answer)}"


def _is_excused(request: FuzzRequest, status: int, answer: bytes) -> bool:
    if request.expected is not None and status in request.expected:
        return True
    hurried = "x-request-timeout" in request.headers and status in OVERLOAD
    return hurried or is_excused(answer.decode(errors="replace"))


def is_excused(text: str) -> bool:
    return any(excuse in text for excuse in EXCUSED)


def _error_problem(path: str, status: int, answer: bytes) -> str:
    """Check the error's format: OpenAI's, or Anthropic's on its routes. As in vLLM, early refusals on Anthropic's
    routes may have OpenAI's format; refusals of a wrong method or of invalid JSON may have FastAPI's."""
    try:
        found = json.loads(answer)
        error = found.get("error")
        if error is None:
            well = status in (400, 405) and isinstance(found["detail"], str)
        else:
            anthropic = path.startswith("/v1/messages") and found.get("type") == "error"
            well = isinstance(error["message"], str) and bool(error["message"] and error["type"])
            well = well and (anthropic or error["code"] == status)
    except (ValueError, LookupError, TypeError, AttributeError):
        well = False
    return "" if well else f"status {status} without a valid error: {_short(answer)}"


def _stream_problem(request: FuzzRequest, answer: bytes) -> str:
    """Check that events are JSON without a 5xx, and that the stream has an end."""
    last: Any = None
    for line in answer.splitlines():
        if not line.startswith(b"data:"):
            continue
        try:
            last = "[DONE]" if line.endswith(b"[DONE]") else json.loads(line[5:])
        except ValueError:
            return f"an event with invalid JSON: {_short(line)}"
        error = last.get("error") if isinstance(last, dict) else None
        code = error.get("code", 500) if isinstance(error, dict) else 0
        if isinstance(code, int) and code >= 500 and not _is_excused(request, code, line):
            return f"in the stream: {_short(line)}"
    if last == "[DONE]" or (isinstance(last, dict) and _ends(last)):
        return ""
    return f"a stream without a last event: {_short(answer[-300:])}"


def _ends(event: dict[str, Any]) -> bool:
    kind = str(event.get("type", ""))
    return bool(event.get("error")) or kind in _LAST


def _short(answer: bytes) -> str:
    return repr(answer if len(answer) < 800 else answer[:500] + b" ... " + answer[-300:])
