"""The output of all processes: one readable stream on the terminal, and one complete log file for each process."""

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self, TextIO

from pdserve.observe import logs
from pdserve.observe.logs import LogLine
from pdserve.supervisor.state import make_private, private
from pdserve.supervisor.terminal import LineWriter

log = logging.getLogger(__name__)

FILE_LIMIT = 64 << 20
"""bytes; a log file that reaches it is renamed to `<name>.log.1`, which replaces the one before"""

_COLOURS = {"frontend": 36, "decode": 32, "both": 32, "prefill": 35, "nats": 34, "etcd": 34}
_LEVEL_COLOURS = {"W": "33", "E": "1;31", "C": "1;31"}
"""of ANSI"""


class ProcessOutput:
    """What `pdserve serve` shows: with `fmt` `json`, nothing but JSON lines. The files have every line, as long as
    there is space; the terminal has no INFO lines of vLLM and no known noise unless `verbose`."""

    def __init__(
        self, log_dir: Path, fmt: str = "text", verbose: bool = False, stream: TextIO | None = None
    ) -> None:
        stream = stream or sys.stderr
        self.log_dir = log_dir
        self.json = fmt == "json"
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._text = logs.text if plain or not stream.isatty() else _coloured
        self._lines = LineWriter(stream)
        self._verbose = verbose
        self._files: dict[str, LogFile] = {}

    def close(self) -> None:
        self._lines.close()

    @contextmanager
    def capture_logging(self) -> Iterator[Self]:
        """Also show what this process logs; close on leaving."""
        root = logging.getLogger()
        before = root.handlers[:], root.level
        root.handlers[:] = [_Handler(self)]
        logging.getLogger("pdserve").setLevel(logging.INFO)
        try:
            yield self
        finally:
            root.handlers[:], root.level = before
            self.close()

    def line(self, name: str, raw: str) -> None:
        """Store and show a line that process `name` wrote."""
        line = logs.parse(raw, name)
        if name not in self._files:
            self._files[name] = LogFile(self.log_dir / f"{name}.log", partial(log.warning, "%s"))
        self._files[name].write(logs.text(line))
        if self._verbose or not (line.noise or (line.level in "DI" and line.logger.startswith("vllm"))):
            self.show(line)

    def show(self, line: LogLine) -> None:
        self._lines.write(logs.as_json(line) if self.json else self._text(line))

    def print(self, text: str) -> None:
        """Show something for people; nothing in JSON."""
        if not self.json:
            self._lines.write(text)


def _coloured(line: LogLine) -> str:
    """For a terminal: the time of day, the process in a colour of its role, and the message in one of its level."""
    colour, level = _COLOURS.get(line.name.split("-")[0], 1), _LEVEL_COLOURS.get(line.level)
    message = f"\x1b[{level}m{line.message}\x1b[0m" if level else line.message
    return f"\x1b[2m{line.time[11:19]}\x1b[0m \x1b[{colour}m{line.name:<10}\x1b[0m {message}"


class LogFile:
    """A log file, begun anew with each `serve`; the file before is kept as `.1`.

    It is opened for each write, since it may be removed, renamed or cut at any time, as by logrotate. It never fails:
    where it cannot be written, as on a full disk, lines are dropped and counted until it can again. `on_trouble` gets a
    text when that begins."""

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        self.path = path
        self._on_trouble = on_trouble
        self._dropped = 0
        self._reason = ""
        self._torn = False
        """the last line was written in part"""
        self._try(self._begin)

    def write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="replace")
        if self._dropped:
            dropped = f"{self._dropped} lines were dropped: {self._reason}"
            data = f"{logs.stamp()} W serve pdserve.supervisor: {dropped}\n".encode() + data
        if self._torn:
            data = b"\n" + data
        if self._try(lambda: self._append(data)):
            self._dropped, self._reason = 0, ""
        else:
            self._dropped += 1

    def _append(self, data: bytes) -> None:
        if not self.path.exists():
            make_private(self.path.parent)
        elif self.path.stat().st_size + len(data) > FILE_LIMIT:
            self._begin()
        with open(self.path, "ab", buffering=0, opener=private) as file:
            written = file.write(data)
        if written:
            self._torn = not data[:written].endswith(b"\n")
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _begin(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".1"))

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
    def __init__(self, output: ProcessOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        self._output.show(
            LogLine(logs.stamp(record.created), record.levelname[0], "serve", record.name, message)
        )
