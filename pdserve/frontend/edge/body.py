"""The body of a request: read once within bounds, parsed for what the frontend has to know, replayed to the model's
app."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import UnionType

import msgspec
from pydantic_core import SchemaValidator, ValidationError, core_schema
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope

from pdserve.frontend.admission.wait_estimate import RequestSize
from pdserve.frontend.edge.deltas import is_plain
from pdserve.frontend.edge.request_state import RequestFailure
from pdserve.frontend.edge.response import HttpError, ResponseWriter, error_response
from pdserve.util.errors import BadRequest, Overloaded, PdserveError

MAX_BODY = 32 << 20
"""Maximum of bytes in a body. A prompt of a million tokens fits."""
MAX_HELD = 256 << 20
"""Maximum of bytes in the bodies of all running requests."""
PACE = 1000.0
"""Minimum of bytes per second of a body, on average, after `GRACE` seconds."""
GRACE = 30.0
MAX_DISCARDED = 2 * MAX_BODY
"""Maximum of bytes to read of a refused request's body."""
DISCARD_WITHIN = 10.0
"""Maximum of seconds to read a refused request's body."""
_BYTES_PER_TOKEN = 4
IMAGE_TOKENS = 1024
"""Assumed tokens of an image. A model makes 64 to about 4,000, depending on its size."""
_BOUNDS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/chat/completions/batch": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
}
"""By route: fields that limit the output tokens; the first one that is set counts. Other routes: `max_tokens`."""
_SEVERAL = {"/generative_scoring": ("items", str | list)}
"""By route: field with several prompts, and a prompt's type. Other routes: `prompt` or `messages`."""
MAX_PARTS = 10_000
"""Maximum of lists and objects in a body: vLLM's app takes 10 to 100 microseconds for each."""
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A JSON string. An unclosed one matches to the body's end, so that no further search starts at its escaped quotes."""
LARGE = 64 << 10
"""Bytes of a body that takes vLLM's app about 10 ms."""
MANY = 100
"""JSON objects of a body that takes vLLM's app about 10 ms."""
_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
_LARGEST = 1 << 40
"""Larger numbers of a body are cut to this, so that computing with them cannot overflow."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Request ids that clients may choose; short, because log lines and the graph's messages contain them."""
_read_int = SchemaValidator(core_schema.int_schema()).validate_python
_read_bool = SchemaValidator(core_schema.bool_schema()).validate_python

# The graph decides where KV comes from. vLLM would accept these from any client, and some values kill an engine.
FORBIDDEN = ("kv_transfer_params", "ec_transfer_params", "kv_hints")


@dataclass(frozen=True)
class ParsedBody:
    raw: bytes
    model: str | None
    """None if the body names no model"""
    size: RequestSize
    is_plain: bool = False
    """see `deltas.is_plain`"""
    has_id: bool = False
    """whether it has a `request_id`"""
    is_large: bool = False
    """see `_is_large`"""
    has_tools: bool = False
    is_flex: bool = False


def max_body(max_model_len: int, *, tokenizing: bool) -> int:
    """Return how many bytes a body may have for a model with this context length (0: unknown). 64 bytes a token
    (32 if `tokenizing`) are enough for \\u escapes, lists of token ids and several prompts."""
    if not max_model_len:
        return MAX_BODY
    most = (256 << 10) + 32 * max_model_len if tokenizing else (4 << 20) + 64 * max_model_len
    return min(MAX_BODY, most)


class Budget:
    """Memory that the requests of all clients share, in bytes or pixels. A client's part is at most as large as what
    stays free, so that another client always gets some."""

    def __init__(self, bound: int, refusal: str) -> None:
        """`refusal`: error text, in which `{}` becomes the amount in use."""
        self._bound, self._refusal = bound, refusal
        self.used = 0
        self.of_client: Counter[str] = Counter()

    def take(self, client: str, amount: int) -> None:
        """If it raises Overloaded, it has taken nothing."""
        if self.of_client[client] + amount > self._bound - self.used - amount:
            raise Overloaded(self._refusal.format(self.used))
        self.give_back(client, -amount)

    def give_back(self, client: str, amount: int) -> None:
        self.used -= amount
        self.of_client[client] -= amount
        if not self.of_client[client]:
            del self.of_client[client]


