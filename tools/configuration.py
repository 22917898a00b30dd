"""Write `docs/configuration.md` from what the loader reads and what its schema says of it. Run it when a key comes,
goes or changes: `python -m tools.configuration`."""

import ast
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pdserve.config import owned, schema
from pdserve.config.arguments import arguments
from pdserve.config.keys import Keys
from pdserve.config.load import load

PAGE = Path(__file__).parent.parent / "docs/configuration.md"
EVERY_SECTION = """\
Frontend: {}
Processor: {}
VllmWorker: {model: demo, remote-prefill: true}
PrefillWorker: {model: demo}
Graph: {}
"""
_CLASSES = {
    "Frontend": ("FrontendConfig", "AdmissionLimits", "Config"),
    "Processor": ("FrontendConfig",),
    "VllmWorker": ("DecodeConfig", "WorkerConfig"),
    "PrefillWorker": ("WorkerConfig",),
    "Graph": ("Config",),
}
"""whose attributes the keys of a section become"""
_FIELDS = {
    "Frontend.ServiceArgs.workers": "processes",
    "Processor.ServiceArgs.workers": "processes",
    "ServiceArgs.workers": "count",
    "ServiceArgs.resources.gpu": "gpus",
    "ServiceArgs.resources.gpu-ids": "gpu_ids",
}
"""where the attribute has another name than the key"""
_UNSTORED = {
    "common-configs": (
        "list of keys",
        "keys of `Common` that count in this section where it does not set them",
    ),
    "endpoint": ("text", "read and not needed: workers are found in etcd"),
    "Frontend.ServiceArgs.resources.gpu": ("0", "a frontend needs none; Dynamo's files say so"),
    "Processor.ServiceArgs.resources.gpu": ("0", "as in Frontend"),
}
"""keys that no attribute keeps: type and meaning"""
_TAKEN = {"gpu": "whole number, 0 or more", "gpu-ids": "list of GPU numbers"}
"""types of what the loader checks by itself"""


@dataclass(frozen=True)
class Key:
    section: str
    name: str
    """with what it is inside of, as in `ServiceArgs.workers`"""
    kind: str
    default: object
    unit: str = ""
    meaning: str = ""


def _explained(key: Key) -> Key:
    """With the text of the schema, whose first word is the unit where `;` follows it."""
    names = (f"{key.section}.{key.name}", key.name)
    for name in names:
        if name in _UNSTORED:
            return replace(key, meaning=_UNSTORED[name][1])
    field = next((_FIELDS[name] for name in names if name in _FIELDS), key.name.replace("-", "_"))
    texts = _docstrings()
    text = next((texts[each, field] for each in _CLASSES[key.section] if (each, field) in texts), "")
    unit, found, meaning = text.partition("; ")
    number = key.kind.split(",")[0] in ("number", "whole number")
    return replace(key, unit=unit, meaning=meaning) if found and number else replace(key, meaning=text)


def read_keys() -> list[Key]:
    """Every key that the loader asks for in a file with all sections, in its order."""
    found: dict[tuple[str, str], Key] = {}

    def note(keys: Keys, name: str, kind: str, default: object) -> None:
        section, _, inside = keys.path.partition(".")
        full = f"{inside}.{name}" if inside else name
        found[section, full] = Key(section, full, kind, default)

    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for method, kind in _KINDS.items():
            stack.enter_context(patch.object(Keys, method, _noting(getattr(Keys, method), kind, note)))
        path = Path(folder, "graph.yaml")
        path.write_text(EVERY_SECTION)
        load(path, {})
    mappings = {(each.section, each.name.rpartition(".")[0]) for each in found.values()}
    return [_explained(key) for place, key in found.items() if place not in mappings]


