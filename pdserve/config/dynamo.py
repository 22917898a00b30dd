"""Reads what files of Dynamo 0.1 to 0.3 (`dynamo serve -f FILE`) have and pdserve has not.

Sections and keys without a meaning here are dropped, each with a note; a few have another name. In a file that is
Dynamo's for certain, what Dynamo itself ignored is dropped with a note too; elsewhere it stays, and is an error.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pdserve.config.removed import removed
from pdserve.config.tree import Entry, Findings

_SECTIONS = {
    "Router": "the frontends route by Processor.router.",
    "Planner": "the number of workers does not change by itself (docs/kubernetes.md has autoscaling).",
}
_MOCKS = {"MockVllmWorker": "VllmWorker", "MockPrefillWorker": "PrefillWorker"}
_WORKERS = ("VllmWorker", "PrefillWorker")
_ENDPOINTS = ("endpoint", "endpoint-chat", "endpoint-completion", "endpoint-completions")
_ROUTING = "it is of Dynamo's router; frontends choose a worker themselves."
_EVERYWHERE = {
    "min-workers": "frontends serve as soon as there is a worker.",
    "model-name": "Frontend.served-model-name names the model.",
    "router-num-threads": _ROUTING,
    "custom-router": _ROUTING,
    "priority-queue": "the prefill queue is fair by itself.",
    "prompt-template": "the model's own chat template is used, or chat-template.",
    "ServiceArgs.resources.cpu": "processes share the CPUs of their host.",
    "ServiceArgs.resources.memory": "processes share the memory of their host.",
    "ServiceArgs.worker-env": "workers have the environment that `serve` has: set the variables there.",
    "ServiceArgs.envs": "workers have the environment that `serve` has: set the variables there.",
    "ServiceArgs.environment": "workers have the environment that `serve` has: set the variables there.",
}
_DISAGGREGATION = dict.fromkeys(
    ("remote-prefill", "conditional-disagg", "max-local-prefill-length", "max-prefill-queue-size"),
    "the decode workers (VllmWorker) decide where a prompt is prefilled.",
)
_HERE = {
    "Frontend": dict.fromkeys(_ENDPOINTS, "the frontend finds its workers in etcd.")
    | {"model": "the frontend serves the model of its workers."},
    "Processor": {},
    "VllmWorker": {},
    "PrefillWorker": {},
}
"""section -> its keys that have no meaning here in any file, and the reason"""
_IGNORED_BY_DYNAMO = {"Processor": _DISAGGREGATION, "PrefillWorker": _DISAGGREGATION}
_ROUTERS = {"random": "round-robin", "kv-load": "least-loaded"}
"""policies of Dynamo's router -> the nearest one here"""


def from_dynamo(tree: Mapping[str, Entry], findings: Findings) -> dict[str, Entry]:
    """The sections as pdserve reads them. What is dropped or renamed is in the findings' notes."""
    certain = is_dynamo(tree)
    read: dict[str, Entry] = {}
    for name, entry in tree.items():
        if name in _SECTIONS:
            findings.note(entry, f" has no meaning here: {_SECTIONS[name]}")
        elif name in _MOCKS and _MOCKS[name] not in tree:
            findings.note(entry, f" means {_MOCKS[name]} with engine: sim.")
            simulated = {"engine": Entry(f"{name}.engine", 0, "sim")} | dict(entry.children)
            read[_MOCKS[name]] = replace(entry, value={}, children=simulated)
        else:
            read[name] = entry
    _move_router(read, findings)
    for name in _HERE.keys() & read.keys():
        ignored = _IGNORED_BY_DYNAMO.get(name, {}) if certain else {}
        read[name] = _without(read[name], _HERE[name] | _EVERYWHERE | ignored, findings)
    if certain:
        _drop_unlisted(read, findings)
        for name in read.keys() & {*_WORKERS, "Processor", "Common"}:
            read[name] = _without_removed(read[name], findings)
    return read


