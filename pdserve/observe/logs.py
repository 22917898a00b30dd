"""The log format of pdserve's processes, and of vLLM's processes below them.

Text is one line per record, `2026-01-31T12:00:00.123 I decode-0 pdserve.decode.worker: message`, with
continuation lines for tracebacks; JSON is one object per line. vLLM configures its own processes by the file that
VLLM_LOGGING_CONFIG_PATH names. That file uses `handler`.
"""

import json
import logging
import logging.config
import os
import re
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdserve.util import clock

LONGEST = 20_000
"""Maximum of characters in a message or a traceback. Of a longer one, the middle is cut out."""

_CONFIG = Path(__file__).with_name("logging.json")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_LEVELS = {"D": "debug", "I": "info", "W": "warning", "E": "error", "C": "critical"}
_LETTERS = {word: letter for letter, word in _LEVELS.items()}
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}) ([DIWEC]) (\S+) (\S+): (.*)", re.DOTALL)
_FORGED = re.compile(r"\n(?=\d{4}-|\{)")
"""Start of a line inside a record that `parse` would take for another record."""

# Lines that vLLM and torch log at every start, and that a user cannot act on.
_NOISE = re.compile(
    r"Enforce eager set|Inductor compilation was disabled|Reset SSM cache type|is not found in LD_PRELOAD"
    r"|[Tt]riton (is )?not |Triton is installed|NUMA binding: Using MEMBIND"
    r"|Loading safetensors checkpoint shards|API is experimental|NIXL INFO"
    r"|Model Runner V2 requires|generation flags are not valid|\[shutdown\]|Default vLLM sampling parameters"
    r"|resource_tracker|FutureWarning|DeprecationWarning|UserWarning"
)


@dataclass(frozen=True)
class LogLine:
    """A log record of a process, or a line of its other output."""

    time: str
    level: str
    """`D`, `I`, `W`, `E` or `C`."""
    name: str
    """Role and index, `decode-0`."""
    logger: str
    """Empty for a line that is not a log record of pdserve."""
    message: str

    @property
    def noise(self) -> bool:
        return self.level in "DIW" and bool(_NOISE.search(self.message))


def setup(name: str, level: str = "INFO", fmt: str = "text", vllm_level: str = "WARNING") -> None:
    """Configure logging for this process, called `name` (`decode-0`), and for vLLM's processes below it. Call it before
    importing vLLM. `fmt` is `text` or `json`."""
    os.environ |= {"PDSERVE_LOG_NAME": name, "PDSERVE_LOG_LEVEL": level, "PDSERVE_LOG_FORMAT": fmt}
    os.environ |= {"VLLM_LOGGING_LEVEL": vllm_level, "VLLM_LOGGING_CONFIG_PATH": str(_CONFIG)}
    if level != "DEBUG":  # hide warnings that libraries mean for developers
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        warnings.simplefilter("ignore")
    logging.config.dictConfig(json.loads(_CONFIG.read_text()))
    logging.captureWarnings(True)


def handler() -> logging.Handler:
    """The handler of `logging.json`, with name, format and levels from the environment."""
    name = os.environ.get("PDSERVE_LOG_NAME", "pdserve")
    logging.getLogger("pdserve").setLevel(os.environ.get("PDSERVE_LOG_LEVEL", "INFO"))
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
    out = logging.StreamHandler(sys.stderr)
    out.addFilter(RepeatFilter())
    out.setFormatter(LineFormatter(name, os.environ.get("PDSERVE_LOG_FORMAT", "text")))
    return out


