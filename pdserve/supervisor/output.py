"""One readable stream out of the output of all processes, and one log file for each with everything in it."""

import errno
import io
import logging
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console, RenderableType
from rich.text import Text

from pdserve.observe import logs
from pdserve.observe.logs import LogLine

FILE_LIMIT = 64 << 20
"""bytes; a log file that reaches it becomes `<name>.log.1`, in place of the one before"""

UNREAD = 1 << 20
"""bytes for a terminal or a pipe that takes nothing; what comes beyond them is left out"""
LAST_WORDS = 1.0
"""seconds for what is not written yet when all is over"""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_COLOURS = {"frontend": "cyan", "decode": "green", "prefill": "magenta", "nats": "blue", "etcd": "blue"}
_LEVEL_STYLES = {"W": "yellow", "E": "bold red", "C": "bold red"}


class Output:
    """What `pdserve serve` shows. With `fmt` `json`, nothing but JSON lines. Not a line is lost for the
    files while there is space: the terminal leaves out vLLM's INFO lines and known noise unless `verbose`."""

    def __init__(
        self, log_dir: Path, fmt: str = "text", verbose: bool = False, stream: TextIO | None = None
    ) -> None:
        self.log_dir = log_dir
        self.json = fmt == "json"
        self._unread = _unblocked(stream or sys.stderr)
        file = cast("TextIO", self._unread or stream or sys.stderr)
        self.console = Console(file=file, highlight=False, soft_wrap=True)
        if self.json or not self.console.is_terminal:
            self.console = Console(file=self.console.file, highlight=False, force_terminal=False, width=100)
        self._verbose = verbose
        self._files: dict[str, LogFile] = {}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._unread:
            self._unread.finish()

    def handler(self) -> logging.Handler:
        """For the supervisor's own records."""
        return _Handler(self)

    def line(self, name: str, raw: str) -> LogLine:
        """A line that process `name` wrote; also returns what it says."""
        line = logs.parse(raw, name)
        self._file(name).write(logs.text(line))
        if self._verbose or not (line.noise or (line.level in "DI" and line.logger.startswith("vllm"))):
            self.show(line)
        return line

    def show(self, line: LogLine) -> None:
        if not self.console.is_terminal:
            text = logs.as_json(line) if self.json else logs.text(line)
            self.quietly(lambda: self._write(text))
            return
        out = Text(f"{line.time[11:19]} ", "dim")
        out.append(f"{line.name:<10} ", _COLOURS.get(line.name.split("-")[0], "bold"))
        out.append(line.message, _LEVEL_STYLES.get(line.level, ""))
        self.print(out)

    def say(self, message: str) -> None:
        """A line of the supervisor itself."""
        self.show(LogLine(logs.stamp(), "I", "serve", "pdserve.supervisor", message))

    def print(self, what: RenderableType) -> None:
        """Something for people; not shown in JSON."""
        if not self.json:
            self.quietly(lambda: self.console.print(what))

    def plain(self, text: str) -> None:
        """As it is, for people to copy: a line that is wrapped could not be pasted. Not shown in JSON."""
        if not self.json:
            self.quietly(lambda: self._write(text))

    def quietly(self, write: Callable[[], None]) -> None:
        """Never fails: the terminal may be gone, and the graph must be stopped all the same. A full disk, where it is
        redirected to a file, drops lines only while it is full."""
        try:
            write()
        except OSError as error:
            if error.errno not in _NO_SPACE:
                self.console.file = _Nowhere()

    def _write(self, text: str) -> None:
        self.console.file.write(text + "\n")
        self.console.file.flush()

    def _file(self, name: str) -> "LogFile":
        if name not in self._files:
            self._files[name] = LogFile(self.log_dir / f"{name}.log", self.say)
        return self._files[name]


class LogFile:
    """Starts anew with each `serve`; what was there before is kept as `.1`.

    Never fails: on a full disk lines are dropped and counted, and it goes on by itself when there is space again.
    `on_trouble` is told when that begins."""

    def __init__(self, path: Path, on_trouble: Callable[[str], None] = lambda _: None) -> None:
        self.path = path
        self._on_trouble = on_trouble
        self._file: io.FileIO | None = None
        self._size = 0
        self._dropped = 0
        self._reason = ""
        self._torn = False
        """the last line was written in part"""
        self._try(self._open)

    def write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="replace")
        if self._dropped:
            news = f"{logs.stamp()} W serve pdserve.supervisor: {self._dropped} lines were dropped: {self._reason}\n"
            data = news.encode() + data
        if self._torn:
            data = b"\n" + data
        if self._try(lambda: self._append(data)):
            self._dropped, self._reason = 0, ""
        else:
            self._dropped += 1

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._try(file.close)

    def _append(self, data: bytes) -> None:
        if self._file is None or self._size + len(data) > FILE_LIMIT:
            self._open()
        assert self._file is not None
        written = self._file.write(data)
        self._size += written
        self._torn = written > 0 and not data[:written].endswith(b"\n")
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> None:
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = self.path.open("wb", buffering=0)
        self._size, self._torn = 0, False

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            reason = error.strerror or str(error)
            if not self._dropped and reason != self._reason:
                self._on_trouble(f"{self.path} cannot be written, its lines are dropped: {reason}")
            self._reason = reason
            return False
        return True


class _Handler(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        self._output.show(
            LogLine(logs.stamp(record.created), record.levelname[0], "serve", record.name, message)
        )


def _unblocked(stream: TextIO) -> "Unblocked | None":
    """None where writing does not wait for a reader: to a file, or to memory."""
    try:
        number = stream.fileno()
        return None if stat.S_ISREG(os.fstat(number).st_mode) else Unblocked(stream, number)
    except (OSError, ValueError):
        return None


class Unblocked(io.TextIOBase):
    """Writes from a thread of its own: a terminal that is stopped (Ctrl-S, a connection that is lost, a mark in a
    window) or a pipe that nobody reads would hold the supervisor, and soon all roles, whose output it reads.

    Past Python's own buffer, whose lock would keep the process from its end."""

    def __init__(self, stream: TextIO, number: int) -> None:
        self._stream, self._number = stream, number
        self._waiting: deque[bytes] = deque()
        self._size = 0
        """bytes that wait, with those that are just being written"""
        self._left_out = 0
        self._gone = False
        self._changed = threading.Condition()
        stream.flush()
        threading.Thread(target=self._run, name="terminal", daemon=True).start()

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
            if self._size + len(data) > UNREAD:
                self._left_out += 1
                return len(text)
            if self._left_out:
                self._put(f"({self._left_out} lines were left out here: nobody read them)\n".encode())
                self._left_out = 0
            self._put(data)
        return len(text)

    def finish(self) -> None:
        """Give it some time to be written."""
        deadline = time.monotonic() + LAST_WORDS
        with self._changed:
            while self._size and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while not self._gone:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data = self._waiting.popleft()
            try:
                self._write(memoryview(data))
            except OSError:
                self._gone = True
            with self._changed:
                self._size = 0 if self._gone else self._size - len(data)
                self._changed.notify_all()

    def _write(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[os.write(self._number, rest) :]
            except BlockingIOError:  # somebody who shares the terminal made it so
                select.select([], [self._number], [])


class _Nowhere(io.StringIO):
    """What is written here is gone."""

    def write(self, text: str) -> int:
        return len(text)
