"""Writes responses and errors.

The start of a response is held back until the first part of its body, because only then the frontend knows which worker
the request has, and whether the request has already failed.
"""

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdserve.contract.messages import Hop
from pdserve.contract.reports import DETOURS, HOPS
from pdserve.frontend.edge.request_state import CLIENT_LEFT, RequestFailure, RequestState
from pdserve.util.errors import BadRequest, Overloaded, PdserveError, retry_after_seconds

_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "PayloadTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "BadRequestError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
    507: "InsufficientStorageError",
}
_EVENT = b"data: "
_ERROR_EVENTS = (b'data: {"error"', b"event: error\n")
MAX_TIMED, MAX_SAID = 16, 100
"""Maximum of hops in a `server-timing` header, and of characters in each description."""


class HttpError(PdserveError):
    """The request gets this error as its response, and goes no further."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after = retry_after


REFUSALS = (HttpError, BadRequest, Overloaded)
"""Errors that become the response."""


def error_body(path: str, error: PdserveError) -> dict[str, object]:
    """Return the error in OpenAI's shape; under /v1/messages in Anthropic's. Types and codes are vLLM's, but those of a
    key's `limit` are OpenAI's and Anthropic's."""
    kind, limit = _ERROR_TYPES.get(error.status, "InternalServerError"), error.limit
    message = str(error).encode(errors="backslashreplace").decode()  # it may quote half of a surrogate pair
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": "rate_limit_error" if limit else kind, "message": message}}
    code = "rate_limit_exceeded" if limit else error.status
    return {"error": {"message": message, "type": limit or kind, "param": error.param, "code": code}}


def error_response(path: str, error: PdserveError) -> Response:
    headers = {"retry-after": str(retry_after_seconds(error.retry_after))} if error.retry_after else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(path, error), error.status, headers)


def with_one_shape(path: str, body: bytes, status: int = 0) -> bytes:
    """Give an error of vLLM's app, a whole body or an event of a stream, the shape of `error_body`. The app reports
    unreadable bodies as `detail`, and errors on Anthropic's route in OpenAI's shape. Each status of 429 or more gets
    one error type, because the app calls a 504 either TimeoutError or Gateway Timeout."""
    mark = _EVENT if body.startswith(_EVENT) else b""
    try:
        found = fields = msgspec.json.decode(body.removeprefix(mark))
        if status and isinstance(fields.get("detail"), str):
            fields = error_body(path, HttpError(status, fields["detail"]))
        error, status = fields["error"], status or fields["error"]["code"]
        kind = _ERROR_TYPES.get(status, error["type"]) if status >= 429 else error["type"]
        if path.startswith("/v1/messages"):
            fields = {"type": "error", "error": {"type": kind, "message": error["message"]}}
        else:
            fields = {**fields, "error": {**error, "type": kind}}
    except (ValueError, AttributeError, TypeError, KeyError):
        return body
    return body if fields == found else mark + msgspec.json.encode(fields) + (b"\n\n" if mark else b"")


