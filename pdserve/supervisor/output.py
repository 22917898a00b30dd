"""The output of all processes of `serve`: readable lines on the terminal, and a complete log file per process."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO, TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from queue import Full, Queue
from typing import Self, TextIO

from pdserve.observe import logs
from pdserve.observe.logs import LogLine
from pdserve.supervisor.state import make_private, private

logger = logging.getLogger(__name__)

FILE_LIMIT = 64 << 20
"""Bytes of a log file; then it is renamed to `<name>.log.1`, and a new one begins."""
UNREAD = 10_000
"""Maximum of lines in the queue to the terminal."""
FLUSH_TIMEOUT = 1.0
"""Seconds to write the queued lines at the end."""

_COLOURS = {"frontend": 36, "decode": 32, "both": 32, "prefill": 35, "nats": 34, "etcd": 34}
_LEVEL_COLOURS = {"W": "33", "E": "1;31", "C": "1;31"}


class ProcessOutput:
    """The terminal and the log files of `serve`. The files get every line of the processes. Unless `verbose`, the
    terminal gets no INFO and DEBUG lines of vLLM and no known noise. With `fmt` `json`, it gets only JSON lines."""

    def __init__(
        self, log_dir: Path, fmt: str = "text", verbose: bool = False, stream: TextIO | None = None
    ) -> None:
        stream = stream or sys.stderr
        self.log_dir = log_dir
        self.json = fmt == "json"
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._text = logs.text if plain or not stream.isatty() else _coloured
        self._terminal = TerminalWriter(stream)
        self._verbose = verbose
        self._files: dict[str, LogFile] = {}

    def close(self) -> None:
        self._terminal.close()

    @contextmanager
    def capture_logging(self) -> Iterator[Self]:
        """Show the log records of this process, too. On leaving, close this output."""
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
            self._files[name] = LogFile(self.log_dir / f"{name}.log", partial(logger.warning, "%s"))
        self._files[name].write(logs.text(line))
        if self._verbose or not (line.noise or (line.level in "DI" and line.logger.startswith("vllm"))):
            self.show(line)

    def show(self, line: LogLine) -> None:
        self._terminal.write(logs.as_json(line) if self.json else self._text(line))

    def print(self, text: str) -> None:
        """Show a text for people; not in JSON."""
        if not self.json:
            self._terminal.write(text)


def _coloured(line: LogLine) -> str:
    colour, level = _COLOURS.get(line.name.split("-")[0], 1), _LEVEL_COLOURS.get(line.level)
    message = f"\x1b[{level}m{line.message}\x1b[0m" if level else line.message
    return f"\x1b[2m{line.time[11:19]}\x1b[0m \x1b[{colour}m{line.name:<10}\x1b[0m {message}"


class TerminalWriter:
    """Writes lines to the terminal from a thread, because a terminal that is not read (Ctrl-S, `| less`) would block
    the supervisor. Lines beyond `UNREAD` are dropped; the log files have them."""

    def __init__(self, stream: TextIO) -> None:
        self._lines: Queue[str | None] = Queue(UNREAD)
        self._thread = threading.Thread(target=self._write, args=(_unbuffered(stream),), daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        with suppress(Full):
            self._lines.put_nowait(text)

    def close(self) -> None:
        with suppress(Full):
            self._lines.put_nowait(None)
        self._thread.join(FLUSH_TIMEOUT)

    def _write(self, stream: TextIO) -> None:
        while (text := self._lines.get()) is not None:
            with suppress(OSError):  # the terminal was closed, or a disk is full
                stream.write(f"{text}\n")


def _unbuffered(stream: TextIO) -> TextIO:
    """The stream without its buffer: a blocked thread would keep the buffer's lock, and the process could not exit."""
    try:
        raw = FileIO(stream.fileno(), "w", closefd=False)
    except OSError:  # a stream in memory
        return stream
    return TextIOWrapper(raw, errors="backslashreplace", write_through=True)


class LogFile(RotatingFileHandler):
    """A log file, new with each `serve`; the previous one is kept as `.1`.

    It is opened for each line, because it may be removed, renamed or truncated, as by logrotate. While it cannot be
    written, as on a full disk, lines are dropped, and `on_trouble` gets the reason."""

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        super().__init__(path, maxBytes=FILE_LIMIT, backupCount=1, errors="replace", delay=True)
        self._on_trouble = on_trouble
        self._reason = ""
        with suppress(OSError):
            if path.exists():
                self.doRollover()

    def write(self, line: str) -> None:
        self.handle(logging.makeLogRecord({"msg": line}))

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        opened, self.stream = self.stream, None
        with suppress(OSError):  # `emit` has reported it
            if opened is not None:
                opened.close()

    def handleError(self, record: logging.LogRecord) -> None:
        reason = str(sys.exc_info()[1])
        if reason != self._reason:
            self._on_trouble(f"cannot write {self.baseFilename}, dropping its lines: {reason}")
        self._reason = reason

    def _open(self) -> TextIOWrapper:
        make_private(Path(self.baseFilename).parent)
        return open(self.baseFilename, "a", encoding="utf-8", errors=self.errors, opener=private)


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
