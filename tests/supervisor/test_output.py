import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.config.schema import Config, FrontendConfig
from pdserve.demo import MODEL_DIR
from pdserve.observe import logs
from pdserve.records import Instance, Role
from pdserve.supervisor import output as module
from pdserve.supervisor import terminal
from pdserve.supervisor.output import LogFile, ProcessOutput
from pdserve.supervisor.progress import banner, curl, phase_of
from pdserve.supervisor.terminal import NonBlockingStream
from tests.conditions import until
from tests.terminal import Terminal

OURS = "2026-01-31T12:00:00.123 I decode-0 pdserve.decode.worker: request r1: prefill remote"


@pytest.fixture
def output(tmp_path: Path) -> Iterator[ProcessOutput]:
    made = ProcessOutput(tmp_path, stream=StringIO())
    yield made
    made.close()


def shown(output: ProcessOutput) -> str:
    assert isinstance(output.console.file, StringIO)
    return output.console.file.getvalue()


def test_our_lines_pass_through(output: ProcessOutput) -> None:
    output.line("decode-0", OURS)
    assert shown(output) == OURS + "\n"


def test_foreign_lines_get_the_name_of_their_process(output: ProcessOutput) -> None:
    output.line("prefill-1", "\x1b[31mucx says hello\x1b[0m")
    assert shown(output).endswith(" I prefill-1 -: ucx says hello\n")


@pytest.mark.parametrize(
    ("line", "visible"),
    [
        (OURS, True),
        ("2026-01-31T12:00:00.123 I decode-0 vllm.v1.engine.core: Initializing a V1 LLM engine", False),
        ("2026-01-31T12:00:00.123 W decode-0 vllm.config: something is odd", True),
        ("2026-01-31T12:00:00.123 W decode-0 vllm.config: Enforce eager set, disabling …", False),
        ("2026-01-31T12:00:00.123 E decode-0 vllm.config: Enforce eager set, but it failed", True),
        ("Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]", False),
        ("[W1120 23:32:28.565685102 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy", False),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
    ],
)
def test_the_terminal_shows_what_matters_and_the_file_has_all(
    output: ProcessOutput, tmp_path: Path, line: str, visible: bool
) -> None:
    output.line("decode-0", line)
    assert (line.split(": ")[-1] in shown(output)) is visible
    assert line.split(": ")[-1] in (tmp_path / "decode-0.log").read_text()


def test_json_lines_are_json_whichever_process_wrote_them(tmp_path: Path) -> None:
    output = ProcessOutput(tmp_path, fmt="json", stream=StringIO())
    record = logging.LogRecord("pdserve.x", logging.ERROR, __file__, 1, "it broke", None, None)
    for raw in (logs.LineFormatter("decode-0", "json").format(record), OURS, "a foreign line", '{"time": 1}'):
        output.line("decode-0", raw)
    output.print("a banner")
    lines = [json.loads(line) for line in shown(output).splitlines()]
    assert [(line["role"], line["level"], line["message"]) for line in lines] == [
        ("decode-0", "error", "it broke"),
        ("decode-0", "info", "request r1: prefill remote"),
        ("decode-0", "info", "a foreign line"),
        ("decode-0", "info", '{"time": 1}'),
    ]
    output.close()


def test_a_traceback_is_one_record() -> None:
    try:
        raise ValueError("inner")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("pdserve.x", logging.ERROR, __file__, 1, "it broke", None, info)
    line = logs.parse(logs.LineFormatter("decode-0", "json").format(record), "?")
    assert line.name == "decode-0"
    assert line.message.startswith("it broke\nTraceback")
    assert line.message.endswith("ValueError: inner")


