"""docs/metrics.md lists exactly the metrics and reasons that are in the code."""

import re
from collections.abc import Iterator
from pathlib import Path

from tools.metrics import page

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text()
SOURCES = {path: path.read_text() for path in (ROOT / "pdserve").rglob("*.py")}


def rows(heading: str) -> Iterator[list[str]]:
    """Yield the rows of the first table below the heading."""
    table = PAGE.split(f"# {heading}\n")[1].split("\n#")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    yield from ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])


def words(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


METRICS = {
    name.strip("`"): (kind, words(labels), meaning) for name, kind, labels, _, meaning in rows("The metrics")
}


def test_the_table_equals_the_code() -> None:
    assert page() == PAGE, "run: python -m tools.metrics"
    assert len(METRICS) > 20
    roles = {of for _, _, _, of, _ in rows("The metrics")}
    assert roles == {"frontend", "frontend, decode", "decode", "prefill", "decode, prefill", "all", "serve"}


def test_the_values_of_labels_are_documented() -> None:
    """Labels whose values are names (of models, keys or processes) are left out."""
    names = {"model", "key", "code", "instance", "source", "slot", "host", "task", "worker", "folder"}
    for name, (_, labels, meaning) in METRICS.items():
        for label in labels - names:
            assert f"`{label}`: `" in meaning or "(below)" in meaning, f"{name}: which {label}?"


def test_each_reason_of_a_decision_is_in_its_table() -> None:
    written = {
        pair
        for source in SOURCES.values()
        for pair in re.findall(r'Decision\("(\w+)", (?:prefix or )?"([\w-]+)"', source)
    }
    policy = (ROOT / "pdserve/decode/policy/decision.py").read_text()
    written |= {("local", reason) for reason in re.findall(r'^ {8}"([\w-]+)": ', policy, re.M)}
    words = ("idle", "local-cheaper", "own", "fallback", "transfer", "stand-in")
    conditional = {("remote", "prefix-cached"), *(("local", word) for word in words)}
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
