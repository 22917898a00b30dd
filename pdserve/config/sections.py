"""Reads a section of a file: keys from Common, its own keys by the schema, and vLLM arguments by vLLM's list."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from pdserve.config.engine_args.arguments import arguments, canonical, parse, refusal
from pdserve.config.engine_args.removed import removed
from pdserve.config.files.yaml_tree import Entry, Findings, did_you_mean
from pdserve.config.schema import (
    DecodeSection,
    FrontendSection,
    GraphSection,
    PrefillSection,
    ProcessorSection,
    Section,
    SecuritySection,
    SloSection,
    kebab,
)

S = TypeVar("S", bound=Section)

KINDS: dict[str, type[Section]] = {
    "Graph": GraphSection,
    "Frontend": FrontendSection,
    "Processor": ProcessorSection,
    "VllmWorker": DecodeSection,
    "PrefillWorker": PrefillSection,
    "Slo": SloSection,
    "Security": SecuritySection,
}
_CONNECTORS = ("DynamoNixlConnector", "NixlConnector")


@cache
def rules(section: str) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each of the section's own keys."""
    properties: dict[str, dict[str, Any]] = TypeAdapter(KINDS[section]).json_schema()["properties"]
    return properties


def must_be(rule: Mapping[str, Any]) -> str:
    """Put the rule into words, for errors and for `docs/configuration.md`."""
    if "is" in rule:
        return str(rule["is"])
    rule = rule.get("anyOf", [rule])[0]
    low, high = rule.get("minimum"), rule.get("maximum")
    match rule.get("type"):
        case "boolean":
            return "true or false"
        case "integer" if low == high:
            return str(low)
        case "integer":
            return f"a whole number, {low} {'or more' if high is None else f'to {high}'}"
        case "number":
            return "a number of seconds, 0 or more" if low == 0 else "a number of seconds above 0"
        case "string" if "enum" in rule:
            return f"one of: {', '.join(rule['enum'])}"
        case "string":
            return "a text"
        case _:
            return "anything"


@dataclass(frozen=True)
class SectionRead(Generic[S]):
    entry: Entry | None
    """None if the file does not have the section"""
    values: S
    """with defaults for keys that are missing or have a problem"""
    own: Mapping[str, Entry]
    args: dict[str, Entry]
    """vLLM arguments by canonical name, with their values as vLLM parses them"""


