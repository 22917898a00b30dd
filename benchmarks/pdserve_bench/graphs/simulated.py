"""The default graph of the benchmarks, with simulated engines."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMMON = {"model": "demo", "block-size": 32, "max-model-len": 4096}


def simulated(
    speed: Mapping[str, object] | None = None,
    *,
    decode: Mapping[str, object] | None = None,
    prefill: Mapping[str, object] | None = None,
    frontend: Mapping[str, object] | None = None,
    graph: Mapping[str, object] | None = None,
    common: Mapping[str, object] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the sections of a graph with simulated engines at `speed`, where prompts over 64 tokens are prefilled
    remotely. The other arguments add keys to their section."""
    shared = {**COMMON, **(common or {})}
    worker: dict[str, object] = {"engine": "sim", "common-configs": list(shared)}
    if speed:
        worker["additional-config"] = {"sim": dict(speed)}
    remote = {"remote-prefill": True, "max-local-prefill-length": 64}
    sections = {
        "Common": shared,
        "Frontend": {"served_model_name": "demo", **(frontend or {})},
        "VllmWorker": {**worker, **remote, **(decode or {})},
        "PrefillWorker": {**worker, **(prefill or {})},
    }
    return sections | ({"Graph": dict(graph)} if graph else {})


def write(sections: Mapping[str, object], file: Path) -> Path:
    """Write JSON, which is valid YAML."""
    file.write_text(json.dumps(sections, indent=2))
    return file