class BodyReader:
    """Reads bodies. Each body counts in `budget` until its request ends, because until then the model's app holds it,
    and objects of several times its size."""

    def __init__(self, bound: int = MAX_HELD, grace: float = GRACE) -> None:
        self.budget = Budget(bound, "too many request bodies are in memory ({} bytes)")
        self._grace = grace

    @asynccontextmanager
    async def read(self, request: Request, deadline: float, client: str, most: int) -> AsyncIterator[bytes]:
        """`deadline`: monotonic seconds. `most`: bytes. Raises HttpError for a too large, slow or late body,
        Overloaded, and ClientDisconnect."""
        async with self.parts(request, deadline, client, most) as parts:
            body = bytearray()  # not a list: a part may be a single byte
            async for part in parts:
                body += part
            yield bytes(body)

    @asynccontextmanager
    async def parts(
        self, request: Request, deadline: float, client: str, most: int
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Like `read`, but in parts, for a caller that writes the body to a file."""
        size = 0

        async def read() -> AsyncGenerator[bytes, None]:
            nonlocal size
            begun, stream = asyncio.get_running_loop().time(), request.stream()
            end = begun + deadline - time.monotonic()
            while True:
                due = min(end, begun + self._grace + size / PACE)
                try:
                    async with asyncio.timeout_at(due):
                        part = await anext(stream, None)
                except TimeoutError:
                    why = f"came slower than {PACE:g} bytes a second"
                    if due == end:
                        why = "was not complete by the request's deadline"
                    raise HttpError(408, f"the request body {why}") from None
                if part is None:
                    return
                if size + len(part) > most:
                    raise HttpError(413, f"the request body is larger than {most} bytes")
                self.budget.take(client, len(part))
                size += len(part)
                yield part

        try:
            yield read()
        finally:
            self.budget.give_back(client, size)


async def discard_rest(request: Request) -> None:
    """Read the rest of a refused request's body, within limits: a client that sees its connection closed while it sends
    may miss the response."""
    left = MAX_DISCARDED
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: all of it has been read
        async with asyncio.timeout(DISCARD_WITHIN):
            async for part in request.stream():
                left -= len(part)
                if left <= 0:
                    return


async def refuse(request: Request, response: ResponseWriter, error: PdserveError) -> None:
    """Respond with this error and read the rest of the body. If a response has begun, only end it."""
    failure = RequestFailure(error.status, str(error))
    if response.status:
        await response.fail(failure)
        return
    response.refusal = failure
    answer = error_response(response.state.path, error)
    if "expect" in request.headers:  # the client may or may not send the body: the next bytes are ambiguous
        answer.headers["connection"] = "close"
    await response.reply(answer, before_end=partial(discard_rest, request))


def parse_body(path: str, raw: bytes) -> ParsedBody:
    """Find the model and the size of the request. Raises BadRequest for what the model's app would not refuse properly.
    The app refuses a body that is not a JSON object, and a model that is not a string."""
    check_parts(raw)
    fields = _fields(raw)
    extra = fields.get("vllm_xargs")
    for name in FORBIDDEN:
        if fields.get(name) is not None:
            raise BadRequest(f"{name} must not be sent: the server decides where KV comes from", name)
        if isinstance(extra, dict) and name in extra:
            raise BadRequest(
                f"vllm_xargs.{name} must not be sent: the server decides where KV comes from", name
            )
    if not isinstance(fields.get("structured_outputs") or {}, dict):  # vLLM 0.32 answers 500
        raise BadRequest("structured_outputs must be an object", "structured_outputs")
    store = fields.get("store")  # vLLM's check lets "false" as text pass; the response is then kept for ever
    if isinstance(store, str) and not _is_true(store) and _is_true(fields.get("background")):
        raise BadRequest("background can only be used when `store` is true", "background")
    given = fields.get("request_id")
    if isinstance(given, str) and not REQUEST_ID.fullmatch(given):
        raise BadRequest("request_id must be 1 to 128 letters, digits and . _ : - of ASCII", "request_id")
    model = fields.get("model")
    named = model if isinstance(model, str) and model else None
    has_id = given is not None
    size, large = _size(path, raw, fields), _is_large(raw, fields)
    is_flex = fields.get("service_tier") == "flex"
    return ParsedBody(raw, named, size, is_plain(fields), has_id, large, bool(fields.get("tools")), is_flex)


def check_parts(raw: bytes) -> None:
    """Raise BadRequest for a body with too many lists and objects, before parsing it."""
    # `_TEXT` is for UTF-8; a body with \0 has another encoding
    if raw.count(b"{") + raw.count(b"[") > MAX_PARTS and b"\0" not in raw:
        raw = _TEXT.sub(b"", raw)
    if (parts := raw.count(b"{") + raw.count(b"[")) > MAX_PARTS:
        raise BadRequest(f"the body has {parts} lists and objects; one request may have {MAX_PARTS}")


def _is_large(raw: bytes, fields: Mapping[str, object]) -> bool:
    """Whether vLLM's app would block the frontend's event loop for long (`vllm/side_loop.py`): by a large body,
    by `echo`, or by the logprobs of a response that is no stream."""
    if len(raw) > LARGE or raw.count(b"{") > MANY or _is_true(fields.get("echo")):
        return True  # a chat with `echo` has the logprobs of its prompt, too
    if _is_true(fields.get("stream")):
        return False  # each chunk has few logprobs
    return any(value is not None and value is not False for value in map(fields.get, _LOGPROBS))


def _fields(raw: bytes) -> dict[str, object]:
    """Return the fields as the model's app will read them; empty if it will refuse the body. The app uses Python's
    `json`, which accepts more than the standard: NaN, numbers of any size, other encodings, lone surrogates."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError):
            return {}
    return fields if isinstance(fields, dict) else {}


def _size(path: str, raw: bytes, fields: Mapping[str, object]) -> RequestSize:
    """Estimate the request's size. Ignores invalid values: vLLM's app will refuse them."""
    bounds = (_count(fields.get(name)) for name in _BOUNDS.get(path, ("max_tokens",)))
    bound, n = next(filter(None, bounds), None), _count(fields.get("n")) or 1
    several, kind = _SEVERAL.get(path, ("prompt", str | list))
    prompts = max(_several(fields.get(several), kind), _several(fields.get("messages"), list))
    images, image_bytes = _images(fields) if b"image" in raw else (0, 0)
    size = len(raw) - image_bytes
    if several == "items":
        bound, n, size = 1, 1, size + (prompts - 1) * _length(fields.get("query"))
    tokens = size // _BYTES_PER_TOKEN + images * IMAGE_TOKENS
    asked = fields.get("logprobs") if fields.get("echo") else None
    logprobs = tokens * n * (_count(fields.get("prompt_logprobs") or asked) or 0)
    return RequestSize(tokens, bound, prompts * n, n, min(logprobs, _LARGEST), several)


def _images(fields: Mapping[str, object]) -> tuple[int, int]:
    """Count the images of a request, and the characters of their URLs or base64."""
    count = length = 0
    left: list[object] = [fields.get("messages"), fields.get("input")]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            image = part.get("source") if part.get("type") == "image" else part.get("image_url")
            if isinstance(image, dict):
                image = image.get("data") or image.get("url")
            if isinstance(image, str):
                count, length = count + 1, length + len(image)
            else:
                left += part.values()
    return count, length


def _length(text: object) -> int:
    """Approximate bytes of a text or a list of tokens."""
    return (
        len(text) if isinstance(text, str) else _BYTES_PER_TOKEN * len(text) if isinstance(text, list) else 0
    )


def _several(value: object, kind: type | UnionType) -> int:
    """Count the prompts in a list of `kind`; anything else is one."""
    return len(value) if isinstance(value, list) and value and isinstance(value[0], kind) else 1


def _count(value: object) -> int | None:
    """Read a number above 0 as vLLM's app does, with pydantic: "+3", "3.0" and 3.0 are 3."""
    try:
        number = _read_int(value)
    except ValidationError:
        return None
    return min(number, _LARGEST) if number > 0 else None


def _is_true(value: object) -> bool:
    """Read a flag as vLLM's app does, with pydantic: "off" and 0 are false."""
    try:
        return bool(_read_bool(value))
    except ValidationError:
        return False


def replay(raw: bytes, left: asyncio.Event) -> Receive:
    """Return the `receive` for the model's app: the body again and, once `left` is set, a disconnect."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    return receive


def app_scope(request: Request, request_id: str, body: ParsedBody) -> Scope:
    """Return the scope for vLLM's app. The app makes the response's id from the header `x-request-id`, or else the
    body's `request_id`; so the header is set unless only the body has an id."""
    headers = MutableHeaders(raw=list(request.scope["headers"]))
    if not body.has_id or "x-request-id" in headers:
        headers["x-request-id"] = request_id
    del headers["traceparent"]  # the frontend traces; vLLM's app would warn that it does not trace
    del headers["tracestate"]
    return {**request.scope, "headers": headers.raw}