class ResponseWriter:
    """The ASGI `send` for the app that answers one request."""

    def __init__(self, send: Send, state: RequestState) -> None:
        self.state = state
        """the request's state at the model that responds now"""
        self.status = 0
        """the status that was sent; 0 before"""
        self.ended = False
        """whether further messages of the app are dropped"""
        self.refusal: RequestFailure | None = None
        """a failure that `state` does not have"""
        self._send = send
        self._held: Message | None = None
        """the start message, while it is held back"""
        self._early: list[Message] = []
        """parts of the body, while the start is held"""
        self._stream = False
        self._disconnected = False

    @property
    def redirected(self) -> bool:
        """Whether the model was replaced before anything was sent: after `restart`, the new model responds."""
        failure = self.state.failure
        return failure is not None and failure.redirect and not self.status and not self._disconnected

    @property
    def failure(self) -> RequestFailure | None:
        """Why the request failed; None also if only the model's app knows."""
        return self.state.failure or self.refusal

    def restart(self) -> None:
        """Begin again for another model's app, after the first one has ended. Replaces `state`."""
        self.state = self.state.restarted()
        self._held = None
        self._early.clear()
        self.ended = False

    def disconnect(self) -> None:
        """Send nothing more: the client has left, or the deadline has passed."""
        if not self.ended and self.refusal is None:
            self.refusal = RequestFailure(CLIENT_LEFT, "the client left")
        self.ended = self._disconnected = True

    async def __call__(self, message: Message) -> None:
        if self.ended:
            return
        if message["type"] == "http.response.start":
            self._held = message
            return
        if self.state.failure is None and message.get("body", b"").startswith(_ERROR_EVENTS):
            self.state.failure = _failure_of(message["body"])
        if self._held is None:
            await self._send_body(message)
        else:
            self._early.append(message)
            await self._begin(self._held, message)

    async def reply(
        self, response: Response, before_end: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Send this response in place of an app's. `before_end` is awaited after the whole body was
        sent, and before the message that ends the response."""
        self._held = None
        headers, body = response.raw_headers, bytes(response.body)
        await self._send_start(
            {"type": "http.response.start", "status": response.status_code, "headers": headers}
        )
        if before_end is not None:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await before_end()
            body = b""
        await self._send_body({"type": "http.response.body", "body": body})

    async def fail(self, failure: RequestFailure) -> None:
        """End the response with an error: as the whole response or, if a stream has begun, as its last event. Further
        messages of the app are dropped."""
        if self.ended:
            return
        self.refusal = self.refusal or failure
        if not self.status:
            await self.reply(error_response(self.state.path, _http_error(failure)))
        elif self._stream:
            event = _error_event(self.state.path, failure)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        self.ended = True

    async def _begin(self, start: Message, first: Message) -> None:
        failure, whole = self.state.failure, not first.get("more_body", False)
        generating = self.state.admission is not None and not self.state.prefill
        if not whole and failure is None and generating and _is_stream(start):
            return  # streams of /v1/responses begin with an event before anything is generated
        self._held = None
        if self.redirected:
            self.ended = True
        elif failure is not None and start["status"] == 200:
            # vLLM's app learns of the failure only after it has sent a stream's status
            await self.fail(failure)
        else:
            if start["status"] >= 400 and whole and len(self._early) == 1:
                body = with_one_shape(self.state.path, first.get("body", b""), start["status"])
                headers = MutableHeaders(raw=list(start["headers"]))
                headers["content-length"] = str(len(body))
                start, self._early[0] = {**start, "headers": headers.raw}, {**first, "body": body}
            await self._send_start(start)
            for part in self._early:
                await self._send_body(part)

    async def _send_start(self, start: Message) -> None:
        state, failure = self.state, self.state.failure
        self.status = start["status"]
        self._stream = _is_stream(start)
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["x-request-id"] = state.request_id
        headers.update({**state.headers, **state.usage_headers()})
        if state.prefill:
            headers["x-pdserve-prefill"] = state.prefill
            headers["x-pdserve-reason"] = _printable(state.reason)
            headers["x-pdserve-cached-tokens"] = str(state.cached_tokens)
        if state.instances:
            headers["x-pdserve-instance"] = ",".join(state.instances)
            headers["x-pdserve-retries"] = str(state.retries)
        if timing := server_timing(state.hops.until(time.monotonic()), whole=not self._stream):
            headers["server-timing"] = timing
        if self.status in (429, 503):
            headers.setdefault(
                "retry-after", str(retry_after_seconds(failure.retry_after if failure else 1.0))
            )
        if self.status == 500 and failure is not None:
            headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients obey it
        await self._send({**start, "headers": headers.raw})

    async def _send_body(self, message: Message) -> None:
        self.ended = not message.get("more_body", False)
        body = message.get("body", b"")
        if body.startswith(_ERROR_EVENTS[0]):
            message = {**message, "body": with_one_shape(self.state.path, body)}
        elif body.startswith(_ERROR_EVENTS) and self.state.failure is not None:
            # the text of vLLM's Anthropic route says nothing of the error
            message = {**message, "body": _error_event(self.state.path, self.state.failure)}
        await self._send(message)
        if self.state.deltas is not None:
            self.state.deltas.sent(message.get("body", b""))


def _failure_of(event: bytes) -> RequestFailure:
    """Read the failure from an error event of vLLM's app that `vllm/stream_errors.py` did not record."""
    try:
        error = msgspec.json.decode(event.partition(_EVENT)[2])["error"]
        code = error.get("code")
        status = code if isinstance(code, int) else 500
        return RequestFailure(status, str(error["message"]), param=error.get("param"))
    except (ValueError, AttributeError, TypeError, KeyError):
        return RequestFailure(500, "internal error")


def _http_error(failure: RequestFailure) -> HttpError:
    return HttpError(failure.status, failure.message, failure.param, failure.retry_after)


def _error_event(path: str, failure: RequestFailure) -> bytes:
    event = _EVENT + msgspec.json.encode(error_body(path, _http_error(failure))) + b"\n\n"
    named = path.startswith(("/v1/messages", "/v1/responses"))
    return b"event: error\n" + event if named else event


def server_timing(hops: Sequence[Hop], *, whole: bool) -> str:
    """Return the `server-timing` header: each hop with its ms and its instance. A hop that takes no time has its
    reason instead. `whole`: false at the start of a stream, to leave out its unfinished decode."""
    shown = [hop for hop in hops if hop.name in HOPS and (whole or hop.name != "decode")]
    return ", ".join(map(_timed, shown[:MAX_TIMED]))


def _timed(hop: Hop) -> str:
    timeless = hop.name in DETOURS
    said = _printable(hop.why if timeless else hop.instance)[:MAX_SAID]
    return (
        hop.name
        + ("" if timeless else f";dur={hop.seconds * 1000:.2f}")
        + (f';desc="{said}"' if said else "")
    )


def _printable(text: str) -> str:
    """Replace characters that a header's quoted string must not have."""
    return re.sub(r"[^ !#-\[\]-~]", "?", text)


def _is_stream(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")


async def send_unchunked(cycle: RequestResponseCycle, send: Any, message: Any) -> None:
    """Send part of an HTTP/1.0 response, where a body of unknown length ends with the connection. uvicorn would send
    chunks, which HTTP/1.0 clients cannot decode."""
    if message["type"] == "http.response.body":
        cycle.expected_content_length = max(cycle.expected_content_length, len(message.get("body", b"")))
    elif not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
        cycle.chunked_encoding = False
    await send(message)
