"""A report as JSON, and back.

    title, verdict, lead   texts
    complete               false where the benchmark was broken off
    tables                 [{title, columns: [{name, spec}], rows: [[text | number | null]], note,
                             best: number of a row | null}]
    charts                 [{title, kind: lines | bars | cdf | dots, x_label, y_label, x_unit, y_unit, better,
                             log_x, log_y, series: [{label, xs, ys, low, high, baseline}],
                             across: {label: y}, upright: {label: x}}]
    notes                  [text]
    origins                [{command, machine: {date, processor, cores, memory_gib, system, python, pdserve,
                             packages, load}}]
    data                   the benchmark's own raw figures

Cells, series and `data` have the units that the names and units beside them give. NaN and infinity, which JSON does not
know, are null. Readers ignore keys that they do not know; new keys have defaults.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from pdserve.errors import ConfigError
from pdserve_bench.report import Chart, Report

_DECODER = msgspec.json.Decoder(Report)


def as_json(report: Report) -> str:
    keys = ("title", "verdict", "lead", "complete", "tables", "charts", "notes", "origins", "data")
    whole = {key: getattr(report, key) for key in keys}
    return msgspec.json.format(msgspec.json.encode(whole, enc_hook=_plain), indent=2).decode() + "\n"


def _plain(value: object) -> object:
    """NumPy's numbers are numbers; anything else that JSON does not know, as a path, is a text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def read(file: Path) -> Report:
    """Raises ConfigError with what is wrong about the file."""
    try:
        return _DECODER.decode(file.read_bytes())
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}."]) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: is no report that --json wrote: {error}."]) from None


def together(reports: Sequence[Report]) -> Report:
    """One report of several, in their order."""
    if len(reports) == 1:
        return reports[0]
    return Report(
        title=" · ".join(dict.fromkeys(report.title for report in reports)),
        lead=" ".join(report.lead for report in reports if report.lead),
        tables=[rows for report in reports for rows in report.tables],
        charts=[chart for report in reports for chart in report.charts],
        notes=list(dict.fromkeys(note for report in reports for note in report.notes)),
        complete=all(report.complete for report in reports),
        data={"reports": [{"title": report.title, **report.data} for report in reports]},
        origins=[origin for report in reports for origin in report.origins],
    )


def choose(charts: Sequence[Chart], wanted: str) -> list[Chart]:
    """`wanted` has numbers from 1 on, or parts of titles, between commas; empty: all. Raises ConfigError."""
    chosen, problems = [], []
    for word in filter(None, (word.strip() for word in wanted.split(","))):
        found = [
            chart
            for number, chart in enumerate(charts, 1)
            if (word == str(number) if word.isdigit() else word.lower() in chart.title.lower())
        ]
        chosen += found
        if not found:
            known = "; ".join(f"{number} {chart.title}" for number, chart in enumerate(charts, 1))
            problems.append(f"--charts {word}: there is no such chart. There are: {known or 'none'}.")
    if problems:
        raise ConfigError(problems)
    return chosen or list(charts)
