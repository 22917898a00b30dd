"""Reads a file of Dynamo 0.1 to 0.3 (`dynamo serve -f FILE`) as a graph of pdserve.

Sections and keys that only Dynamo has are renamed or dropped, each with a note. In any other file they are errors.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pdserve.config.engine_args.arguments import canonical, shapes_response
from pdserve.config.engine_args.removed import removed
from pdserve.config.files.yaml_tree import Entry, Findings

Section = dict[str, Entry]
_ROUTES = "frontends choose a worker themselves, by Processor.router."
_SECTIONS = {
    "Router": _ROUTES,
    "SimpleLoadBalancer": _ROUTES,
    "Planner": "the number of workers does not change by itself (docs/kubernetes.md has autoscaling).",
    "Prometheus": "pdserve starts no Prometheus; docs/watching.md says what to scrape.",
}
_OTHER_NAMES = {
    "MockVllmWorker": "VllmWorker",
    "MockPrefillWorker": "PrefillWorker",
    "VllmDecodeWorker": "VllmWorker",
    "VllmPrefillWorker": "PrefillWorker",
}
_WORKERS = ("VllmWorker", "PrefillWorker")
_ENVIRONMENT = "workers have the environment that `serve` has: set the variables there."
_KEYS = {
    "min-workers": "frontends serve as soon as there is a worker.",
    "model-name": "Frontend.served-model-name names the model.",
    "router-num-threads": _ROUTES,
    "custom-router": _ROUTES,
    "priority-queue": "the prefill queue is fair by itself.",
    "prompt-template": "the model's own chat template is used, or chat-template.",
    "enable-disagg": "prompts are prefilled remotely where there is a PrefillWorker.",
    "ServiceArgs.resources.cpu": "processes share the CPUs of their host.",
    "ServiceArgs.resources.memory": "processes share the memory of their host.",
    "ServiceArgs.worker-env": _ENVIRONMENT,
    "ServiceArgs.envs": _ENVIRONMENT,
    "ServiceArgs.environment": _ENVIRONMENT,
}
_ENDPOINTS = dict.fromkeys(
    ("endpoint", "endpoint-chat", "endpoint-completion", "endpoint-completions"),
    "the frontend finds its workers in etcd.",
)
_DISAGGREGATION = dict.fromkeys(
    ("remote-prefill", "conditional-disagg", "max-local-prefill-length", "max-prefill-queue-size"),
    "the decode workers (VllmWorker) decide where a prompt is prefilled.",
)
_KEYS_OF = {
    "Frontend": _ENDPOINTS | {"model": "the frontend serves the model of its workers."},
    "Processor": _DISAGGREGATION,
    "VllmWorker": {},
    "PrefillWorker": _DISAGGREGATION,
}
_ROUTERS = {"random": "round-robin", "kv-load": "least-loaded"}
"""Policies of Dynamo's router -> pdserve's nearest."""


def from_dynamo(tree: Mapping[str, Entry], findings: Findings) -> dict[str, Entry]:
    """Return the sections of a Dynamo file as pdserve reads them, with the keys of Common in the sections that list
    them. The findings get a note for each key that is dropped or renamed."""
    read, sections = dict(tree), _with_common(tree, findings)
    read.pop("Common", None)
    for name, why in _SECTIONS.items():
        if name in read:
            findings.note(read.pop(name), f" has no meaning here: {why}")
    for name, ours in _OTHER_NAMES.items():
        if name in read and ours not in read:
            _rename(name, ours, read, sections, findings)
    _move_to_others(read, sections, findings)
    for name in _KEYS_OF.keys() & read.keys():
        entry = replace(read[name], value={} if sections[name] else read[name].value, children=sections[name])
        read[name] = _without(entry, _KEYS | _KEYS_OF[name] | _removed(sections[name]), findings)
    return read


def is_dynamo(tree: Mapping[str, Entry]) -> bool:
    """Whether the file has a section or a key that only Dynamo has."""
    if not tree.keys().isdisjoint((*_SECTIONS, *_OTHER_NAMES)):
        return True
    keys = {section: set(_paths(entry)) for section, entry in tree.items()}
    connectors = (entry.children.get("kv-transfer-config") for entry in tree.values())
    return (
        not keys.get("Frontend", set()).isdisjoint(_ENDPOINTS)
        or any(not found.isdisjoint(_KEYS) for found in keys.values())
        or any("router" in keys.get(section, ()) for section in ("Common", *_WORKERS))
        or any("DynamoNixlConnector" in json.dumps(found.value, default=str) for found in connectors if found)
    )


def _paths(entry: Entry, above: str = "") -> Iterator[str]:
    for name, child in entry.children.items():
        yield above + name
        yield from _paths(child, f"{above}{name}.")


def _with_common(tree: Mapping[str, Entry], findings: Findings) -> dict[str, Section]:
    """Return the keys of each section: its own, which win, and those of Common that it lists. Keys of Common without
    effect get a note, as do listed keys that Common lacks."""
    common = dict(tree["Common"].children) if "Common" in tree else {}
    sections, used = {}, set[str]()
    for name, entry in tree.items():
        own = dict(entry.children)
        listed = own.get("common-configs")
        if name != "Common" and listed is not None and isinstance(listed.value, list):
            names = [str(key).replace("_", "-") for key in listed.value]
            if absent := [key for key in names if key not in common]:
                findings.note(listed, f" lists {', '.join(absent)}, which Common does not have: no effect.")
            own = {key: common[key] for key in names if key in common} | own
            own["common-configs"] = replace(listed, value=[])
            used |= {*names}
        sections[name] = own
    for name, entry in common.items():
        if name not in used:
            findings.note(entry, " has no effect: no section lists it in its common-configs.")
    return sections


def _rename(
    name: str, ours: str, read: dict[str, Entry], sections: dict[str, Section], findings: Findings
) -> None:
    mock = name.startswith("Mock")
    findings.note(read[name], f" means {ours}{' with engine: sim' * mock} here.")
    read[ours], sections[ours] = read.pop(name), sections.pop(name)
    if mock:
        sections[ours]["engine"] = Entry(f"{name}.engine", read[ours].line, "sim")
    elif ours == "VllmWorker" and "VllmPrefillWorker" in read:
        sections[ours]["remote-prefill"] = Entry(f"{name}.remote-prefill", read[ours].line, True)


def _move_to_others(read: dict[str, Entry], sections: dict[str, Section], findings: Findings) -> None:
    """Move the router to the Processor and the served name to the Frontend. Drop the Processor's engine arguments,
    unless the worker has the same value."""
    processor, frontend = sections.setdefault("Processor", {}), sections.setdefault("Frontend", {})
    for name in (*_WORKERS, "Processor"):
        section = sections.get(name, {})
        if (served := section.pop("served-model-name", None)) is not None:
            frontend.setdefault("served-model-name", served)
        router = section.pop("router", None) if name != "Processor" else None
        if router is not None and "router" not in processor:
            processor["router"] = router
            findings.note(router, " means Processor.router here.")
        elif router is not None and router is not processor["router"]:
            findings.note(router, f" has no meaning here: {processor['router'].path} does the routing.")
    if (chosen := processor.get("router")) is not None and str(chosen.value) in _ROUTERS:
        findings.note(chosen, f": {chosen.value} means {_ROUTERS[str(chosen.value)]} here.")
        processor["router"] = replace(chosen, value=_ROUTERS[str(chosen.value)])
    worker = sections.get("VllmWorker") or sections.get("PrefillWorker") or {}
    for name, entry in list(processor.items()):
        of_worker = name != "model" and canonical(name) == name and not shapes_response(name)
        if of_worker and (name not in worker or worker[name].value != entry.value):
            findings.note(processor.pop(name), " has no meaning here: set it in the worker's section.")
    for name, section in (("Processor", processor), ("Frontend", frontend)):
        if section:
            read.setdefault(name, Entry(name, next(iter(section.values())).line))
    frontend.pop("common-configs", None)


def _removed(section: Section) -> dict[str, str]:
    """Return arguments that vLLM has removed and that need no replacement."""
    gone = {name: found for name in section if (found := removed(name)) and not found.instead}
    return {name: f"vLLM removed it in {found.since}." for name, found in gone.items()}


def _without(entry: Entry, keys: Mapping[str, str], findings: Findings, above: str = "") -> Entry:
    """Return the entry without these keys, also in its mappings."""
    kept = {}
    for name, child in entry.children.items():
        if reason := keys.get(above + name):
            findings.note(child, f" has no meaning here: {reason}")
        else:
            kept[name] = _without(child, keys, findings, f"{above}{name}.") if child.children else child
    return replace(entry, children=kept)