def test_a_terminal_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    class Gone(StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    output = ProcessOutput(tmp_path, stream=Gone())
    for _ in range(2):
        output.line("decode-0", OURS)
        output.print("a banner")
    assert (tmp_path / "decode-0.log").read_text().count("prefill remote") == 2
    output.close()


def test_log_files_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_LIMIT", 1000)
    output = ProcessOutput(tmp_path, stream=StringIO())
    for _ in range(100):
        output.line("decode-0", OURS)
    output.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 1200


@pytest.mark.parametrize(
    ("message", "phase"),
    [
        ("Starting to load model /m...", "loading weights"),
        ("Loading weights took 0.01 seconds", "allocating KV cache"),
        ("GPU KV cache size: 524,288 tokens", "warming up"),
        ("init engine (profile, create kv cache, warmup model) took 2.23 s", "registering"),
        ("request r1: prefill remote", None),
    ],
)
def test_phases_are_told_from_vllms_words(message: str, phase: str | None) -> None:
    assert phase_of(message) == phase


def test_the_banner_fits_a_hundred_columns_and_its_curl_is_json(tmp_path: Path) -> None:
    config = Config(tmp_path / "graph.yaml", str(MODEL_DIR), "demo", FrontendConfig(port=8123), None, None)
    workers = [
        Instance(
            f"{role}-0-ab12cd34",
            role,
            kv_blocks=16384,
            block_size=32,
            kv_tokens=524288,
            settings={"policy": "threshold"},
        )
        for role in (Role.DECODE, Role.PREFILL)
    ]
    console = Console(file=StringIO(), width=100)
    console.print(banner(config, workers, 61.7, tmp_path / "logs", {"policy": "adaptive"}))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "Ready after 62 s" in text
    assert "http://127.0.0.1:8123/v1" in text
    assert "524,288 tokens" in text
    assert "decode-0 " in text
    assert "policy = adaptive (file: threshold)  (pdserve set --unset policy)" in text
    assert max(map(len, text.splitlines())) <= 100
    body = json.loads(curl(config).split("-d ", 1)[1].strip("'"))
    assert body["stream"] is True
    assert "red box" in body["messages"][0]["content"]


def test_a_terminal_that_takes_nothing_holds_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-S, a connection that is lost: the graph goes on, and so does the terminal when it is read again."""
    monkeypatch.setattr(terminal, "FLUSH_WITHIN", 30.0)
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe, os.fdopen(read, encoding="utf-8") as reader:
        output = ProcessOutput(tmp_path, stream=pipe)
        for number in range(20_000):
            output.line("decode-0", f"{number} {'x' * 100}")
        shown = [reader.readline() for _ in range(5000)]
        assert [line.split()[4] for line in shown] == [str(number) for number in range(5000)]
        rest = threading.Thread(target=lambda: shown.extend(reader))
        rest.start()
        output.line("decode-0", "the last")
        output.close()
        pipe.close()
        rest.join()
        left_out, last = shown[-2:]
        assert "lines were left out here" in left_out
        assert last.endswith("the last\n")
    assert len((tmp_path / "decode-0.log").read_text().splitlines()) == 20_001


def test_a_slow_reader_loses_nothing_as_long_as_little_is_unread() -> None:
    """What it has taken makes place for more, also in the middle of what is being written."""
    read, write = os.pipe()
    taken = bytearray()

    def take(size: int) -> None:
        while len(taken) < size and (data := os.read(read, min(1 << 16, size - len(taken)))):
            taken.extend(data)

    first, second = b"x" * terminal.UNREAD, b"y" * (terminal.UNREAD // 4)
    with os.fdopen(write, "w") as pipe:
        stream = NonBlockingStream(pipe)
        stream.write(first.decode())
        take(terminal.UNREAD // 2)
        stream.write(second.decode())
        rest = threading.Thread(target=take, args=(len(first + second),))
        rest.start()
        rest.join(60)
    rest.join()
    os.close(read)
    assert taken == first + second


def test_what_a_terminal_that_is_gone_did_not_take_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "FLUSH_WITHIN", 60.0)
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        stream = NonBlockingStream(pipe)
        stream.write("x" * (terminal.UNREAD // 2))
        os.read(read, 1)  # it is being written now
        stream.write("the rest")
        os.close(read)
        started = time.monotonic()
        stream.finish()
        assert time.monotonic() - started < 30


IN_FRONT = """
import os, pathlib, signal, sys
from pdserve.supervisor.terminal import own_foreground
signal.signal(signal.SIGHUP, signal.SIG_IGN)
said = pathlib.Path(sys.argv[1])
with own_foreground():
    said.write_text("in front" if os.tcgetpgrp(0) == os.getpid() else "not in front")
    try:
        os.read(0, 1)
    except OSError:
        pass
said.write_text("left")
"""


async def test_a_terminal_that_is_closed_meanwhile_is_left_in_good_order(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with Terminal([sys.executable, "-c", IN_FRONT, str(said)], os.environ) as shell:
        await until(lambda: said.exists() and said.read_text() == "in front")
        shell.hang_up()
        await until(lambda: said.read_text() == "left", 10)


def test_only_its_user_can_read_a_log_file(tmp_path: Path) -> None:
    with closing(LogFile(tmp_path / "decode-0.log", print)) as file:
        file.write("a line")
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_a_log_file_that_is_removed_renamed_or_cut_goes_on_under_its_name(tmp_path: Path) -> None:
    """As logrotate does it, with and without `copytruncate`."""
    folder = tmp_path / "logs"
    path, renamed = folder / "decode-0.log", folder / "decode-0.log.old"
    with closing(LogFile(path, pytest.fail)) as file:
        file.write("first")
        path.unlink()
        file.write("after rm")
        assert path.read_text() == "after rm\n"
        path.rename(renamed)
        file.write("after mv")
        assert (renamed.read_text(), path.read_text()) == ("after rm\n", "after mv\n")
        path.rename(renamed)
        path.touch(0o644)
        file.write("into the new one")
        assert (renamed.read_text(), path.read_text()) == ("after mv\n", "into the new one\n")
        assert path.stat().st_mode & 0o777 == 0o600
        os.truncate(path, 0)
        file.write("after copytruncate")
        assert path.read_text() == "after copytruncate\n"
        shutil.rmtree(folder)
        file.write("after rm -r")
        assert path.read_text() == "after rm -r\n"
        assert folder.stat().st_mode & 0o777 == 0o700


def test_lines_are_dropped_and_counted_where_there_can_be_no_file(tmp_path: Path) -> None:
    troubles: list[str] = []
    folder = tmp_path / "logs"
    with closing(LogFile(folder / "decode-0.log", troubles.append)) as file:
        shutil.rmtree(folder)
        folder.write_text("in the way")
        for _ in range(3):
            file.write("lost")
        folder.unlink()
        file.write("kept")
    lines = file.path.read_text().splitlines()
    assert "3 lines were dropped" in lines[0]
    assert lines[1:] == ["kept"]
    assert len(troubles) == 1
