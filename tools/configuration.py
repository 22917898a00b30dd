"""Writes `docs/configuration.md` from the schema of the sections. Run it after each change of a key:
`python -m tools.configuration`."""

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter

from pdserve.config.env_overrides import VARIABLES
from pdserve.config.sections import KINDS, must_be, rules

PAGE = Path(__file__).parent.parent / "docs/configuration.md"
_HEAD = """\
# Configuration

Every key of every section of the YAML (generated from the schema by `python -m tools.configuration`).
`snake_case` and `kebab-case` mean the same. A mistake is reported with its line and what to do.

`Common` has no keys of its own: each key in it applies to the sections whose `common-configs` lists it."""
_NOTES = {
    "Processor": "Here also: arguments of vLLM's OpenAI server that shape answers, such as chat templates and parsers.",
    "VllmWorker": "Here also: `model` (`demo`, a folder, relative to the file or absolute, or a hub id) and\n"
    "any argument of vLLM's engine, without its dashes.",
    "PrefillWorker": "Here also: VllmWorker's arguments of vLLM, except those that shape answers.",
    "Slo": "[What the promise does](slo.md).",
    "Security": "A file that opens anything to other machines unprotected is refused, unless `allow` names it.",
}
_SHORT = re.compile("^an? |number of (?=seconds)")
"""what the column of types leaves out of `must_be`"""
_ENVIRONMENT = """
## Environment

For what differs by host. These win over the file; `plan` shows which are set.

| variable | in place of |
|---|---|"""
_BESIDE = """
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` and `OTEL_EXPORTER_OTLP_ENDPOINT` win over `Graph.otlp-endpoint`;
`PDSERVE_API_KEYS` adds to the file's keys; `PDSERVE_SIMULATED=1` [simulates all
engines](deployment.md#without-gpus-and-weights)."""


def _keys(section: str, kind: type) -> Iterator[str]:
    """Yield a row for each key. A key's docstring has the unit before `;` and the default after `not set:`."""
    attributes = TypeAdapter(kind).json_schema(by_alias=False)["properties"]
    texts = _docstrings(kind)
    for (name, rule), attribute in zip(rules(section).items(), attributes, strict=True):
        must, meaning = _SHORT.sub("", must_be(rule)).replace("whole number", "integer"), texts[attribute]
        unit, _, rest = meaning.partition("; ")
        unit, meaning = (unit, rest) if rest and " " not in unit else ("", meaning)
        meaning, _, otherwise = meaning.partition("; not set: ")
        yield f"| `{name}` | {must} | {_shown(rule.get('default'), unit) or otherwise} | {meaning} |"


def _docstrings(kind: type) -> dict[str, str]:
    """Return the text below each attribute of the section's class and its parents."""
    found: dict[str, str] = {}
    for parent in kind.__mro__[:-1]:
        body = ast.parse(inspect.getsource(parent)).body[0].body  # type: ignore[attr-defined]
        for line, below in pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                text = ast.get_docstring(ast.Module([below], []))
                found[line.target.id] = " ".join((text or "").split())
    return found


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    shown = list[str]()
    for section, kind in KINDS.items():
        rows = list(_keys(section, kind))
        yield from ("", f"## {section}", "")
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
        yield from (row for row in rows if row not in shown)
        if again := [row.split(" |")[0][2:] for row in rows if row in shown]:
            yield from ("", f"As above: {', '.join(again)}.")
        shown += rows
        yield from ("", _NOTES[section]) if section in _NOTES else ()
    yield _ENVIRONMENT
    yield from (f"| `{variable}` | `{place}` |" for variable, place in VARIABLES.items())
    yield _BESIDE


def _shown(default: object, unit: str) -> str:
    if default in (None, "", []):
        return ""
    shown = f"{default:,g}" if isinstance(default, float) else str(default).lower()
    return f"`{shown}` {unit}".rstrip()


if __name__ == "__main__":
    PAGE.write_text(page())
