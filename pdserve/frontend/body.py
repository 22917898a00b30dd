"""The request body: read once with a bound, looked into, and replayed to the app that answers."""

import asyncio
from dataclasses import dataclass

import msgspec

from pdserve.frontend.asgi import Message, Receive

MAX_BODY = 32 << 20
"""bytes; prompts of a million tokens fit"""

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
class Body:
    raw: bytes
    model: str | None
    """as named in it; None where it names none"""


async def read_body(receive: Receive, limit: int = MAX_BODY) -> bytes:
    """Raises Refusal for a body over the limit, without reading the rest of it, and ClientGone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise Refusal(413, f"the request body is larger than {limit} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


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
    return Body(raw, model or None)


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
