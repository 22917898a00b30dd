"""The request body: read once with a bound, looked into, and replayed to the app that answers."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import UnionType

import msgspec

from pdserve.errors import Overloaded
from pdserve.frontend.admission.estimate import RequestSize
from pdserve.frontend.asgi import Message, Receive

MAX_BODY = 32 << 20
"""bytes; prompts of a million tokens fit"""
MAX_HELD = 256 << 20
"""bytes of the bodies of all requests that are not over"""
MAX_DISCARDED = 2 * MAX_BODY
DISCARD_WITHIN = 10.0
"""bytes and seconds for the rest of a body whose request was refused"""
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


NO_SIZE = RequestSize(0, None)


@dataclass(frozen=True)
class Body:
    raw: bytes
    model: str | None
    """as named in it; None where it names none"""
    size: RequestSize = NO_SIZE


class Intake:
    """Reads bodies, and counts each from its first byte until its request is over: the model's app holds it as long,
    and several times as much beside it. A client gets no more than is still free, so that there is always something
    left for another one."""

    def __init__(self, bound: int = MAX_HELD) -> None:
        self._bound = bound
        self._held = 0
        self._of_client: Counter[str] = Counter()

    @asynccontextmanager
    async def read(
        self, incoming: "Incoming", deadline: float, client: str, most: int
    ) -> AsyncIterator[bytes]:
        """`deadline` in monotonic seconds, `most` in bytes. Raises Refusal for a body that is larger or not whole by
        then, Overloaded, and ClientGone."""
        parts: list[bytes] = []
        try:
            await self._collect(incoming, deadline, client, most, parts)
            yield b"".join(parts)
        finally:
            size = sum(map(len, parts))
            self._held -= size
            self._of_client[client] -= size
            if not self._of_client[client]:
                del self._of_client[client]

    async def _collect(
        self, incoming: "Incoming", deadline: float, client: str, most: int, parts: list[bytes]
    ) -> None:
        size = 0
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                while incoming.more:
                    part = await incoming.part()
                    parts.append(part)
                    size += len(part)
                    self._held += len(part)
                    self._of_client[client] += len(part)
                    self._check(size, client, most)
        except TimeoutError:
            raise Refusal(408, "the request body was not complete by the request's deadline") from None

    def _check(self, size: int, client: str, most: int) -> None:
        if size > most:
            raise Refusal(413, f"the request body is larger than {most} bytes")
        if self._of_client[client] > self._bound - self._held:
            raise Overloaded(f"request bodies of {self._held} bytes are being worked on")


class Incoming:
    """What the client sends."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.more = True
        """not all of the body has come"""

    async def part(self) -> bytes:
        """Raises ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.more = False
            raise ClientGone
        self.more = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def discard(self) -> None:
        """Read on for a while what belongs to a refused request: a socket that is closed before tells its client of a
        broken connection, and not of our answer."""
        left = MAX_DISCARDED
        with suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(DISCARD_WITHIN):
                while self.more and left > 0:
                    left -= len(await self.part())


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
    if not isinstance(fields.get("structured_outputs") or {}, dict):  # vLLM 0.32 answers 500
        raise Refusal(400, "structured_outputs must be an object", "structured_outputs")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "model must be a string", "model")
    return Body(raw, model or None, _size(raw, fields))


def _size(raw: bytes, fields: Mapping[str, object]) -> RequestSize:
    """What is no valid value counts as none: vLLM's app will refuse it."""
    bounds = [value for name in _BOUNDS if (value := _count(fields.get(name)))]
    prompts = max(_several(fields.get("prompt"), str | list), _several(fields.get("messages"), list))
    n = _count(fields.get("n")) or 1
    return RequestSize(len(raw) // _BYTES_PER_TOKEN, min(bounds, default=None), prompts * n, n)


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