class RepeatFilter(logging.Filter):
    """Limits repeated warnings and errors, so that they do not fill the disk. For each type of exception, a line of
    code may log `BURST` records in `BURST_SECONDS`, and one traceback in `TRACE_EVERY` seconds. The next record says
    how many were left out."""

    TRACE_EVERY, BURST, BURST_SECONDS = 60.0, 100, 10.0

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int, str], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
        key = record.pathname, record.lineno, kind
        if len(self._places) > 1000:
            self._places.clear()
        place = self._places.setdefault(key, _Place())
        now = time.monotonic()
        if now >= place.began + self.BURST_SECONDS:
            place.began, place.shown = now, 0
        if place.shown >= self.BURST:
            place.left_out += 1
            return False
        place.shown += 1
        notes = [f"{place.left_out} more like this were left out"] if place.left_out else []
        place.left_out = 0
        if kind and now < place.traced + self.TRACE_EVERY:
            error = record.exc_info[1] if record.exc_info else None
            notes.append(f"{kind}: {error}, traceback above")
            record.exc_info = record.exc_text = None
        elif kind:
            place.traced = now
        if notes:
            record.msg, record.args = f"{record.getMessage()} ({'; '.join(notes)})", ()
        return True


@dataclass
class _Place:
    began: float = float("-inf")
    shown: int = 0
    left_out: int = 0
    traced: float = float("-inf")


class LineFormatter(logging.Formatter):
    def __init__(self, name: str, fmt: str) -> None:
        super().__init__()
        self._name = name
        self._show = as_json if fmt == "json" else text

    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname[0], quoted(_cut(record.getMessage()))
        trace = quoted(_cut(self.formatException(record.exc_info))) if record.exc_info else ""
        return self._show(LogLine(stamp(record.created), level, self._name, record.name, message), trace)


def quoted(text: str) -> str:
    """Escape text that a client may have written, so that it cannot forge a record or control a terminal."""
    return _FORGED.sub("\n| ", _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text))


def _cut(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} ... ({len(text) - LONGEST} more characters) ... {text[-half:]}"


def stamp(seconds: float | None = None) -> str:
    """Local time in ISO format with milliseconds; now by default."""
    seconds = clock.unix() if seconds is None else seconds
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(seconds))}.{int(seconds % 1 * 1000):03d}"


def text(line: LogLine, trace: str = "") -> str:
    shown = f"{line.time} {line.level} {line.name} {line.logger or '-'}: {line.message}"
    return f"{shown}\n{trace}" if trace else shown


def as_json(line: LogLine, trace: str = "") -> str:
    record = {
        "time": line.time,
        "level": _LEVELS[line.level],
        "role": line.name,
        "logger": line.logger,
        "message": line.message,
    }
    if trace:
        record["trace"] = trace
    return json.dumps(record, ensure_ascii=False)


def parse(raw: str, name: str) -> LogLine:
    """Parse a line of process `name`: a log record of pdserve, in either format, or other text (of a C++ library, a
    crash, a print)."""
    raw = quoted(_ANSI.sub("", raw))
    if match := _LINE.fullmatch(raw):
        time_, level, own_name, logger, message = match.groups()
        return LogLine(time_, level, own_name, "" if logger == "-" else logger, message)
    if raw.startswith('{"time":'):
        try:
            record = json.loads(raw)
            values = [record[key] for key in ("time", "level", "role", "logger", "message")]
            time_, level, own_name, logger, message = map(str, values)
            message = quoted("\n".join(filter(None, (message, record.get("trace")))))
            return LogLine(time_, _LETTERS[level], own_name, logger, message)
        except (ValueError, LookupError, TypeError):  # JSON of another program
            pass
    if raw.startswith('{"level":'):  # a record of etcd
        with suppress(ValueError, LookupError, TypeError):
            record = json.loads(raw)
            message = ": ".join(filter(None, (record["msg"], record.get("error"))))
            level = _LETTERS.get(record["level"].replace("warn", "warning"), "E")  # panic and fatal become E
            return LogLine(stamp(), level, name, "", message)
    return LogLine(stamp(), _guess_level(raw), name, "", raw)


def _guess_level(raw: str) -> str:
    if re.search(r"\b(ERROR|CRITICAL|FATAL|Traceback)\b|Error: |^\[?E\d{4}", raw):
        return "E"
    return "W" if re.search(r"\b(WARNING|[Ww]arning)\b|^\[?W\d{4}", raw) else "I"
