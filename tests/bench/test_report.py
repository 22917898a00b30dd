"""Reports as data: in the terminal, in a pipe, as JSON; where figures come from; files refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pdserve_bench.report import Cell, Column, Report, Rows, check_outputs, machine, revision

from pdserve.errors import ConfigError
from tests.terminal import Terminal

SYSTEMS = ["plain vLLM", "pdserve, all local", "pdserve, as it decides"]
COLUMNS = [
    Column("system"),
    Column("goodput, requests/s", ".1f"),
    Column("ratio to plain vLLM", ".2f"),
    Column("output tokens/s", ",.0f"),
    Column("TTFT p50, ms", ".0f"),
    Column("TTFT p99, ms", ".0f"),
    Column("longest gap p99, ms", ".0f"),
    Column("CPU seconds per 1,000 tokens", ".2f"),
    Column("requests", ",d"),
    Column("failed", "d"),
]
EVIL = "[/b]<script>alert('x')</script> & \x1b[31mred 模型"


def rows(best: int | None = 2) -> Rows:
    cells: list[list[Cell]] = [[name, 2.9, 1.0, 1185.4, 131, 480, 230, 1.2, 1240, 0] for name in SYSTEMS]
    return Rows("Medians of 3 rounds", COLUMNS, cells, "Taken in turns.", best)


def report() -> Report:
    return Report(
        "One engine against the graph",
        "The graph carries 3.5 times as many requests.",
        [rows()],
        notes=["A control run: 1.02."],
        data={"rounds": [2.9, 3.0]},
        verdict="Disaggregate.",
    )


def test_in_a_pipe_it_is_plain_text_with_the_answer_last(capsys: pytest.CaptureFixture[str]) -> None:
    report().show()
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) <= 110
    assert lines[-2:] == ["Disaggregate.", "The graph carries 3.5 times as many requests."]
    assert lines.index("Taken in turns.") < lines.index("A control run: 1.02.")


@pytest.mark.parametrize("columns", [40, 110, 200])
def test_a_table_breaks_no_number(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not fit, it is wider than the terminal."""
    monkeypatch.setattr("pdserve_bench.report.PIPE_WIDTH", columns)
    Report("", tables=[rows()]).show()
    lines = capsys.readouterr().out.splitlines()
    assert columns < 110 or max(map(len, lines)) <= columns
    numbers = ["2.9", "1.00", "1,185", "131", "480", "230", "1.20", "1,240", "0"]
    assert sum(line.split()[-len(numbers) :] == numbers for line in lines) == len(SYSTEMS)


def test_texts_of_servers_do_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Report(EVIL, EVIL, [Rows(EVIL, [Column(EVIL)], [[EVIL]], EVIL)], notes=[EVIL], verdict=EVIL).show()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count("[/b]<script>alert('x')</script> & \N{REPLACEMENT CHARACTER}[31mred 模型") == 7


@pytest.mark.parametrize(
    ("cell", "spec", "shown"),
    [
        (1234.5, ",.0f", "1,234"),
        (0, "d", "0"),
        (None, ".1f", ""),
        (math.nan, ".1f", ""),
        (math.inf, ".1f", "inf"),
        ("none", ".1f", "none"),
        (0.5, "", "0.5"),
    ],
)
def test_cells(cell: Cell, spec: str, shown: str) -> None:
    assert Column("", spec).shown(cell) == shown


def test_the_best_row_is_bold_in_a_terminal() -> None:
    program = "from tests.bench.test_report import report; report().show()"
    with Terminal(
        [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as terminal:
        terminal.until("the exit code is 0")
    bold = [line for line in terminal.text.splitlines() if "\x1b[1m" in line]
    assert [name for name in SYSTEMS if any(name in line for line in bold)] == ["pdserve, as it decides"]


def test_json_has_all_of_a_report() -> None:
    found = json.loads(report().as_json())
    assert found["tables"][0]["rows"][2][0] == "pdserve, as it decides"
    assert (found["verdict"], found["data"]) == ("Disaggregate.", {"rounds": [2.9, 3.0]})
    assert found["machine"]["cores"] > 0


def test_json_has_no_nan() -> None:
    nan, inf = math.nan, math.inf
    whole = Report(
        "",
        tables=[Rows("", [Column("n", ".1f")], [[nan], [inf], [None]])],
        data={"deep": [{"x": nan}], "path": Path("/x"), "by number": {1: 2}},
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(whole.as_json(), parse_constant=refuse)
    assert found["tables"][0]["rows"] == [[None], [None], [None]]
    assert found["data"] == {"deep": [{"x": None}], "path": "/x", "by number": {"1": 2}}


def test_only_a_repository_of_ours_says_which_revision_it_is(tmp_path: Path) -> None:
    """An installed package may lie inside another project's."""
    (ours := tmp_path / "ours.py").touch()
    (installed := tmp_path / "installed.py").touch()
    for words in ("init -q", "add ours.py", "-c user.name=a -c user.email=a@b commit -qm x"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    assert len(revision(ours)) >= 7
    assert revision(installed) == ""


def test_the_machine_is_described() -> None:
    assert machine() is machine()
    assert machine()["cores"] > 0


@pytest.mark.parametrize(
    ("name", "wrong"), [("no/x.json", "no folder"), (".", "is a folder"), ("x.json", ""), (None, "")]
)
def test_outputs_are_checked_before_the_work(name: str | None, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / name if name else None
    if wrong:
        with pytest.raises(ConfigError, match=wrong):
            check_outputs(None, file)
    else:
        check_outputs(None, file)
