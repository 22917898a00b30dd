"""A report as one HTML page that needs nothing else."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from pdserve_bench.report import Report, charts, machine


def write_html(report: Report, file: Path) -> None:
    loaded = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    page = loaded.get_template("page.html")
    pictures = [(chart.title, charts.svg(chart)) for chart in report.charts]
    file.write_text(page.render(report=report, pictures=pictures, machine=machine()))
