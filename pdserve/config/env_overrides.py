"""Replaces keys of the file by environment variables."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pdserve.config.files.yaml_tree import Entry

VARIABLES = {
    "PDSERVE_HOST": "Graph.host",
    "PDSERVE_NATS": "Graph.nats",
    "PDSERVE_ETCD": "Graph.etcd",
    "PDSERVE_STATE_DIR": "Graph.state-dir",
    "PDSERVE_KV_PORT": "Graph.kv-port",
    "PDSERVE_STREAM_PORT": "Graph.stream-port",
    "PDSERVE_PAGES_PORT": "Graph.pages-port",
    "PDSERVE_FRONTEND_HOST": "Frontend.host",
    "PDSERVE_FRONTEND_PORT": "Frontend.port",
    "PDSERVE_BATCHES": "Frontend.batches",
    "PDSERVE_KV_OFFLOAD_FOLDER": "VllmWorker.kv-offload-folder, PrefillWorker.kv-offload-folder",
    "PDSERVE_CREDENTIALS": "Security.credentials",
    "PDSERVE_TLS_CERTIFICATE": "Security.tls-certificate",
    "PDSERVE_TLS_KEY": "Security.tls-key",
    "PDSERVE_ALLOW": "Security.allow",
}
"""Variable -> the keys that it replaces. An empty variable counts as not set."""
_ADDED = ("Graph", "Security")
"""Sections that a variable adds to a file without them. Any other section would start processes."""
_PATHS = ("_DIR", "_BATCHES", "_FOLDER", "_CREDENTIALS", "_TLS_CERTIFICATE", "_TLS_KEY")
"""Endings of variables that hold a path. A relative path counts from the working directory."""
_SERVICE_LINK = "tcp://"
"""For a Service named pdserve-frontend, Kubernetes sets PDSERVE_FRONTEND_PORT=tcp://... in pods."""


def with_environment(
    tree: Mapping[str, Entry], env: Mapping[str, str]
) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return the file's sections with the variables in place of their keys, and the variables used."""
    read = dict(tree)
    used = list[str]()
    for variable, place in [(name, place) for name in VARIABLES for place in VARIABLES[name].split(", ")]:
        section, _, key = place.partition(".")
        text = env.get(variable, "")
        linked = variable.endswith("_PORT") and text.startswith(_SERVICE_LINK)
        if not text or linked or (section not in _ADDED and section not in tree):
            continue
        entry = read.get(section, Entry(section, 0))
        if entry.value is None or isinstance(entry.value, dict):  # else SectionReader reports it
            own = Entry(f"Environment variable {variable}", 0, _value(variable, text))
            read[section] = replace(entry, value={}, children={**entry.children, key: own})
            used.append(f"{variable} ({place})")
    return read, tuple(used)


def _value(variable: str, text: str) -> object:
    if variable.endswith(_PATHS):
        return text if text.startswith("~") else str(Path.cwd() / text)
    if variable == "PDSERVE_ALLOW":
        return [each.strip() for each in text.split(",")]
    return int(text) if variable.endswith("_PORT") and text.isdecimal() else text
