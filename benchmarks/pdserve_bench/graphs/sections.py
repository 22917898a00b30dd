"""Change the user's file into the file of another graph on the same hardware. Only `read_sections` reads files.

Keys are found in either spelling (`served_model_name`, `served-model-name`) and written in kebab-case.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.config.engine_args.arguments import arguments
from pdserve.config.files.yaml_tree import Findings, read_tree
from pdserve.config.schema import kebab
from pdserve.contract.live_settings import THRESHOLDS

Sections = dict[str, dict[str, Any]]

_OF_REMOTE_PREFILL = ("remote-prefill", "conditional-disagg", "policy", *THRESHOLDS, "kv-transfer-config")


@dataclass(frozen=True)
class Shape:
    """The workers of a derived graph."""

    prefill: int
    """Prefill workers; 0: aggregated."""
    decode: int
    """Decode workers; in an aggregated graph, all engines."""
    batch: int = 0
    """max-num-batched-tokens of aggregated engines; 0: the file's."""
    tensor: tuple[int, int] = (0, 0)
    """tensor-parallel-size of prefill and decode workers; 0: the file's."""


def read_sections(file: Path) -> Sections:
    """Raises ConfigError."""
    tree = read_tree(file, Findings(file))
    return {name: copy.deepcopy(dict(entry.value or {})) for name, entry in tree.items()}  # type: ignore[call-overload]


def with_model(sections: Sections, model: str) -> Sections:
    """Set the model in all sections that have one: a relative path would be wrong in a file elsewhere."""
    found = copy.deepcopy(sections)
    for section in found.values():
        if any(kebab(name) == "model" for name in section):
            put(section, "model", model)
    return found


def reshape(base: Sections, shape: Shape) -> Sections:
    """Return `base`, which has a VllmWorker, with the shape's workers. If it has no PrefillWorker, the VllmWorker is
    copied."""
    sections = copy.deepcopy(base)
    decode = sections["VllmWorker"]
    prefill = sections.pop("PrefillWorker", None)
    if shape.prefill:
        prefill = prefill if prefill is not None else _like(decode)
        sections["PrefillWorker"] = prefill
        put(decode, "remote-prefill", True)
        _resize(prefill, shape.prefill, shape.tensor[0])
    else:
        for key in _OF_REMOTE_PREFILL:
            take(decode, key)
            _unlist(decode, key)
        if shape.batch:
            put(decode, "max-num-batched-tokens", shape.batch)
    _resize(decode, shape.decode, shape.tensor[1])
    _prune_common(sections)
    return sections


def take(section: dict[str, Any], key: str) -> Any:
    """Remove a key and return its value; None if it is absent."""
    for name in list(section):
        if kebab(name) == key:
            return section.pop(name)
    return None


def put(section: dict[str, Any], key: str, value: object) -> None:
    take(section, key)
    section[key] = value


def _like(decode: Mapping[str, Any]) -> dict[str, Any]:
    section = copy.deepcopy(dict(decode))
    for key in _OF_REMOTE_PREFILL[:-1]:
        take(section, key)
    for name in list(section):
        known = arguments().get(kebab(name))
        if (
            known is not None and known.group == "api"
        ):  # for HTTP responses, which prefill workers do not send
            del section[name]
    return section


def _resize(section: dict[str, Any], workers: int, tensor: int) -> None:
    """Set the number and size of workers. Unpin their GPUs if either changes."""
    service = dict(take(section, "ServiceArgs") or {})
    resources = dict(take(service, "resources") or {})
    if tensor:
        put(section, "tensor-parallel-size", tensor)
        if "gpu" in resources:
            resources["gpu"] = tensor
    if tensor or service.get("workers", 1) != workers:
        take(resources, "gpu-ids")
    if resources:
        service["resources"] = resources
    section["ServiceArgs"] = {**service, "workers": workers}


def _unlist(section: dict[str, Any], key: str) -> None:
    """Remove the key from the section's common-configs."""
    for name, listed in section.items():
        if kebab(name) == "common-configs":
            section[name] = [entry for entry in listed if kebab(str(entry)) != key]


def _prune_common(sections: Sections) -> None:
    """Remove keys of Common that no section lists, because unlisted keys are errors."""
    common = sections.get("Common")
    if common is None:
        return
    listed = {
        kebab(str(entry))
        for section in sections.values()
        for name, entries in section.items()
        if kebab(name) == "common-configs"
        for entry in entries
    }
    for name in list(common):
        if kebab(name) not in listed:
            del common[name]
