import json
import logging
import os
import shutil
import threading
from io import StringIO
from pathlib import Path

import pytest

from pdserve.config.schema import Config
from pdserve.contract.records import Instance, Role
from pdserve.observe import logs
from pdserve.supervisor import output as module
from pdserve.supervisor.output import LogFile, ProcessOutput
from pdserve.supervisor.summary import summary
from tests.conditions import until

OURS = "2026-01-31T12:00:00.123 I decode-0 pdserve.decode.worker: request r1: prefill remote"


def shown(folder: Path, *lines: str, fmt: str = "text") -> str:
    output = ProcessOutput(folder, fmt, stream=(stream := StringIO()))
    for line in lines:
        output.line("decode-0", line)
    output.print("a summary")
    output.close()
    return stream.getvalue().removesuffix("a summary\n")


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
def test_the_terminal_shows_fewer_lines_than_the_file(tmp_path: Path, line: str, visible: bool) -> None:
    assert (line.split(": ")[-1] in shown(tmp_path, line)) is visible
    assert line.split(": ")[-1] in (tmp_path / "decode-0.log").read_text()


def test_lines_of_other_programs_get_the_name_of_their_process(tmp_path: Path) -> None:
    """Such lines cannot control the terminal."""
    first, second = shown(tmp_path, OURS, "\x1b[31mucx says\x1b[0m \x1b]0;title\x07").splitlines()
    assert first == OURS
    assert second.endswith(" I decode-0 -: ucx says \\x1b]0;title\\x07")


def test_json_lines_are_json_whichever_process_wrote_them(tmp_path: Path) -> None:
    record = logging.LogRecord("pdserve.x", logging.ERROR, __file__, 1, "it broke", None, None)
    ours = logs.LineFormatter("decode-0", "json").format(record)
    text = shown(tmp_path, ours, OURS, "a foreign line", '{"time": 1}', fmt="json")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["role"], line["level"], line["message"]) for line in lines] == [
        ("decode-0", "error", "it broke"),
        ("decode-0", "info", "request r1: prefill remote"),
        ("decode-0", "info", "a foreign line"),
        ("decode-0", "info", '{"time": 1}'),
    ]


def test_a_closed_terminal_does_not_stop_the_graph(tmp_path: Path) -> None:
    class Closed(StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    output = ProcessOutput(tmp_path, stream=Closed())
    for _ in range(2):
        output.line("decode-0", OURS)
        output.print("a summary")
    assert (tmp_path / "decode-0.log").read_text().count("prefill remote") == 2
    output.close()


def test_log_files_are_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_LIMIT", 1000)
    output = ProcessOutput(tmp_path, stream=StringIO())
    for _ in range(100):
        output.line("decode-0", OURS)
    output.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 1200


def test_the_summary_says_how_much_a_worker_can_hold(tmp_path: Path) -> None:
    """tests/test_serve_sim.py tries the summary's URL and commands."""
    config = Config(tmp_path / "graph.yaml", "m", "demo", None, None, None)
    worker = Instance(
        "decode-0-a", Role.DECODE, kv_blocks=16384, kv_tokens=524288, max_model_len=4096, max_concurrency=128
    )
    lines = summary(config, [worker], 61.7, tmp_path, {}).splitlines()
    assert "  decode-0   CPU, 524,288 tokens of KV cache: 128.0 requests of 4,096" in lines


async def test_an_unread_terminal_does_not_block_processes(tmp_path: Path) -> None:
    """After Ctrl-S, the graph goes on, and the terminal shows new lines when it is read again."""
    ends, got, whole = os.pipe(), list[str](), 20_000
    reader, written = os.fdopen(ends[0], encoding="utf-8"), os.fdopen(ends[1], "w")
    output = ProcessOutput(tmp_path, stream=written)
    for number in range(whole):
        output.line("decode-0", f"{number} {'x' * 100}")
    reading = threading.Thread(target=lambda: got.extend(reader), daemon=True)
    reading.start()
    await until(lambda: len(got) > module.UNREAD)
    output.line("decode-0", "the last")
    output.close()
    written.close()
    await until(lambda: not reading.is_alive())
    reader.close()
    *lines, last = got
    assert module.UNREAD < len(lines) < whole
    assert [line.split()[4] for line in lines] == [str(number) for number in range(len(lines))]
    assert {len(line.split()[5]) for line in lines} == {100}, "no line is torn"
    assert last.endswith("the last\n")
    assert len((tmp_path / "decode-0.log").read_text().splitlines()) == whole + 1


def test_a_removed_renamed_or_truncated_log_file_is_continued(tmp_path: Path) -> None:
    """logrotate renames a log file or, with `copytruncate`, truncates it."""
    folder = tmp_path / "logs"
    path, renamed = folder / "decode-0.log", folder / "decode-0.log.old"
    file = LogFile(path, pytest.fail)
    file.write("first")
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    file.write("after rm")
    assert path.read_text() == "after rm\n"
    path.rename(renamed)
    file.write("after mv")
    assert (renamed.read_text(), path.read_text()) == ("after rm\n", "after mv\n")
    path.rename(renamed)
    path.touch()
    file.write("into the new one")
    assert (renamed.read_text(), path.read_text()) == ("after mv\n", "into the new one\n")
    os.truncate(path, 0)
    file.write("after copytruncate")
    assert path.read_text() == "after copytruncate\n"
    shutil.rmtree(folder)
    file.write("after rm -r")
    assert path.read_text() == "after rm -r\n"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_lines_are_dropped_while_a_file_cannot_be_written(tmp_path: Path) -> None:
    troubles: list[str] = []
    folder = tmp_path / "logs"
    file = LogFile(folder / "decode-0.log", troubles.append)
    folder.write_text("in the way")
    for _ in range(3):
        file.write("lost")
    folder.unlink()
    file.write("kept")
    assert Path(file.baseFilename).read_text() == "kept\n"
    assert len(troubles) == 1
