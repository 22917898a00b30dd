"""Write the table of `docs/metrics.md` from the metrics in code: `python -m tools.metrics`."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric

from pdserve.observe import metrics

PAGE = Path(__file__).parent.parent / "docs/metrics.md"
_TABLE = re.compile(r"(?<=\| meaning \|\n\|---\|---\|---\|---\|---\|\n)(\| .*\n)*")


def page() -> str:
    return _TABLE.sub(lambda table: "".join(_rows()), PAGE.read_text(), count=1)


def _rows() -> Iterator[str]:
    """Yield a row for each metric. The nearest comment above a metric names the roles that have it."""
    of = ""
    for comment, name in re.findall(r"^(?:# (.+)|([A-Z\d_]+) = [CGH])", inspect.getsource(metrics), re.M):
        of = comment or of
        if name:
            yield from (_row(family, vars(metrics)[name], of) for family in vars(metrics)[name].describe())
    (restarts,) = metrics.SlotMetrics([]).collect()
    yield _row(restarts, restarts, "serve")


def _row(family: Metric, made: object, of: str) -> str:
    name, meaning = family.name + "_total" * (family.type == "counter"), family.documentation
    labels = ", ".join(f"`{label}`" for label in made._labelnames)  # type: ignore[attr-defined]
    return f"| `{name}` | {family.type} | {labels} | {of} | {meaning.replace('docs/metrics.md', 'below')} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
