"""The response on its way out: its start is held back until the first part of the body, because only then it
is known where the request went, and whether it failed before anything was said."""

import msgspec

from pdserve.frontend.asgi import Message, Send, error_body, respond_error, retry_seconds, with_one_type
from pdserve.frontend.trace import RequestTrace


class Answer:
    """The `send` of the app inside."""

    def __init__(self, send: Send, trace: RequestTrace, path: str) -> None:
        self.status = 0
        """as it was sent; 0 before"""
        self._send = send
        self.trace = trace
        """of what answers now"""
        self._path = path
        self._held: Message | None = None
        self._early: list[Message] = []
        """parts of the body that came while the start was held"""
        self._ended = False
        self._muted = False
        self._stream = False

    @property
    def started(self) -> bool:
        return self.status != 0

    @property
    def given_back(self) -> bool:
        """Nothing was said, and another model is to answer: see `anew`."""
        failure = self.trace.failure
        return failure is not None and failure.redirect and not self.started and not self._muted

    @property
    def ended(self) -> bool:
        """There is nothing more to be said."""
        return self._ended

    def anew(self) -> None:
        """For another app; the one before is over. Has a trace of its own from now on."""
        self.trace = self.trace.restarted()
        self._held = None
        self._early.clear()
        self._ended = False

    async def __call__(self, message: Message) -> None:
        if self._ended:
            return
        if message["type"] == "http.response.start":
            self._held = message
            return
        if self._held is None:
            await self._pass_on(message)
            return
        self._early.append(message)
        if self._too_early(self._held, message):
            return
        held, self._held = self._held, None
        if self.given_back:
            self._ended = True
            return
        if self._must_replace(held):
            await self.fail()
            return
        if held["status"] >= 400 and len(self._early) == 1 and not message.get("more_body", False):
            held, self._early[0] = _one_type(held, message)
        await self._start(held)
        for early in self._early:
            await self._pass_on(early)

    async def _pass_on(self, message: Message) -> None:
        self._ended = not message.get("more_body", False)
        if message.get("body", b"").startswith(b'data: {"error"'):
            message = {**message, "body": with_one_type(message["body"])}
        await self._send(message)

    def _too_early(self, start: Message, message: Message) -> bool:
        """Some streams (responses) begin with an event before anything is generated."""
        if self.trace.prefill or self.trace.failure is not None or not message.get("more_body", False):
            return False
        return _is_stream(start)

    async def end_with(self, status: int, message: str, retry_after: float = 0.0) -> None:
        """Instead of what the app inside would still say, which is over: an error, as the whole answer or as
        the last event of a stream that has begun."""
        if self._ended:
            return
        if not self.started:
            self._held = None
            await respond_error(self.own, self._path, status, message, retry_after=retry_after)
        elif self._stream:
            event = b"data: " + msgspec.json.encode(error_body(self._path, status, message)) + b"\n\n"
            if self._path.startswith(("/v1/messages", "/v1/responses")):  # their events have names
                event = b"event: error\n" + event
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        self._ended = True

    def mute(self) -> None:
        """Nobody listens any more."""
        self._ended = self._muted = True

    async def own(self, message: Message) -> None:
        """As `__call__`, for an answer of our own."""
        if message["type"] == "http.response.start":
            await self._start(message)
        else:
            await self._pass_on(message)

    def _must_replace(self, start: Message) -> bool:
        """A stream's status is sent before vLLM knows of the failure; here it is still in time."""
        return self.trace.failure is not None and start["status"] == 200

    async def fail(self) -> None:
        """End it with the failure that the trace names."""
        if self.given_back:
            return
        failure = self.trace.failure
        assert failure is not None
        await self.end_with(failure.status, failure.message, failure.retry_after)

    async def _start(self, start: Message) -> None:
        self.status = start["status"]
        names = {name.lower(): value for name, value in start["headers"]}
        self._stream = _is_stream(start)
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"x-request-id"]
        headers += [(name, value.encode("latin-1")) for name, value in self._own().items()]
        if self.status in (429, 503) and b"retry-after" not in names:
            failure = self.trace.failure
            headers.append((b"retry-after", retry_seconds(failure.retry_after if failure else 1.0).encode()))
        if self.status == 500 and self.trace.failure is not None:
            headers.append((b"x-should-retry", b"false"))  # OpenAI's and Anthropic's clients heed it
        await self._send({**start, "headers": headers})

    def _own(self) -> dict[bytes, str]:
        trace = self.trace
        own = {b"x-request-id": trace.request_id}
        if trace.prefill:
            own[b"x-pdserve-prefill"] = trace.prefill
        if trace.instances:
            own[b"x-pdserve-instance"] = trace.instances
        return own


def _one_type(start: Message, message: Message) -> tuple[Message, Message]:
    body = with_one_type(message.get("body", b""), start["status"])
    kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    headers = [*kept, (b"content-length", str(len(body)).encode())]
    return {**start, "headers": headers}, {**message, "body": body}


def _is_stream(start: Message) -> bool:
    types = [value for name, value in start["headers"] if name.lower() == b"content-type"]
    return bool(types) and types[0].startswith(b"text/event-stream")