class SectionReader:
    """Reads the sections of a file. Problems go to `findings`, so that all are reported."""

    def __init__(self, tree: Mapping[str, Entry], findings: Findings) -> None:
        self._tree = tree
        self._findings = findings
        self._common = self._children(tree.get("Common"))
        self._listed: set[str] = set()

    def read(self, name: str, kind: type[S]) -> SectionRead[S]:
        entries = dict(self._children(self._tree.get(name)))
        if "common-configs" in rules(name) and "common-configs" in entries:
            entries = self._from_common(entries["common-configs"]) | entries
        own, others = self._split(entries, name)
        values, args = self._checked(own, name, kind), self._arguments(others, name)
        return SectionRead(self._tree.get(name), values, own, args)

    def check_common(self) -> None:
        """Report keys of Common that no section lists."""
        for name, entry in self._common.items():
            if name not in self._listed:
                text = f"has no effect: list {name} in the common-configs of a section, or remove it."
                self._findings.problem(entry, text)

    def _children(self, entry: Entry | None) -> Mapping[str, Entry]:
        """Return the entry's children; report a value that is neither a mapping nor empty."""
        if entry is None:
            return {}
        if entry.value is not None and not isinstance(entry.value, dict):
            self._findings.problem(entry, "must be a mapping: indent `key: value` lines under it.")
        return entry.children

    def _from_common(self, listed: Entry) -> dict[str, Entry]:
        """Return the keys of Common that a section's `common-configs` lists."""
        if not isinstance(listed.value, list) or not all(isinstance(name, str) for name in listed.value):
            self._findings.problem(listed, "must be a list of keys of Common, as in [model, block-size].")
            return {}
        entries = {}
        for written in listed.value:
            name = kebab(written)
            if name in self._common:
                entries[name] = self._common[name]
            else:
                hint = did_you_mean(name, self._common, f"add {name} to Common, or take it off the list.")
                self._findings.problem(listed, f"lists {written}, which Common does not have: {hint}")
        self._listed |= entries.keys()
        return entries

    def _split(
        self, entries: Mapping[str, Entry], section: str, above: str = ""
    ) -> tuple[dict[str, Entry], dict[str, Entry]]:
        """Return the section's own keys by full name (`ServiceArgs.workers`), and all other entries. `above`: the
        mapping around the entries, as `ServiceArgs.`; empty for the section itself."""
        own: dict[str, Entry] = {}
        others: dict[str, Entry] = {}
        for name, entry in entries.items():
            if name not in _names(section, above):
                others[name] = entry
            elif above + name in rules(section):
                own[above + name] = entry
            else:
                inside = f"{above}{name}."
                inner, unknown = self._split(self._children(entry), section, inside)
                own |= inner
                for key, mistake in unknown.items():
                    self._unknown(mistake, key, f"{section}.{inside[:-1]}", _names(section, inside))
        return own, others

    def _checked(self, own: Mapping[str, Entry], name: str, kind: type[S]) -> S:
        adapter, folder = TypeAdapter(kind), self._findings.path.parent
        values = {key: entry.value for key, entry in own.items()}
        try:
            return adapter.validate_python(values, context=folder)
        except ValidationError as error:
            for problem in error.errors():
                key = str(problem["loc"][0])
                values.pop(key, None)
                text = f"is {_shown(own[key].value)}, but must be {must_be(rules(name)[key])}."
                self._findings.problem(own[key], str(problem.get("ctx", {}).get("error", text)))
            return adapter.validate_python(values, context=folder)

    def _arguments(self, entries: Mapping[str, Entry], section: str) -> dict[str, Entry]:
        """Return the vLLM arguments among keys that are not the section's own, and report all other keys."""
        valid = arguments() if KINDS[section].takes_arguments else {}
        read: dict[str, Entry] = {}
        for key, entry in entries.items():
            name = canonical(key) if valid else None
            if name is None:
                self._unknown(entry, key, section, _names(section), valid)
            elif name == "kv-transfer-config":
                self._check_connector(entry)
            elif reason := refusal(name):
                self._findings.problem(entry, reason)
            elif other := read.get(name):
                text = f"is the same vLLM argument as {other.path} in line {other.line}: keep one of the two."
                self._findings.problem(entry, text)
            else:
                try:
                    read[name] = replace(entry, value=parse(name, entry.value))
                except ValueError as error:
                    self._findings.problem(entry, str(error))
        return read

    def _unknown(
        self, entry: Entry, name: str, owner: str, own: Iterable[str], beside: Iterable[str] = ()
    ) -> None:
        """Report an unknown key. `own` are the valid keys, `beside` vLLM's arguments if the section takes them."""
        if gone := removed(name) if beside else None:
            self._findings.problem(entry, gone.problem)
            return
        homes = [section for section in KINDS if name in _names(section)]
        if homes:
            home = " or ".join(filter(None, [", ".join(homes[:-1]), homes[-1]]))
            self._findings.problem(entry, f"is not a key of {owner}: move it to {home}.")
            return
        names = ", ".join(sorted(own, key=str.lower))
        hint = did_you_mean(name, [*own, *beside], f"remove it, or use one of: {names}.")
        nor = f"neither a key of {owner} nor a vLLM argument" if beside else f"not a key of {owner}"
        self._findings.problem(entry, f"is {nor}: {hint}")

    def _check_connector(self, entry: Entry) -> None:
        """Accept a kv-transfer-config that asks for what pdserve does anyway; report any other."""
        try:
            config = json.loads(entry.value) if isinstance(entry.value, str) else entry.value
        except ValueError as error:
            self._findings.problem(entry, f"is not JSON ({error}): remove it, pdserve sets it.")
            return
        config = config if isinstance(config, dict) else {}
        connector = config.get("kv_connector")
        if connector not in _CONNECTORS:
            text = "is set by pdserve, which moves KV blocks with its own NIXL connector over UCX: remove it."
            self._findings.problem(entry, text)
        elif extra := sorted(map(str, config.keys() - {"kv_connector", "kv_role"})):
            text = f"sets {', '.join(extra)}, but only kv_connector and kv_role may be set: remove it."
            self._findings.problem(entry, text)
        else:
            text = f": {connector} means pdserve's own NIXL connector, with the roles of this graph."
            self._findings.note(entry, text)


def _names(section: str, above: str = "") -> dict[str, None]:
    """Return the names of keys and mappings that the section, or its mapping `above`, may have."""
    keys = (key.removeprefix(above) for key in rules(section) if key.startswith(above))
    return dict.fromkeys(key.split(".")[0] for key in keys)


def _shown(value: object) -> str:
    return "empty" if value is None else repr(value)
