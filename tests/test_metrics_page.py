"""docs/metrics.md has every metric of the code with its type and labels, every reason, and nothing else."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from pdserve.observe import metrics
from pdserve.observe.metrics import SlotMetrics
from pdserve.records import Role, SlotState
from pdserve.watch import Receipt

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/metrics.md").read_text()
SOURCES = {path: path.read_text() for path in (ROOT / "pdserve").rglob("*.py")}


@dataclass(frozen=True)
class Documented:
    type: str
    labels: set[str]
    of: set[str]
    meaning: str


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of the first table after it."""
    table = PAGE.split(f"# {heading}\n")[1].split("\n#")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    yield from ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])


def words(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


METRICS = {
    name.strip("`"): Documented(kind, words(labels), set(of.split(", ")), meaning)
    for name, kind, labels, of, meaning in rows("The metrics")
}


def _in_code() -> Iterator[tuple[str, str, set[str]]]:
    families: list[Metric] = list(
        SlotMetrics([SlotState("decode-0", Role.DECODE, "here", "ready")]).collect()
    )
    for family in families:
        yield family.name, family.type, set(family.samples[0].labels)
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            yield family.name, family.type, set(metric._labelnames)


def test_each_metric_is_in_the_table_and_nothing_else() -> None:
    there = {
        f"{name}_total" if kind == "counter" else name: (kind, labels) for name, kind, labels in _in_code()
    }
    assert len(there) > 20
    assert {name: (found.type, found.labels) for name, found in METRICS.items()} == there
    assert all(
        found.meaning and found.of <= {"frontend", "decode", "prefill", "serve", "all"}
        for found in METRICS.values()
    )


def test_metrics_are_made_in_one_place() -> None:
    """Which is what the table is held against."""
    made = r"\b(?:Counter|Gauge|Histogram|Summary|Info|Enum|\w+MetricFamily)\(\s*\"pdserve_"
    files = [path.name for path, source in SOURCES.items() if re.search(made, source)]
    assert files == ["metrics.py"]


def test_the_values_of_labels_are_told() -> None:
    """Of labels that are words of ours, not names of models, keys or processes."""
    names = {"model", "key", "code", "instance", "source", "slot", "host", "task", "worker"}
    for name, metric in METRICS.items():
        for label in metric.labels - names:
            assert f"`{label}`: `" in metric.meaning or "](#" in metric.meaning, f"{name}: which {label}?"


def test_each_reason_of_a_decision_is_in_its_table() -> None:
    written = {
        pair for source in SOURCES.values() for pair in re.findall(r'Decision\("(\w+)", "([\w-]+)"', source)
    }
    words = ("idle", "local-cheaper", "own", "fallback", "transfer", "stand-in")
    conditional = {("local", word) for word in words}
    listed = {(mode, reason.strip("`")) for mode, reason, _ in rows("Where prompts are computed, and why")}
    assert len(written) > 10
    assert listed == written | conditional
    assert all(f'"{reason}"' in "".join(SOURCES.values()) for _, reason in conditional)


def test_each_reason_of_a_failure_is_in_its_table() -> None:
    source = "".join(SOURCES.values())
    written = set(re.findall(r'(?:PrefillFailed\(\s*[\w.]+,|NoHandle\()\s*"([\w-]+)"', source))
    written |= set(re.findall(r'failed\(request, f?"([\w-]+): ', source))
    for constants in re.findall(r"^(?:TIMEOUT|GONE|UNREACHABLE), .*= (.*)$", source, re.M):
        written |= set(re.findall(r'"([\w-]+)"', constants))
    written |= {
        word for pair in re.findall(r'NoHandle\("([\w-]+)" if .* else "([\w-]+)"', source) for word in pair
    }
    listed = {word for reasons, _ in rows("Why remote prefills fail") for word in words(reasons)}
    assert len(written) > 12
    assert listed == written


def test_a_receipts_reason_is_explained_here() -> None:
    assert "docs/metrics.md" in SOURCES[ROOT / "pdserve/watch.py"]
    assert "reason" in Receipt.__struct_fields__