def _noting(
    method: Callable[..., Any], kind: Callable[..., str], note: Callable[..., None]
) -> Callable[..., Any]:
    signature = inspect.signature(method)

    def wrapper(self: Keys, *args: Any, **named: Any) -> Any:
        asked = signature.bind(self, *args, **named)
        asked.apply_defaults()
        given = dict(asked.arguments)
        result = method(self, *args, **named)  # first, because it takes the entry, which notes it too
        note(self, given["name"], kind(**{**given, "self": None}), given.get("default"))
        return result

    return wrapper


def _taken(name: str, **_: object) -> str:
    return _TAKEN.get(name) or _UNSTORED.get(name, ("",))[0]


def _whole(minimum: int, maximum: int | None, **_: object) -> str:
    if minimum == maximum:
        return str(minimum)
    return f"whole number, {minimum} {'or more' if maximum is None else f'to {maximum}'}"


_KINDS: dict[str, Callable[..., str]] = {
    "take": _taken,
    "text": lambda **_: "text",
    "integer": _whole,
    "seconds": lambda zero, **_: f"number, {'0 or more' if zero else 'above 0'}",
    "flag": lambda **_: "true or false",
    "choice": lambda valid, **_: f"one of {', '.join(valid)}",
}


def _docstrings() -> dict[tuple[str, str], str]:
    """Of the schema's attributes: the text that stands below each."""
    found = {}
    for block in ast.parse(inspect.getsource(schema)).body:
        if isinstance(block, ast.ClassDef):
            for line, below in zip(block.body, block.body[1:], strict=False):
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    text = ast.get_docstring(ast.Module([below], []))
                    found[block.name, line.target.id] = " ".join((text or "").split())
    return found


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield "Every key of every section; generated from the loader and its schema by `python -m tools.configuration`."
    yield "`snake_case` and `kebab-case` mean the same. A mistake in a file is answered with its line and what to do."
    yield ""
    yield "`Common` has no keys of its own: each key in it counts in the sections whose `common-configs` lists it."
    keys = read_keys()
    for section in dict.fromkeys(key.section for key in keys):
        yield from (
            "",
            f"## {section}",
            "",
            "| key | type | default | unit | meaning |",
            "|---|---|---|---|---|",
        )
        for key in keys:
            if key.section == section:
                yield f"| `{key.name}` | {key.kind} | {_shown(key.default)} | {key.unit} | {_cell(key.meaning)} |"
        yield from ("", _NOTES[section]) if section in _NOTES else ()
    yield from ("", "## vLLM arguments that are refused", "", "| argument | because it |", "|---|---|")
    for name, reason in _refused():
        yield f"| `{name}` | {_cell(reason)} |"


_NOTES = {
    "Processor": "Here also: arguments of vLLM's OpenAI server that shape answers, such as chat templates and parsers.",
    "VllmWorker": "Here also: `model` (`demo`, a folder, relative to the file or absolute, or a hub id) and\n"
    "any argument of vLLM's engine, without its dashes, checked against vLLM's own list.",
    "PrefillWorker": "Here also: what VllmWorker may have of vLLM's arguments, but for those that shape answers.",
    "Graph": "`PDSERVE_NATS`, `PDSERVE_ETCD` and `PDSERVE_STATE_DIR` in the environment win over the file.",
}


def _refused() -> Iterator[tuple[str, str]]:
    """Arguments with one reason stand together."""
    reasons: dict[str, list[str]] = {}
    for name in sorted(arguments()):
        if reason := owned.reason(name):
            reasons.setdefault(reason, []).append(name)
    for reason, names in sorted(reasons.items(), key=lambda each: each[1]):
        yield "`, `".join(names), reason


def _shown(default: object) -> str:
    if default in (None, ""):
        return ""
    text = str(default).lower() if isinstance(default, bool) else default
    return f"`{text:,g}`" if isinstance(text, float) else f"`{text}`"


def _cell(text: str) -> str:
    return re.sub(r"\|", r"\\|", text)


if __name__ == "__main__":
    PAGE.write_text(page())
