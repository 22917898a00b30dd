"""Reports as PNG. matplotlib is slow to load: all that needs it is here."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from matplotlib.text import Text
from pdserve_bench.report import Chart, Report, Series, palette
from pdserve_bench.report.__main__ import main
from pdserve_bench.report.charts import drawing, panel
from pdserve_bench.report.lettering import folded, label, number, width

from tests.bench.test_report import EVIL, SYSTEMS, report

NAN = math.nan
LONG = "a system with max-num-batched-tokens=2048 and max-num-seqs=256, which takes a line and another one"
EIGHT = [f"system {number} {'x' * number}" for number in range(8)]

NASTY = [
    Chart("no series", "lines", "x", "y", []),
    Chart("no points", "bars", "x", "y", [Series("a", [], [])]),
    Chart("no samples", "cdf", "x", "y", [Series("a", [], []), Series("b", [NAN], [])]),
    Chart("only NaN", "dots", "x", "y", [Series("a", [1, 2], [NAN, None])], log_y=True),
    Chart("zeros", "lines", "x", "y", [Series("a", [0, 1, 100], [5, 0, 1e6])], log_x=True, log_y=True),
    Chart("zero bars", "bars", "x", "y", [Series("a", ["p", "q"], [0, 0])], {"SLO": 0}),
    Chart("all zero", "lines", "x", "y", [Series("a", [0, 1], [0, 0])], log_x=True, log_y=True),
    Chart("one point", "lines", "x", "y", [Series("a", [3], [4])], {"far": 70}, {"left": -3, "none": NAN}),
    Chart("same x", "dots", "x", "y", [Series("a", [3, 3], [4, 4])], log_x=True, log_y=True),
    Chart("below 0", "bars", "x", "y", [Series("a", ["p", "q"], [-1, 2], [-2, 1], [0, 3])]),
    Chart("eight", "lines", "x", "y", [Series(name, [1, 2], [1, 2]) for name in EIGHT], y_unit="s"),
    Chart("eight bars", "bars", "x", "y", [Series(name, ["p", "q"], [1, 2]) for name in EIGHT]),
    Chart(LONG, "bars", LONG, LONG, [Series(LONG, [LONG, EVIL], [1, NAN], [], [2, 3])]),
    Chart(EVIL, "lines", "$x^2", "_y", [Series("_a", ["p", 1], [1, 2]), Series("$", ["q"], [math.inf])]),
    Chart("one side", "lines", "x", "y", [Series("a", [1, 2], [5, 6], [4], [])], better="lower"),
]


def test_a_picture_is_as_wide_as_a_page_of_text(tmp_path: Path) -> None:
    report().write(None, tmp_path / "v0.2")
    high, wide, _ = imread(tmp_path / "v0.2.png").shape
    assert wide == 1600, "for a README"
    assert high > 400


def test_nothing_that_was_measured_breaks_a_picture(tmp_path: Path) -> None:
    Report(EVIL, LONG, charts=NASTY, complete=False).write(None, tmp_path / "x.png")
    assert imread(tmp_path / "x.png").shape[1] == 1600
    Report("nothing").write(None, tmp_path / "x.png")


@pytest.mark.parametrize("chart", NASTY, ids=lambda chart: chart.title[:12])
def test_an_empty_chart_says_so(chart: Chart) -> None:
    assert ("nothing was measured" in texts(chart)) == (chart.title[:3] in ("no ", "onl"))


def texts(chart: Chart) -> list[str]:
    """All that is drawn as text."""
    with drawing():
        figure = panel(chart, palette.of_labels([chart]), 5.2)
        figure.draw_without_rendering()
    return [found.get_text() for found in figure.findobj(Text) if isinstance(found, Text)]


def test_bars_have_their_values_and_axes_their_units() -> None:
    chart = Chart(
        "", "bars", "", "TTFT", [Series("a", ["p", "q"], [0.0421, 1.5], [0.03, 1.2], [0.06, 1.9])], y_unit="s"
    )
    assert {"42.1 ms", "1.5 s", "500 ms"} <= set(texts(chart))


def test_logarithmic_ticks_are_plain_numbers() -> None:
    chart = Chart(
        "", "lines", "", "", [Series("a", [1, 32, 1000], [0.5, 2000, 40000])], log_x=True, log_y=True
    )
    found = [text for text in texts(chart) if text.strip()]
    assert {"1", "10", "1,000", "10,000"} <= set(found)
    assert not any("e" in text or "^" in text for text in found)


def test_a_limit_beyond_the_data_is_shown_with_its_name() -> None:
    chart = Chart("", "cdf", "", "", [Series("a", [0.1, 0.2], [])], upright={"SLO": 0.5}, x_unit="s")
    assert {"SLO: 500 ms", "400 ms"} <= set(texts(chart))


def test_a_label_has_one_colour_and_a_baseline_is_grey() -> None:
    one = Chart("", "bars", "", "", [Series("goodput", SYSTEMS, [1, 2, 3])])
    two = Chart("", "lines", "", "", [Series(name, [1], [1]) for name in reversed(SYSTEMS)])
    three = Chart("", "lines", "", "", [Series("engine", [1], [1], baseline=True), Series("x", [1], [1])])
    colours = palette.of_labels([one, two, three])
    assert palette.of_labels([one])["plain vLLM"] == colours["plain vLLM"]
    assert {colours["plain vLLM"], colours["engine"]} <= set(palette.GREYS)
    strong = [colours[name] for name in (*SYSTEMS[1:], "x")]
    assert len({*strong}) == 3
    assert not {*strong} & set(palette.GREYS)
    assert len(set(palette.of_labels([NASTY[10]]).values())) == 8


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [
        (0.0421, "s", "42.1 ms"),
        (0.00002, "s", "20 µs"),
        (1500, "s", "1,500 s"),
        (2.5e9, "B/s", "2.5 GB/s"),
        (0.9996, "share", "100%"),
        (0.905, "share", "90.5%"),
        (0, "s", "0"),
        (-3, "", "-3"),
        (1234567, "", "1,234,567"),
        (0.00012, "", "0.00012"),
        (math.nan, "s", "n/a"),
    ],
)
def test_numbers_are_told_as_people_write_them(value: float, unit: str, told: str) -> None:
    assert number(value, unit) == told


def test_texts_fit() -> None:
    assert folded("one two three", width("one two", 9) + 0.01, 9) == "one two\nthree"
    assert label("a\nb") == "a b"
    assert len(label("x" * 500)) <= 90


def test_a_picture_is_made_of_files_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, whole = (str(tmp_path / name) for name in ("a.json", "b.json", "whole.json"))
    Path(first).write_text(report().as_json())
    Path(second).write_text(Report("Hops", charts=[NASTY[4]]).as_json())
    assert main([first, second, "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [" 1  Goodput", " 2  zeros"]
    arguments: list[Any] = [first, second, "--charts", "goodput", "--title", "T", "--lead", "L"]
    assert main([*arguments, "--plot", str(tmp_path / "x"), "--json", whole]) == 0
    assert imread(tmp_path / "x.png").shape[1] == 1600
    found = json.loads(Path(whole).read_text())
    assert found["charts"] == json.loads(report().as_json())["charts"]
    assert (found["verdict"], found["lead"]) == ("", "L")
    assert main([first, "--charts", "7"]) == 2
