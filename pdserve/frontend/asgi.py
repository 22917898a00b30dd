"""The few ASGI types and answers that the edge needs."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from pdserve.errors import whole_seconds

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "PayloadTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}

_EVENT = b"data: "


def header(scope: Scope, name: str) -> str | None:
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), None)


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: str,
    headers: Mapping[str, str] | None = None,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """`before_end` is awaited when everything has been sent, and before the connection may be closed."""
    fields = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    if before_end is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = b""
        await before_end()
    await send({"type": "http.response.body", "body": body})


async def respond_json(
    send: Send,
    status: int,
    content: object,
    headers: Mapping[str, str] | None = None,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> None:
    await respond(send, status, msgspec.json.encode(content), "application/json", headers, before_end)


def with_one_type(body: bytes, status: int = 0) -> bytes:
    """An error of vLLM's app, whole or as an event of a stream, with the type that its status has everywhere: the app
    calls a 504 once TimeoutError and once Gateway Timeout. Anything else stays as it is."""
    mark = _EVENT if body.startswith(_EVENT) else b""
    try:
        fields = msgspec.json.decode(body.removeprefix(mark))
        error = fields["error"]
        kind = _TYPES.get(status or error["code"], error["type"])
    except (msgspec.DecodeError, TypeError, KeyError):
        return body
    if error["type"] == kind:
        return body
    error["type"] = kind
    return mark + msgspec.json.encode(fields) + (b"\n\n" if mark else b"")


def error_body(path: str, status: int, message: str, param: str | None = None) -> dict[str, object]:
    """In OpenAI's shape, as vLLM's own errors; in Anthropic's under /v1/messages."""
    kind = _TYPES.get(status, "InternalServerError")
    error: dict[str, object] = {"message": message, "type": kind, "param": param, "code": status}
    return {"type": "error", "error": error} if path.startswith("/v1/messages") else {"error": error}


async def respond_error(
    send: Send,
    path: str,
    status: int,
    message: str,
    *,
    param: str | None = None,
    retry_after: float = 0.0,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> None:
    headers = {"retry-after": retry_seconds(retry_after)} if retry_after else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    await respond_json(send, status, error_body(path, status, message, param), headers, before_end)


def retry_seconds(seconds: float) -> str:
    """HTTP wants whole seconds; rounded up, since who comes too early is refused again."""
    return str(whole_seconds(seconds))
