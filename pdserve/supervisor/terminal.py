"""The terminal of `pdserve serve`: Ctrl-C reaches pdserve alone, and a terminal that stalls does not hold it up."""

import io
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

UNREAD = 1 << 20
"""bytes that are kept for a terminal or a pipe that is not read; lines beyond them are left out"""
_CHUNK = 1 << 16
"""bytes of one write, small so that a slow reader frees `UNREAD` bit by bit"""
FLUSH_WITHIN = 1.0
"""seconds at the end to write what is not written yet"""


@contextmanager
def own_foreground() -> Iterator[None]:
    """On a terminal, make this process the foreground process group instead of the group that started it.

    Under `make serve` or a script, Ctrl-C would go to make as well: make would end with an error, and at the second
    Ctrl-C before this process. Ctrl-Z is ignored meanwhile: no shell could bring this process back.
    """
    terminal = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else -1
    if terminal < 0 or os.getpgrp() == os.getpid() or os.tcgetpgrp(terminal) != os.getpgrp():
        yield
        return
    before = os.getpgrp()
    # To set the foreground group from outside of it stops the process, unless it ignores this.
    for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.tcsetpgrp(terminal, os.getpid())
    try:
        yield
    finally:
        with suppress(OSError):  # the terminal is closed, or that group has ended
            os.tcsetpgrp(terminal, before)


class NonBlockingStream(io.TextIOBase):
    """A text stream that writes from its own thread: a terminal that is stopped (Ctrl-S, a lost connection, a selection
    in the window) or a pipe that is not read would hold up the supervisor, and soon all roles, whose output it reads.

    It bypasses Python's own buffer, whose lock would keep the process from ending."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._number = stream, stream.fileno()
        self._waiting = bytearray()
        self._writing = 0
        """bytes that are being written"""
        self._left_out = 0
        """lines"""
        self._gone = False
        self._changed = threading.Condition()
        stream.flush()
        threading.Thread(target=self._run, name="terminal", daemon=True).start()

    @classmethod
    def over(cls, stream: TextIO) -> TextIO:
        """Wrap the stream, unless it is a file or memory, where writing never waits for a reader."""
        try:
            is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        except (OSError, ValueError):
            return stream
        return stream if is_file else cls(stream)  # type: ignore[return-value]

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._number

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, "backslashreplace")
        with self._changed:
            if self._gone:
                return len(text)
            if len(self._waiting) + self._writing + len(data) > UNREAD:
                self._left_out += 1
                return len(text)
            if self._left_out:
                self._waiting += f"({self._left_out} lines were left out here: they were not read)\n".encode()
                self._left_out = 0
            self._waiting += data
            self._changed.notify_all()
        return len(text)

    def finish(self) -> None:
        """Wait up to `FLUSH_WITHIN` until all is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone or not (self._waiting or self._writing), FLUSH_WITHIN)

    def _run(self) -> None:
        while not self._gone:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data, self._waiting = self._waiting, bytearray()
                self._writing = len(data)
            try:
                self._write(memoryview(data))
            except OSError:
                self._gone = True
            with self._changed:
                self._writing = 0
                self._changed.notify_all()

    def _write(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[os.write(self._number, rest[:_CHUNK]) :]
            except BlockingIOError:  # another program that shares the terminal made it so
                select.select([], [self._number], [])
            self._writing = len(rest)
