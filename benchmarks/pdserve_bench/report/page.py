"""A report as one HTML page that needs nothing else."""

import base64
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from pdserve_bench.report import BROKEN_OFF, Report, charts, palette


def write_html(report: Report, file: Path) -> None:
    loaded = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    colours = palette.of_labels(report.charts)
    # The only text that is not escaped here: matplotlib escapes the texts in its SVG.
    pictures = [
        (chart, charts.subtitle(chart), Markup(charts.svg(chart, colours))) for chart in report.charts
    ]
    page = loaded.get_template("page.html").render(
        report=report,
        pictures=pictures,
        broken_off=BROKEN_OFF,
        light=palette.css(dark=False),
        dark=palette.css(dark=True),
        json=base64.b64encode(report.as_json().encode()).decode(),
        file_name=re.sub(r"[^a-z0-9]+", "-", report.title.lower()).strip("-") or "report",
    )
    file.write_text(page, encoding="utf-8")
