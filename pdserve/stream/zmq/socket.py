"""A ZeroMQ socket in asyncio, without a future or a task per message."""

import asyncio
import time
from collections.abc import Callable, Sequence

import zmq

HELLO, BYE, HEARTBEAT = b"+", b"-", b""
"""`+` opens a connection and is answered by a heartbeat; `-` says that there is none (any more)"""

BEAT_EVERY = 1.0
SEND_WITHIN = 1.0
LINGER_MS = 300
"""how long ZeroMQ's own thread goes on sending after a close, for the last messages; nobody waits for it"""
_HIGH_WATER = 20_000


class Unreachable(Exception):
    """The peer is not connected, or takes nothing for a second."""


class AsyncSocket:
    """Sends at once or retries for a second. `notify` is called when there may be something to receive, and
    must lead to `receive` being called until it returns None: ZeroMQ announces only what comes after that."""

    def __init__(self, kind: int, notify: Callable[[], None]) -> None:
        self.raw: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self.raw.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self.raw.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self.raw.setsockopt(zmq.LINGER, LINGER_MS)
        self.raw.setsockopt(zmq.HEARTBEAT_IVL, int(BEAT_EVERY * 1000))
        self.raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
        self.raw.setsockopt(zmq.IPV6, 1)
        self._notify = notify
        self._notifying = False
        self._fd = 0

    def open(self) -> None:
        self._fd = int(self.raw.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(self._fd, self._notify)
        self.notify_soon()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        self.raw.close()

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none now."""
        try:
            parts: list[bytes] = self.raw.recv_multipart(zmq.DONTWAIT)
            return parts
        except zmq.Again:
            return None

    @property
    def pending(self) -> bool:
        return bool(int(self.raw.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    async def send(self, parts: Sequence[bytes]) -> None:
        """Raises Unreachable."""
        if self.try_send(parts):
            return
        ends = time.monotonic() + SEND_WITHIN
        while time.monotonic() < ends:
            # a ROUTER is never told when one of its peers takes messages again, so there is nothing to wait
            # for
            await asyncio.sleep(0.01)
            if self.try_send(parts):
                return
        raise Unreachable("takes nothing")

    def try_send(self, parts: Sequence[bytes]) -> bool:
        """False when the peer's buffers are full. Raises Unreachable where there is no such peer."""
        try:
            self.raw.send_multipart(parts, zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise Unreachable(str(error)) from error
        finally:
            # sending may have swallowed the announcement of what was received
            if not self._notifying and self.pending:
                self.notify_soon()
        return True

    def notify_soon(self) -> None:
        self._notifying = True
        asyncio.get_running_loop().call_soon(self._notify_now)

    def _notify_now(self) -> None:
        self._notifying = False
        if not self.raw.closed:
            self._notify()
