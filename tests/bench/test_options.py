"""Wrong command lines of benchmarks are refused before anything starts."""

from pathlib import Path

import pytest
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.options import exit_code

from pdserve.cli import main as pdserve
from pdserve.util.errors import ConfigError, Unavailable


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("compare -f graph.yaml --trace absent.jsonl", "absent.jsonl"),
        ("compare -f graph.yaml --ttft soon", "--ttft soon: not a duration with its unit"),
        ("compare -f graph.yaml --json /nowhere/found.json", "there is no folder /nowhere"),
        ("bench goodput --ttft soon --gap 0ms", "--gap 0ms: not a duration"),
        ("bench goodput --base-url localhost:8000", "--base-url localhost:8000: write it as"),
        ("bench promise --promise chat=500ms", "write it as chat=500ms/60ms"),
        ("bench promise --promise =1s/1s", "write it as chat=500ms/60ms"),
        ("bench promise --promise off=1s/1s", "write it as chat=500ms/60ms"),
        ("bench promise --rates fast", "--rates fast: give numbers above 0"),
        ("bench promise --rates 4,0", "--rates 4,0: give numbers above 0"),
        ("bench promise --json .", ".: is a folder"),
    ],
)
def test_a_wrong_command_line_is_refused_at_once(
    command: str,
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(simulated(), tmp_path / "graph.yaml")
    assert pdserve(command.split()) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError(["--workers 3: no"]), 2), (Unavailable("no graph"), 1)]
)
def test_a_program_ends_with_the_error_and_no_traceback(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise error

    assert exit_code(main) == code
    assert capsys.readouterr().err == f"{error}\n"
    assert exit_code(lambda: 7) == 7
