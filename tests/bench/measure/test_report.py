"""Reports in a pipe and as JSON."""

import json
import math
from pathlib import Path

import pytest
from pdserve_bench.measure.report import Cell, Column, Report, Rows

SYSTEMS = ["plain vLLM", "pdserve, all local", "pdserve, as it decides"]
FIGURES = {
    "goodput, requests/s": ".1f",
    "output tokens/s": ",.0f",
    "longest gap p99, ms": ".0f",
    "CPU seconds per 1,000 tokens": ".2f",
    "requests": ",d",
    "failed": "d",
}
COLUMNS = [Column("system"), *(Column(name, spec) for name, spec in FIGURES.items())]
EVIL = "[/b]<script>alert('x')</script> & \x1b[31mred 模型"


def rows() -> Rows:
    cells: list[list[Cell]] = [[name, 2.9, 1185.4, 230, 1.2, 1240, 0] for name in SYSTEMS]
    return Rows("Medians of 3 rounds", COLUMNS, cells, "Taken in turns.", best=2)


def report() -> Report:
    return Report(
        "One engine against the graph",
        "The graph carries 3.5 times as many requests.",
        [rows()],
        notes=["A control run: 1.02."],
        verdict="Disaggregate.",
    )


def test_a_report_in_a_pipe_is_plain_text_with_the_answer_last(capsys: pytest.CaptureFixture[str]) -> None:
    report().show()
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) <= 110
    assert lines[-2:] == ["Disaggregate.", "The graph carries 3.5 times as many requests."]
    assert lines.index("Taken in turns.") < lines.index("A control run: 1.02.")


@pytest.mark.parametrize("columns", [40, 110])
def test_a_table_breaks_no_number(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table may be wider than the terminal. The cell of an unknown value is empty."""
    monkeypatch.setattr("pdserve_bench.measure.report.PIPE_WIDTH", columns)
    Report("", tables=[rows()]).show()
    lines = capsys.readouterr().out.splitlines()
    assert columns < 110 or max(map(len, lines)) <= columns
    numbers = ["2.9", "1,185", "230", "1.20", "1,240", "0"]
    assert sum(line.split()[-len(numbers) :] == numbers for line in lines) == len(SYSTEMS)
    assert [Column("", ".1f").shown(cell) for cell in (math.nan, None, "none")] == ["", "", "none"]


def test_texts_of_servers_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Report(EVIL, EVIL, [Rows(EVIL, [Column(EVIL)], [[EVIL]], EVIL)], notes=[EVIL], verdict=EVIL).show()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count("[/b]<script>alert('x')</script> & \N{REPLACEMENT CHARACTER}[31mred 模型") == 7


def test_json_has_all_of_a_report_and_no_nan() -> None:
    nan, inf = math.nan, math.inf
    whole = Report(
        "",
        tables=[Rows("", [Column("n", ".1f")], [[nan], [inf], [None], [2.5], ["pdserve"]])],
        verdict="Disaggregate.",
        data={"deep": [{"x": nan}], "path": Path("/x"), "by number": {1: 2}},
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(whole.as_json(), parse_constant=refuse)
    assert found["tables"][0]["rows"] == [[None], [None], [None], [2.5], ["pdserve"]]
    assert found["data"] == {"deep": [{"x": None}], "path": "/x", "by number": {"1": 2}}
    assert found["verdict"] == "Disaggregate."
    assert found["machine"]["cores"] > 0
