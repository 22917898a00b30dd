"""The terminal of `pdserve serve`: Ctrl-C reaches pdserve alone, and a terminal that stalls does not hold it up."""

import errno
import os
import select
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

WAIT = 0.5
"""seconds to wait for a reader, once until it reads again"""
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
    """Writes lines and never fails. A terminal or pipe that is not read (Ctrl-S, a lost connection, `| less`) would
    hold up the supervisor, and soon all roles, whose output it reads: lines are left out until it is read again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor = _non_blocking(stream)
        self._rest = b""
        """of a line that was written in part"""
        self._left_out = 0
        """lines"""
        self._gone = False

    def write(self, text: str) -> None:
        """Be quiet for ever where the reader is gone. A file on a full disk lacks the lines of that time alone."""
        try:
            if self._gone:
                return
            if self._descriptor is None:
                self._stream.write(f"{text}\n")
                self._stream.flush()
            else:
                self._send(f"{text}\n".encode(errors="backslashreplace"))
        except OSError as error:
            self._gone = error.errno not in NO_SPACE

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _send(self, line: bytes) -> None:
        if self._left_out:
            line = f"({self._left_out} lines were left out here: they were not read)\n".encode() + line
        left, wait = self._rest + line, 0.0 if self._rest else WAIT
        assert self._descriptor is not None
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                if not select.select([], [self._descriptor], [], wait)[1]:
                    break
        if len(left) > len(line):  # not even the rest was taken
            self._rest, self._left_out = left[: -len(line)], self._left_out + 1
        else:
            self._rest, self._left_out = left, 0


def _non_blocking(stream: TextIO) -> int | None:
    """A file descriptor of its own for a terminal or a pipe, since others may share the stream's; None for a file or
    memory, which never wait for a reader, and for what cannot be opened again (a socket, another user's terminal)."""
    with suppress(OSError, ValueError):
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.flush()
            path = f"/proc/self/fd/{stream.fileno()}"
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return None
