"""One TCP connection, plain or with TLS, that carries frames both ways.

A frame is a length (four bytes, big-endian) and that many bytes. Without TLS, sums follow the length and the body where
both sides have agreed on it: the CRC-32 of all that was sent that way so far. A frame that was damaged, lost, repeated
or moved on its way ends the connection (docs/decisions/0096-checked-frames.md).

An empty frame is a heartbeat; the server answers each with another one, from which the client learns the round trip.
When a process ends, its connections close, and the other side sees that at once. When a process hangs, or the network
is cut, the other side gives the connection up after some seconds of silence. A connection that has ended is never used
again.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol
from zlib import crc32

from pdserve.stream.tls import Tls
from pdserve.util.errors import ProtocolError

MAX_MESSAGE = 64 << 20
"""bytes; a reader that takes nothing for a second is cut, so that a larger message would cut a slow link each time"""
BEAT_EVERY = 1.0
"""seconds"""
SEND_WITHIN = 1.0
"""seconds that sending waits for a slow reader"""
_LOOKS = 20
LINGER = 0.3
"""seconds that closing waits for unsent data to leave and for the other side to close"""
DAMAGED = "carried bytes that were changed on their way"
MAX_UNSENT = 32 << 20
"""bytes that may wait for a slow reader, plus one frame: some seconds of tokens at full load"""


def bounded(message: object, body: bytes) -> bytes:
    """Raises ProtocolError: the other side would end the connection, with all requests on it."""
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes, of {MAX_MESSAGE} at most")
    return body


class ConnectionOwner(Protocol):
    """Receives the events of a connection. No call may raise or block."""

    def connection_opened(self, connection: "FramedConnection") -> None: ...

    def frame_received(self, connection: "FramedConnection", body: memoryview) -> None:
        """`body` is never empty, and valid only during the call."""

    def connection_ended(self, connection: "FramedConnection") -> None:
        """Called once; `connection.ended` holds the reason."""


class FramedConnection(asyncio.Protocol):
    def __init__(self, owner: ConnectionOwner, max_frame: int, tls: Tls | None = None) -> None:
        self.max_frame = max_frame
        """bytes; a longer frame ends the connection"""
        self.name = ""
        """the other side's name, once it has greeted"""
        self.unreadable = 0
        """number of messages that could not be decoded"""
        self.answers = False
        """whether this side answers heartbeats"""
        self.ended = ""
        """empty while the connection holds, then the reason: `was closed by the other side`"""
        self.host = "unknown"
        """the other side's address, without its port"""
        self.opened = self.heard = time.monotonic()
        """when the connection was made, and when bytes last came"""
        self._owner = owner
        self._tls = tls
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()
        """the beginning of a frame"""
        self._sent_at = 0.0
        self._asked_at = 0.0
        """when the heartbeat that is not yet answered was sent; 0: there is none"""
        self._round_trip: float | None = None
        self._reading_paused = False
        self._closed = asyncio.Event()
        self._sent_sum: int | None = None
        self._received_sum: int | None = None
        """CRC-32 of all that was sent, or received; None: frames have no sums"""

    def check(self) -> None:
        """Send and expect sums from the next frame on, each way."""
        self._sent_sum = self._received_sum = 0

    async def send(self, body: bytes) -> bool:
        """Send, waiting up to a second for room. Return False if the connection has ended; end it if there is no room
        after that second.

        Room is polled: uvloop calls `resume_writing` only when the buffer is empty, which takes seconds after a large
        burst. Polls are counted, not time, since this process may stall."""
        looks = 0
        while self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNSENT:
            if looks == _LOOKS:
                self.cut(f"left more than {MAX_UNSENT:,} bytes unsent for {SEND_WITHIN:g} s")
                break
            looks += 1
            await asyncio.sleep(SEND_WITHIN / _LOOKS)
        return self.write(body)

    def write(self, body: bytes) -> bool:
        """Send without waiting, however much is unsent. Return False if the connection has ended."""
        if self.ended or self._transport is None or self._transport.is_closing():
            return False
        data = len(body).to_bytes(4, "big") + body if self._sent_sum is None else self._summed(body)
        self._transport.write(data if self._tls is None else self._tls.encrypt(data))
        self._sent_at = time.monotonic()
        return True

    def _summed(self, body: bytes) -> bytes:
        head = len(body).to_bytes(4, "big")
        after_head = crc32(head, self._sent_sum or 0)
        self._sent_sum = crc32(body, after_head)
        if not body:
            return head + after_head.to_bytes(4, "big")
        return b"".join((head, after_head.to_bytes(4, "big"), body, self._sent_sum.to_bytes(4, "big")))

    @property
    def round_trip(self) -> float | None:
        """Seconds from the last heartbeat to its answer, or to now if that is longer. None: not measured yet, or this
        side answers."""
        if not self._asked_at or self.answers:
            return self._round_trip
        return max(self._round_trip or 0.0, time.monotonic() - self._asked_at)

    def beat(self, silence: float, *, stalled: bool) -> None:
        """End the connection if the other side has been silent for `silence` seconds, else send a heartbeat; the side
        that answers heartbeats sends one only if it has sent nothing else for a while. A process that `stalled`, or
        that has paused reading, cannot tell whether the other side was silent."""
        now = time.monotonic()
        if stalled or self._reading_paused:
            self.heard = now
        if now - self.heard > silence:
            self.cut(f"was silent for {silence:g} s")
        elif not self.answers:
            self._asked_at = self._asked_at or now
            self.write(b"")
        elif now - self._sent_at >= 1.5 * BEAT_EVERY:
            self.write(b"")

    def _beat_received(self) -> None:
        if self._asked_at:
            self._round_trip, self._asked_at = time.monotonic() - self._asked_at, 0.0
        elif self.answers and self._transport is not None and not self._transport.get_write_buffer_size():
            self.write(b"")

    def pause_reading(self) -> None:
        if self._transport is not None and not self.ended:
            self._reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self.ended:
            self._reading_paused = False
            self._transport.resume_reading()

    def cut(self, reason: str) -> None:
        """End the connection at once and drop what is unsent."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Send what is unsent and wait until the other side closes, for LINGER seconds at most. Received data is read
        and dropped meanwhile: closing a socket with unread bytes resets the connection, and the other side would lose
        what was sent last."""
        if self._transport is None:
            return
        self._end("was closed here")
        try:
            # OSError, RuntimeError: it has broken already
            with suppress(TimeoutError, OSError, RuntimeError):
                self._transport.write_eof()
                self._transport.resume_reading()
                async with asyncio.timeout(LINGER):
                    await self._closed.wait()
        finally:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        if not self.ended:
            self.ended = reason
            self._owner.connection_ended(self)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio and uvloop have set TCP_NODELAY."""
        self._transport = transport
        if peer := transport.get_extra_info("peername"):
            self.host = str(peer[0])
        self._owner.connection_opened(self)

    def data_received(self, data: bytes) -> None:
        if self.ended:
            return
        self.heard = time.monotonic()
        if self._tls is not None:
            data = self._decrypted(self._tls, data)
        received: bytes | bytearray = data
        if self._partial:
            self._partial += data
            received = self._partial
        view, start = memoryview(received), 0
        while not self.ended and (found := self._frame(view[start:])):
            body, size = found
            start += size
            if body:
                self._owner.frame_received(self, body)
            else:
                self._beat_received()
        if start or received is data:
            self._partial = bytearray(view[start:])

    def _frame(self, view: memoryview) -> tuple[memoryview, int] | None:
        """The body of the first frame, and the size of the frame; None if it is not whole, or ends the connection."""
        before, head = self._received_sum, 4 if self._received_sum is None else 8
        if len(view) < head:
            return None
        length = int.from_bytes(view[:4], "big")
        after_head = crc32(view[:4], before or 0)
        if before is not None and after_head.to_bytes(4, "big") != view[4:8]:
            self.cut(DAMAGED)
        elif length > self.max_frame:
            self.cut(f"began a frame of {length} bytes")
        end = head + length
        size = end if before is None or not length else end + 4
        if self.ended or len(view) < size:
            return None
        body = view[head:end]
        if before is not None:
            self._received_sum = crc32(body, after_head)
            if length and self._received_sum.to_bytes(4, "big") != view[end:size]:
                self.cut(DAMAGED)
                return None
        return body, size

    def _decrypted(self, tls: Tls, data: bytes) -> bytes:
        assert self._transport is not None
        try:
            try:
                return tls.decrypt(data)
            finally:  # on failure this is TLS's alert, the reason for the other side
                if answer := tls.encrypt(b""):
                    self._transport.write(answer)
        except ssl.SSLError as error:
            self._end(f"is not of this graph: {error.reason or error}")
            self._transport.close()
            return b""

    def eof_received(self) -> None:
        self.cut("was closed by the other side")

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()
        self._end(f"broke: {error}" if error else "was closed by the other side")


async def beats() -> AsyncIterator[bool]:
    """Yield every second, for ever: whether this process has stalled since the last time."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(BEAT_EVERY)
        yield time.monotonic() - before > 2 * BEAT_EVERY
