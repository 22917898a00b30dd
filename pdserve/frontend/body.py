"""The request body: read once with a bound, looked into, and replayed to the app that answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import UnionType

import msgspec

from pdserve.errors import Overloaded
from pdserve.frontend.asgi import Message, Receive

MAX_BODY = 32 << 20
"""bytes; prompts of a million tokens fit"""
MAX_READING = 256 << 20
"""bytes of all the bodies that are being read"""
_BYTES_PER_TOKEN = 4
_BOUNDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

# Where KV comes from is decided inside the graph. vLLM would take these from anybody, and some values kill
# an engine.
FORBIDDEN = ("kv_transfer_params", "ec_transfer_params", "kv_hints")


class Refusal(Exception):
    """The request cannot be passed on; the arguments of the error answer."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after


class ClientGone(Exception):
    """Disconnected before the body was complete: nobody is left to answer."""


@dataclass(frozen=True)
class Asks:
    """How much work a request is, as far as its body tells without a tokenizer."""

    prompt_tokens: int
    """a guess: bytes / 4"""
    max_tokens: int | None
    """for each sequence; None where the body sets no bound"""
    sequences: int = 1
    n: int = 1
    """of these, for each prompt"""


@dataclass(frozen=True)
class Body:
    raw: bytes
    model: str | None
    """as named in it; None where it names none"""
    asks: Asks = Asks(0, None)


class Intake:
    """Reads bodies, all together within a bound: one that comes slowly holds memory."""

    def __init__(self, bound: int = MAX_READING) -> None:
        self._bound = bound
        self._held = 0

    async def read(self, receive: Receive, deadline: float) -> bytes:
        """`deadline` in monotonic seconds. Raises Refusal for a body over MAX_BODY, without reading the rest of it, or
        not whole by then, Overloaded, and ClientGone."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async for part in _parts(receive):
                    size += len(part)
                    self._held += len(part)
                    parts.append(part)
                    self._check(size)
        except TimeoutError:
            raise Refusal(408, "the request body was not complete by the request's deadline") from None
        finally:
            self._held -= size
        return b"".join(parts)

    def _check(self, size: int) -> None:
        if size > MAX_BODY:
            raise Refusal(413, f"the request body is larger than {MAX_BODY} bytes")
        if self._held > self._bound:
            raise Overloaded(f"request bodies of more than {self._bound} bytes are being read")


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        more = message.get("more_body", False)


def look_into(raw: bytes) -> Body:
    """Finds the model, and refuses what must not come from outside."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the request body is no valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refusal(400, "the request body must be a JSON object")
    extra = fields.get("vllm_xargs")
    for name in FORBIDDEN:
        if fields.get(name) is not None:
            raise Refusal(400, f"{name} must not be sent: the server decides where KV comes from", name)
        if isinstance(extra, dict) and name in extra:
            raise Refusal(
                400, f"vllm_xargs.{name} must not be sent: the server decides where KV comes from", name
            )
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "model must be a string", "model")
    return Body(raw, model or None, _asks(raw, fields))


def _asks(raw: bytes, fields: Mapping[str, object]) -> Asks:
    """What is no valid value counts as none: vLLM's app will refuse it."""
    bounds = [value for name in _BOUNDS if (value := _count(fields.get(name)))]
    prompts = max(_several(fields.get("prompt"), str | list), _several(fields.get("messages"), list))
    n = _count(fields.get("n")) or 1
    return Asks(len(raw) // _BYTES_PER_TOKEN, min(bounds, default=None), prompts * n, n)


def _several(value: object, kind: type | UnionType) -> int:
    """How many prompts a list of such is; anything else is one."""
    return len(value) if isinstance(value, list) and value and isinstance(value[0], kind) else 1


def _count(value: object) -> int | None:
    """A number above 0, also as vLLM's app reads it: "3" and 3.0 are 3."""
    if isinstance(value, str):
        value = int(value) if len(value) < 20 and value.strip().isdecimal() else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


class Replay:
    """The body again, for the app inside; after it a disconnect, once `gone` is set."""

    def __init__(self, body: bytes, gone: asyncio.Event) -> None:
        self._body: bytes | None = body
        self._gone = gone

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}
