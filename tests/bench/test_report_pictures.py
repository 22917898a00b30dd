"""Reports as PNG and as a page. matplotlib is slow to load: all that needs it is here."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from pdserve_bench.report import Chart, Report, Series, palette
from pdserve_bench.report.__main__ import main
from pdserve_bench.report.charts import svg
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


class Page(HTMLParser):
    """What is in a page: tags with their attributes, and the text of each kind of tag."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            self.texts.setdefault(tag, []).append(data.strip())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    file = tmp_path_factory.mktemp("page") / "x.html"
    report().write(None, file)
    return Page(file)


def test_a_page_needs_nothing_else(page: Page) -> None:
    assert not {"script", "img", "iframe"} & {tag for tag, _ in page.tags}
    links = [
        value or ""
        for tag, attributes in page.tags
        for key, value in attributes.items()
        if key in ("href", "src", "xlink:href", "action")
    ]
    assert links
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert not re.search(r"url\((?!#)|@import", "".join(page.texts["style"]))


def test_a_page_has_all_of_the_report(page: Page) -> None:
    cells = [text for text in (*page.texts["td"], *page.texts["th"]) if text]
    for rows in report().tables:
        told = [
            column.told(cell) for row in rows.rows for column, cell in zip(rows.columns, row, strict=True)
        ]
        assert sorted(cells) == sorted([*told, *(column.name for column in rows.columns)])
    best = [attributes for tag, attributes in page.tags if tag == "tr" and attributes.get("class") == "best"]
    assert len(best) == 1
    texts = " ".join(page.texts["main"])
    for text in ("Disaggregate.", report().lead, "A control run: 1.02.", "Goodput", "↑ higher is better"):
        assert text in texts
    assert {"10.2", "plain vLLM", "asked for: 8"} <= set(page.texts["svg"])


def test_a_page_gives_its_figures_away(page: Page) -> None:
    links = [attributes for tag, attributes in page.tags if tag == "a"]
    given = (links[0]["href"] or "").partition("base64,")[2]
    assert json.loads(base64.b64decode(given)) == json.loads(report().as_json())
    assert links[0]["download"] == "one-engine-against-the-graph.json"


def test_texts_of_servers_are_text(tmp_path: Path) -> None:
    bars = Chart(EVIL, "bars", EVIL, EVIL, [Series(EVIL, ["a", EVIL], [1, 2])], {EVIL: 1})
    Report(EVIL, EVIL, charts=[bars], notes=[EVIL], verdict=EVIL).write(None, tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script") >= 8


def test_a_chart_has_the_colours_of_the_page(page: Page) -> None:
    pictures = [attributes for tag, attributes in page.tags if "stroke" in (attributes.get("style") or "")]
    used = set(re.findall(r"var\((--c\w+)\)", " ".join(attributes["style"] or "" for attributes in pictures)))
    assert used
    for dark in (False, True):
        assert used <= set(re.findall(r"(--c\w+):", palette.css(dark)))
    style = "".join(page.texts["style"])
    assert palette.css(dark=True) in style.partition("prefers-color-scheme: dark")[2]


def test_both_pictures_are_made(tmp_path: Path) -> None:
    report().write(None, tmp_path / "v0.2")
    high, wide, _ = imread(tmp_path / "v0.2.png").shape
    assert wide == 1600, "for a README"
    assert high > 400
    assert (tmp_path / "v0.2.html").exists()


def test_nothing_that_was_measured_breaks_a_picture(tmp_path: Path) -> None:
    Report(EVIL, LONG, charts=NASTY, complete=False).write(None, tmp_path / "x.png")
    assert imread(tmp_path / "x.png").shape[1] == 1600
    Report("nothing").write(None, tmp_path / "x.png")


@pytest.mark.parametrize("chart", NASTY, ids=lambda chart: chart.title[:12])
def test_an_empty_chart_says_so(chart: Chart) -> None:
    drawn = svg(chart, palette.of_labels([chart]))
    assert ("nothing was measured" in drawn) == (chart.title[:3] in ("no ", "onl"))


def texts(chart: Chart) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg(chart, palette.of_labels([chart])))


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
    page = Page(tmp_path / "x.html")
    assert page.texts["h1"] == ["T"]
    assert [tag for tag, _ in page.tags].count("figure") == 1
    found = json.loads(Path(whole).read_text())
    assert found["charts"] == json.loads(report().as_json())["charts"]
    assert (found["verdict"], found["lead"]) == ("", "L")
    assert main([first, "--charts", "7"]) == 2
