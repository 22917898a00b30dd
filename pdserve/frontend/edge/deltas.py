"""Writes most chunks of a plain stream straight to the client's connection, without vLLM's app.

Nearly all chunks of a plain stream differ only in their text. So vLLM's app makes the chunks up to the first with text,
the last chunk, usage and errors. The others are copies of the first chunk with text, each with its own text
(docs/decisions/0029-chunks-without-the-app.md).
"""

import re
from collections.abc import Mapping
from typing import Protocol

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_PLAIN = {
    "model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "response_format", "structured_outputs", "user",
}  # fmt: skip
"""Fields of a request that change only the text of its chunks."""
_CHUNK = re.compile(
    rb'(data: .*?(?:"delta":\{"content":|"choices":\[\{"index":0,"text":))"(?:[^"\\]|\\.)*+"(.*)', re.DOTALL
)
"""A chunk with text. Tokens cannot imitate its fields, because JSON escapes their quotes."""
_json = msgspec.json.Encoder().encode


def is_plain(fields: Mapping[str, object]) -> bool:
    """Whether the decoded JSON of a request asks for one stream of text and nothing else. False for an unknown field,
    and for `tool_choice: null`, because a tool parser then reads the text."""
    given = {name: value for name, value in fields.items() if value is not None or name == "tool_choice"}
    options, prompt = given.pop("stream_options", {}), given.get("prompt")
    return (
        given.keys() - {"n"} <= _PLAIN
        and given.get("stream") is True
        and given.get("n", 1) == 1
        and isinstance(options, dict)
        and options.keys() <= {"include_usage"}
        and (not isinstance(prompt, list) or isinstance(next(iter(prompt), None), int))  # token ids
    )


class ChunkWriter(Protocol):
    """Writes to the client's connection, in order with the HTTP server's `send`."""

    def ready(self) -> bool:
        """Return whether a chunked body has begun and the client reads it fast enough."""

    def write(self, part: bytes) -> None:
        """Write a part of that body; call only when ready."""


class CycleChunks(ChunkWriter):
    """Writes a part of a chunked body as uvicorn's `send` does, without a message and a coroutine."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def ready(self) -> bool:
        cycle = self._cycle
        over = self._flow.write_paused or cycle.disconnected or cycle.response_complete
        return bool(cycle.chunked_encoding) and not over

    def write(self, part: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(part), part))


class DeltaStream:
    """The response to a plain request. For each output, vLLM's app or `write` makes the chunk."""

    def __init__(self, connection: ChunkWriter) -> None:
        self._connection = connection
        self._frame: tuple[bytes, bytes] | None = None
        self._with_app = 0
        """Number of outputs whose chunks the app has not written yet."""

    def passed(self) -> None:
        """Count an output that the app will make a chunk of."""
        self._with_app += 1

    def sent(self, part: bytes) -> None:
        """Count a chunk with text that the app has written. The first one without a finish reason is the template."""
        if chunk := _CHUNK.fullmatch(part):
            self._with_app -= 1
            if self._frame is None and b'"finish_reason":null' in chunk[2]:
                self._frame = chunk[1], chunk[2]

    def ready(self) -> bool:
        return not self._with_app and self._frame is not None and self._connection.ready()

    def write(self, text: str) -> None:
        """Call only when ready."""
        assert self._frame is not None
        before, after = self._frame
        self._connection.write(b"%b%b%b" % (before, _json(text), after))
