"""Makes NIXL importable for vLLM, whichever wheel is installed, and keeps idle NIXL agents from using a core.

vLLM imports `nixl`, an empty wheel that depends on the CUDA-specific wheels. pdserve installs one of those directly;
they also work on host memory without CUDA."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
PAUSE_MICROSECONDS = 1000


def provide_nixl() -> None:
    """Make `nixl` and its `_api` and `_bindings` importable. Must run before vLLM's connector is imported."""
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM would: UCX leaks memory without it
    if "nixl" in sys.modules or importlib.util.find_spec("nixl"):
        return
    for package in PACKAGES[1:]:
        if importlib.util.find_spec(package):
            for name in ("", "._bindings", "._api"):
                sys.modules[f"nixl{name}"] = importlib.import_module(f"{package}{name}")
            return
    raise ImportError(f"NIXL is not installed: none of {', '.join(PACKAGES)} can be found")


@contextmanager
def quiet_agents(pause: int = PAUSE_MICROSECONDS) -> Iterator[None]:
    """Give NIXL agents that are created in this block a progress thread that sleeps between two polls.

    NIXL's Python API (1.5) always sets this pause (`pthrDelay`) to 0, so that an idle agent uses most of a core. With a
    millisecond it uses 2 %, at the same bandwidth. A wrapper in place of the API's private `nixlBind` sets it."""
    api: Any = importlib.import_module("nixl._api")
    real = api.nixlBind

    class Bindings:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        @staticmethod
        def nixlAgent(name: str, config: Any) -> Any:
            config.pthrDelay = pause
            return real.nixlAgent(name, config)

    api.nixlBind = Bindings()
    try:
        yield
    finally:
        api.nixlBind = real


@contextmanager
def affinity_kept() -> Iterator[None]:
    """Restore this thread's CPU affinity after the block."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
