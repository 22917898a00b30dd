"""One readable stream out of the output of all processes, and one log file for each with everything in it."""

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from pdserve.observe import logs
from pdserve.observe.logs import LogLine

FILE_LIMIT = 64 << 20
"""bytes; a log file that reaches it becomes `<name>.log.1`, in place of the one before"""

_COLOURS = {"frontend": "cyan", "decode": "green", "prefill": "magenta", "nats": "blue", "etcd": "blue"}
_LEVEL_STYLES = {"W": "yellow", "E": "bold red", "C": "bold red"}


class Output:
    """What `pdserve serve` shows. With `fmt` `json`, nothing but JSON lines. Not a line is lost for the
    files: the terminal leaves out vLLM's INFO lines and known noise unless `verbose`."""

    def __init__(
        self, log_dir: Path, fmt: str = "text", verbose: bool = False, stream: TextIO | None = None
    ) -> None:
        self.log_dir = log_dir
        self.json = fmt == "json"
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        if self.json or not self.console.is_terminal:
            self.console = Console(file=self.console.file, highlight=False, force_terminal=False, width=100)
        self._verbose = verbose
        self._files: dict[str, LogFile] = {}
        log_dir.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

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
        """Never fails: the terminal may be gone, and the graph must be stopped all the same."""
        try:
            write()
        except OSError:
            self.console.file = _Nowhere()

    def _write(self, text: str) -> None:
        self.console.file.write(text + "\n")
        self.console.file.flush()

    def _file(self, name: str) -> "LogFile":
        if name not in self._files:
            self._files[name] = LogFile(self.log_dir / f"{name}.log")
        return self._files[name]


class LogFile:
    """Starts anew with each `serve`; what was there before is kept as `.1`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def write(self, line: str) -> None:
        self._file.write(line + "\n")
        if self._file.tell() > FILE_LIMIT:
            self.close()
            self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = self.path.open("w", buffering=1, errors="replace")


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


class _Nowhere(io.StringIO):
    """What is written here is gone."""

    def write(self, text: str) -> int:
        return len(text)
