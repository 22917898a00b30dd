"""Limits of log records, and parsing of log lines."""

import io
import logging

import pytest

from pdserve.observe import logs


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


@pytest.fixture
def log(out: io.StringIO) -> logging.Logger:
    logger = logging.Logger("vllm.somewhere")
    logger.addHandler(logs.handler())
    return logger


def fail(log: logging.Logger, number: int) -> None:
    try:
        raise ValueError(f"failure {number}")
    except ValueError:
        log.exception("request %d failed", number)


def test_a_traceback_is_shown_once_and_the_rest_is_counted(log: logging.Logger, out: io.StringIO) -> None:
    for number in range(500):
        fail(log, number)
    text = out.getvalue()
    assert text.count("Traceback") == 1
    assert text.count("\n") < 120
    assert "request 1 failed (ValueError: failure 1, traceback above)" in text


def test_repeated_warnings_of_a_line_of_code_are_counted(
    log: logging.Logger, out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for number in range(130):
        if number == 120:
            now = 11.0
        log.warning("message %d skipped", number)
        log.info("request %d", number)
    log.warning("another place")
    *lines, other = [line for line in out.getvalue().splitlines() if "request" not in line]
    assert other.endswith("another place")
    assert out.getvalue().count("request") == 130, "INFO has no limit"
    assert len(lines) == 110
    assert lines[100].endswith("message 120 skipped (20 more like this were left out)")


def test_foreign_json_is_a_line_like_any_other() -> None:
    """The supervisor parses all lines of a role, also those of other programs."""
    for raw in (
        '{"time":1,"level":5}',
        '{"time":"","level":"odd","role":"","logger":"","message":""}',
        '{"time":"","level":"info","role":"","logger":"","message":"","trace":[1]}',
    ):
        line = logs.parse(raw, "decode-0")
        assert (line.name, line.logger, line.message) == ("decode-0", "", raw)
        assert logs.as_json(line)


FORGED = "2026-01-31T12:00:00.123 C decode-0 pdserve.decode.worker: all is lost"
ODD = f"a\n{FORGED}\r\x1b]0;title\x07\x1b[2J\x9b1m\x7f\0\u2028b"


@pytest.mark.parametrize("fmt", ["text", "json"])
@pytest.mark.parametrize("raised", [False, True])
def test_clients_cannot_forge_records_or_control_a_terminal(fmt: str, raised: bool) -> None:
    """This holds for the written line and for the supervisor's output."""
    error = (ValueError, ValueError(ODD), None) if raised else None
    said = "refused" if raised else ODD
    record = logging.LogRecord("pdserve.x", logging.WARNING, "x.py", 1, "request r: %s", (said,), error)
    written = logs.LineFormatter("decode-0", fmt).format(record)
    lines = [logs.parse(line, "decode-0") for line in written.split("\n")]
    assert [line.message for line in lines if line.logger == "pdserve.decode.worker"] == []
    for shown in (written, *map(logs.text, lines)):
        assert all(character.isprintable() or character == "\n" for character in shown)
        assert not [line for line in shown.split("\n")[1:] if line.startswith(FORGED)]
    assert "all is lost" in written


def test_a_record_has_a_maximum_length_and_is_read_back() -> None:
    record = logging.LogRecord("pdserve.x", logging.INFO, "x.py", 1, "%s", ("x" * (4 << 20),), None)
    written = logs.LineFormatter("decode-0", "text").format(record)
    assert len(written) < logs.LONGEST + 200
    assert f"x ... ({(4 << 20) - logs.LONGEST} more characters) ... x" in written
    text = "\x1b" * (2 * logs.LONGEST)
    error = (ValueError, ValueError(text), None)
    record = logging.LogRecord("pdserve.x", logging.WARNING, "x.py", 1, "%s", (text,), error)
    line = logs.parse(logs.LineFormatter("decode-0", "json").format(record), "")
    assert line.logger == "pdserve.x"
    assert line.message.count("\\x1b") > 1.5 * logs.LONGEST
