"""The terminal of `pdserve serve`: Ctrl-C reaches pdserve alone, and a terminal that stalls does not hold it up."""

import errno
import fcntl
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
"""bytes that are kept for a reader"""
FLUSH_WITHIN = 1.0
"""seconds at the end to write what is not written yet"""
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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


class LineWriter:
    """Writes lines, never waits and never fails. A terminal, pipe or socket that is read slowly or not at all (Ctrl-S,
    a lost connection, `| less`) would hold up the supervisor, and soon all roles, whose output it reads. So a thread
    writes to it, from a pipe that keeps `UNREAD` bytes; lines beyond them are left out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._into: int | None = None
        """the pipe; None for a file or memory, which never wait for a reader"""
        self._rest = b""
        """of a line that was written in part"""
        self._left_out = 0
        """lines"""
        self._gone = False
        with suppress(OSError, ValueError):
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                out, self._into = os.pipe()
                os.set_blocking(self._into, False)
                self._thread = threading.Thread(
                    target=_copy, args=(out, os.dup(stream.fileno())), daemon=True
                )
                self._thread.start()
                fcntl.fcntl(self._into, fcntl.F_SETPIPE_SZ, UNREAD)  # fails where this user has many pipes

    def write(self, text: str) -> None:
        """Be quiet for ever where the reader is gone. A file on a full disk lacks the lines of that time alone."""
        try:
            if self._gone:
                return
            if self._into is None:
                self._stream.write(f"{text}\n")
                self._stream.flush()
            else:
                self._send(self._into, f"{text}\n".encode(errors="backslashreplace"))
        except OSError as error:
            self._gone = error.errno not in NO_SPACE

    def close(self) -> None:
        if self._into is not None:
            os.close(self._into)
            self._into = None
            self._thread.join(FLUSH_WITHIN)

    def _send(self, into: int, line: bytes) -> None:
        if self._left_out:
            line = f"({self._left_out} lines were left out here: they were not read)\n".encode() + line
        written = 0
        with suppress(BlockingIOError):
            written = os.write(into, self._rest + line)
        if written < len(self._rest):
            self._rest, self._left_out = self._rest[written:], self._left_out + 1
        else:
            self._rest, self._left_out = (self._rest + line)[written:], 0


def _copy(out: int, to: int) -> None:
    """Copy until the pipe is closed, or the reader is gone: writing into the pipe fails then."""
    with suppress(OSError), open(out, "rb", 0) as data, open(to, "wb", 0) as there:
        while rest := data.read(1 << 16):
            while rest := rest[there.write(rest) or 0 :]:  # 0: another program made the terminal non-blocking
                select.select([], [there], [])
