"""One TCP connection, plain or with TLS, that carries frames both ways.

A frame is its length (four bytes, big-endian) and so many bytes; an empty frame is a heartbeat, which the server
answers with another one: the client learns the round trip. A process that ends
closes its connections, which the other side sees at once; one that hangs, or whose network is cut, is given up when it
was silent for some seconds. A connection that has ended stays so: to go on takes another one.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

from pdserve.stream.tls import Tls

BEAT_EVERY = 1.0
SEND_WITHIN = 1.0
ANSWERED = 1.5 * BEAT_EVERY
"""seconds of silence after which a server, which answers heartbeats, sends one of its own"""
_LOOKS = 20
LINGER = 0.3
"""seconds that a connection gets, when it is closed, for what is still unsent and the other side's end"""
MAX_UNSENT = 32 << 20
"""bytes that may wait for a slow reader, and one frame more: some seconds of tokens at full load"""


class ConnectionOwner(Protocol):
    """Told what happens on a connection; no call may raise or wait."""

    def connection_opened(self, connection: "FramedConnection") -> None: ...

    def frame_received(self, connection: "FramedConnection", body: memoryview) -> None:
        """`body` is never empty, and valid during the call only."""

    def connection_ended(self, connection: "FramedConnection") -> None:
        """Called once; `connection.ended` says why."""


class FramedConnection(asyncio.Protocol):
    def __init__(self, owner: ConnectionOwner, max_frame: int, tls: Tls | None = None) -> None:
        self.max_frame = max_frame
        """bytes; a longer frame ends the connection"""
        self.name = ""
        """of the other side, once it has greeted"""
        self.unreadable = 0
        """messages that could not be decoded"""
        self.answers = False
        """heartbeats, with heartbeats"""
        self.ended = ""
        """why, once it has: `was closed by the other side`"""
        self.host = "unknown"
        """address of the other side, without its port"""
        self.opened = self.heard = time.monotonic()
        self._owner = owner
        self._tls = tls
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()
        """a frame that has begun"""
        self._sent_at = 0.0
        self._asked_at = 0.0
        """when a heartbeat was sent that was not answered yet; 0: none"""
        self._round_trip: float | None = None
        self._reading_paused = False
        self._closed = asyncio.Event()

    async def send(self, body: bytes) -> bool:
        """False where the connection has ended; where the other side takes too little for a second, it ends here.

        Looks for room: uvloop's `resume_writing` comes only when all has gone, which takes seconds where much was sent
        at once. Looks are counted, not time, since this process may stall."""
        looks = 0
        while self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNSENT:
            if looks == _LOOKS:
                self.cut(f"left more than {MAX_UNSENT:,} bytes unsent for {SEND_WITHIN:g} s")
                break
            looks += 1
            await asyncio.sleep(SEND_WITHIN / _LOOKS)
        return self.write(body)

    def write(self, body: bytes) -> bool:
        """Send without waiting, however much is unsent. False where the connection has ended."""
        if self.ended or self._transport is None or self._transport.is_closing():
            return False
        data = len(body).to_bytes(4, "big") + body
        self._transport.write(data if self._tls is None else self._tls.encrypt(data))
        self._sent_at = time.monotonic()
        return True

    @property
    def round_trip(self) -> float | None:
        """Seconds from the last heartbeat to its answer, or so far; None: not known yet, or this side answers."""
        if not self._asked_at or self.answers:
            return self._round_trip
        return max(self._round_trip or 0.0, time.monotonic() - self._asked_at)

    def beat(self, silence: float, *, stalled: bool) -> None:
        """Send a heartbeat, or where this side answers them, only where nothing else was sent; and end a connection
        that is silent. A process that `stalled`, or does not read just now, knows nothing of the other side's
        silence."""
        now = time.monotonic()
        if stalled or self._reading_paused:
            self.heard = now
        if now - self.heard > silence:
            self.cut(f"was silent for {silence:g} s")
        elif not self.answers:
            self._asked_at = self._asked_at or now
            self.write(b"")
        elif now - self._sent_at >= ANSWERED:
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
        """End it at once; what is unsent is dropped."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """End it when the other side has got what was unsent and closed its end, or soon after. Until then what comes
        is taken and dropped: a socket that is closed with unread bytes resets the connection, and what was sent last
        is lost."""
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
        found: bytes | bytearray = data
        if self._partial:
            self._partial += data
            found = self._partial
        view, start, end = memoryview(found), 0, len(found)
        while end - start >= 4:
            length = int.from_bytes(view[start : start + 4], "big")
            if length > self.max_frame:
                self.cut(f"began a frame of {length} bytes")
            if self.ended or end - start - 4 < length:
                break
            start += 4 + length
            if length:
                self._owner.frame_received(self, view[start - length : start])
            else:
                self._beat_received()
        if start or found is data:
            self._partial = bytearray(view[start:])

    def _decrypted(self, tls: Tls, data: bytes) -> bytes:
        assert self._transport is not None
        try:
            try:
                return tls.decrypt(data)
            finally:  # also what says why it is refused
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
    """For ever, every second: time for heartbeats. Whether this process stalled before."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(BEAT_EVERY)
        yield time.monotonic() - before > 2 * BEAT_EVERY