def is_dynamo(tree: Mapping[str, Entry]) -> bool:
    """Whether the file is Dynamo's for certain: pdserve's own files have none of these."""
    frontend = tree["Frontend"].children if "Frontend" in tree else {}
    connectors = [section.children.get("kv-transfer-config") for section in tree.values()]
    return (
        not tree.keys().isdisjoint((*_SECTIONS, *_MOCKS))
        or not frontend.keys().isdisjoint(_ENDPOINTS)
        or any("DynamoNixlConnector" in json.dumps(found.value, default=str) for found in connectors if found)
    )


def _without(entry: Entry, keys: Mapping[str, str], findings: Findings, above: str = "") -> Entry:
    """The entry without these keys, which may stand in mappings inside it."""
    kept = {}
    for name, child in entry.children.items():
        if reason := keys.get(above + name):
            findings.note(child, f" has no meaning here: {reason}")
        else:
            kept[name] = _without(child, keys, findings, f"{above}{name}.") if child.children else child
    return replace(entry, children=kept)


def _without_removed(entry: Entry, findings: Findings) -> Entry:
    """The entry without arguments that vLLM took then, and that changed no answer."""
    gone = {name: found for name in entry.children if (found := removed(name)) and not found.instead}
    reasons = {name: f"vLLM has it no more since {found.since}." for name, found in gone.items()}
    return _without(entry, reasons, findings)


def _listed(section: Entry | None) -> list[str]:
    """The keys of Common that apply to the section, in kebab-case."""
    entry = section.children.get("common-configs") if section else None
    names = entry.value if entry and isinstance(entry.value, list) else []
    return [name.replace("_", "-") for name in names if isinstance(name, str)]


def _list_only(section: Entry, names: Iterable[str]) -> Entry:
    listed = section.children["common-configs"]
    return replace(section, children={**section.children, "common-configs": replace(listed, value=[*names])})


def _move_router(read: dict[str, Entry], findings: Findings) -> None:
    """Give the Processor the `router` of a worker, or of Common where a worker lists it: Dynamo had it in both."""
    common = read["Common"].children if "Common" in read else {}
    processor = read.get("Processor")
    own = processor.children.get("router") if processor else None
    own = own or (common.get("router") if "router" in _listed(processor) else None)
    for name in _WORKERS:
        if (section := read.get(name)) is None:
            continue
        listed = _listed(section)
        found = section.children.get("router") or (common.get("router") if "router" in listed else None)
        if found is None:
            continue
        if own is None:
            own = found
            findings.note(found, " means Processor.router here.")
        elif found is not own:
            findings.note(found, f" has no meaning here: frontends route, by {own.path}: {own.value}.")
        section = replace(
            section, children={key: child for key, child in section.children.items() if key != "router"}
        )
        read[name] = (
            _list_only(section, [key for key in listed if key != "router"]) if "router" in listed else section
        )
    if own is None:
        return
    if isinstance(own.value, str) and own.value in _ROUTERS:
        findings.note(own, f": {own.value} means {_ROUTERS[own.value]} here.")
        own = replace(own, value=_ROUTERS[own.value])
    processor = processor or Entry("Processor", own.line, {})
    if "router" in _listed(processor):
        processor = _list_only(processor, [key for key in _listed(processor) if key != "router"])
    read["Processor"] = replace(processor, value={}, children={**processor.children, "router": own})
    if "router" in common:
        rest = {key: child for key, child in common.items() if key != "router"}
        read["Common"] = replace(read["Common"], children=rest)


def _drop_unlisted(read: dict[str, Entry], findings: Findings) -> None:
    """Dynamo ignored a key of Common that no section lists, and a listed one that Common does not have."""
    common = read["Common"].children if "Common" in read else {}
    everything = {name for section in read.values() for name in _listed(section)}
    for name, entry in common.items():
        if name not in everything:
            findings.note(entry, " has no effect: no section lists it in its common-configs.")
    if common:
        kept = {name: entry for name, entry in common.items() if name in everything}
        read["Common"] = replace(read["Common"], children=kept)
    for name, section in read.items():
        absent = [key for key in _listed(section) if key not in common]
        if absent:
            listed = section.children["common-configs"]
            findings.note(listed, f" lists {', '.join(absent)}, which Common does not have: no effect.")
            read[name] = _list_only(section, [key for key in _listed(section) if key in common])
