"""A TCP connection, plain or with TLS, that carries frames both ways.

A frame is a length (four bytes, big-endian) and that many bytes. Without TLS, both sides may agree on checksums: one
after the length, another after the body. Each is the CRC-32 of all lengths and bodies sent in that direction so far.
Then a frame that was damaged, lost, repeated or reordered ends the connection
(docs/decisions/0096-checked-frames.md).

An empty frame is a heartbeat. A server with nothing left to send answers it with another, from which the client
measures the round trip. When a process ends, its connections close at once. If a process freezes or the network is
cut, the other side ends the connection after some seconds of silence. An ended connection is never used again.
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
from pdserve.util.ticks import tick

MAX_MESSAGE = 64 << 20
"""Largest message in bytes. A larger one could not cross a slow link before the connection is cut."""
HEARTBEAT_INTERVAL = 1.0
SEND_TIMEOUT = 1.0
"""Seconds that sending waits for a slow reader."""
_SEND_POLLS = 20
LINGER = 0.3
"""Seconds that closing waits for unsent data to leave and for the other side to close."""
DAMAGED = "carried damaged bytes"
MAX_UNSENT = 32 << 20
"""Bytes that may wait for a slow reader before `send` waits."""


def bounded(message: object, body: bytes) -> bytes:
    """Return `body`. Raises ProtocolError if it is too large, because the other side would end the connection."""
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes, more than {MAX_MESSAGE}")
    return body


class ConnectionOwner(Protocol):
    """Receives a connection's events. Its methods must neither raise nor block."""

    def connection_opened(self, connection: "FramedConnection") -> None: ...

    def frame_received(self, connection: "FramedConnection", body: memoryview) -> None:
        """`body` is not empty, and valid only during the call."""

    def connection_ended(self, connection: "FramedConnection") -> None:
        """Called once; `connection.ended` has the reason."""


class FramedConnection(asyncio.Protocol):
    def __init__(self, owner: ConnectionOwner, max_frame: int, tls: Tls | None = None) -> None:
        self.max_frame = max_frame
        """bytes; a longer frame ends the connection"""
        self.name = ""
        """the frontend's name, once it has greeted this server"""
        self.unreadable = 0
        """number of messages that could not be decoded"""
        self.answers = False
        """whether this side answers heartbeats"""
        self.ended = ""
        """empty while the connection is open, then the reason, such as `was closed by the other side`"""
        self.host = "unknown"
        """the other side's address without the port"""
        self.opened = self.heard = time.monotonic()
        """monotonic times of the connection's start and of the last received bytes"""
        self._owner = owner
        self._tls = tls
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()
        """the first bytes of an incomplete frame"""
        self._sent_at = 0.0
        self._beat_sent_at = 0.0
        """monotonic time of the unanswered heartbeat; 0: none"""
        self._round_trip: float | None = None
        self._reading_paused = False
        self._closed = asyncio.Event()
        self._sent_sum: int | None = None
        self._received_sum: int | None = None
        """CRC-32 of all lengths and bodies sent, or received; None: frames have no checksums"""

    def check(self) -> None:
        """Send and expect checksums from the next frame on."""
        self._sent_sum = self._received_sum = 0

    async def send(self, body: bytes) -> bool:
        """Send, waiting up to a second for buffer space. Return False if the connection has ended, perhaps for lack of
        space.

        The space is polled, because uvloop calls `resume_writing` only when the buffer is empty, which takes seconds
        after a large burst. Polls are counted instead of time, because this process may freeze."""
        polls = 0
        while self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNSENT:
            if polls == _SEND_POLLS:
                self.cut(f"left more than {MAX_UNSENT:,} bytes unsent for {SEND_TIMEOUT:g} s")
                break
            polls += 1
            await asyncio.sleep(SEND_TIMEOUT / _SEND_POLLS)
        return self.write(body)

    def write(self, body: bytes) -> bool:
        """Send without waiting for buffer space. Return False if the connection has ended."""
        if self.ended or self._transport is None or self._transport.is_closing():
            return False
        data = len(body).to_bytes(4, "big") + body if self._sent_sum is None else self._checksummed(body)
        self._transport.write(data if self._tls is None else self._tls.encrypt(data))
        self._sent_at = time.monotonic()
        return True

    def _checksummed(self, body: bytes) -> bytes:
        head = len(body).to_bytes(4, "big")
        after_head = crc32(head, self._sent_sum or 0)
        self._sent_sum = crc32(body, after_head)
        if not body:
            return head + after_head.to_bytes(4, "big")
        return b"".join((head, after_head.to_bytes(4, "big"), body, self._sent_sum.to_bytes(4, "big")))

    @property
    def round_trip(self) -> float | None:
        """Seconds from the last answered heartbeat to its answer, or, if longer, from an unanswered one to now. None:
        not measured."""
        if not self._beat_sent_at or self.answers:
            return self._round_trip
        return max(self._round_trip or 0.0, time.monotonic() - self._beat_sent_at)

    def beat(self, silence: float, *, froze: bool) -> None:
        """End the connection after `silence` seconds without received bytes, else send a heartbeat. The side that
        answers heartbeats sends one only if it has sent nothing for a while. After a freeze of this process
        (`froze`), or while reading is paused, the silence counts from now, because bytes may have arrived."""
        now = time.monotonic()
        if froze or self._reading_paused:
            self.heard = now
        if now - self.heard > silence:
            self.cut(f"was silent for {silence:g} s")
        elif not self.answers:
            self._beat_sent_at = self._beat_sent_at or now
            self.write(b"")
        elif now - self._sent_at >= 1.5 * HEARTBEAT_INTERVAL:
            self.write(b"")

    def _beat_received(self) -> None:
        if self._beat_sent_at:
            self._round_trip = time.monotonic() - self._beat_sent_at
            self._beat_sent_at = 0.0
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
        """End the connection at once and drop unsent data."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Send unsent data and wait up to LINGER seconds until the other side closes. Received data is read and
        dropped, because closing a socket with unread bytes resets the connection, and the last data sent would be
        lost."""
        if self._transport is None:
            return
        self._end("was closed by this side")
        try:
            # OSError, RuntimeError: the connection is already broken
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
        """Return the first frame's body and size; None if it is incomplete or ends the connection."""
        before = self._received_sum
        head = 4 if before is None else 8
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
            finally:  # on failure the answer is TLS's alert for the other side
                if answer := tls.encrypt(b""):
                    self._transport.write(answer)
        except ssl.SSLError as error:
            self._end(f"failed in TLS, as of another graph: {error.reason or error}")
            self._transport.close()
            return b""

    def eof_received(self) -> None:
        self.cut("was closed by the other side")

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()
        self._end(f"broke: {error}" if error else "was closed by the other side")


async def beats() -> AsyncIterator[bool]:
    """Yield every second whether this process froze for over a second since the last yield."""
    while True:
        before = time.monotonic()
        await tick(HEARTBEAT_INTERVAL)
        yield time.monotonic() - before > 2 * HEARTBEAT_INTERVAL
