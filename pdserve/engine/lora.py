"""LoRA adapters: their part of the engine contract, and how an adapter is identified.

The id of an adapter is a hash of its files and the engine's LoRA settings, because its name may later, or on another
host, stand for other weights. Names of prefixes (`contract/prefixes.py`) and KV fingerprints depend on the id, so that
KV of one adapter is never used for another, nor for the base model."""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from pdserve.config.engine_args.arguments import arguments
from pdserve.config.lora_modules import LORA_ARGUMENTS
from pdserve.engine.fingerprint import whole_digest
from pdserve.util.errors import ConfigError

_ID_DIGITS = 15
"""Hex digits of an id, so that it fits vLLM's signed 64 bits."""
_FILES = re.compile(r"adapter_(config\.json|model\..*)")
"""Files that vLLM reads of an adapter."""


class AdapterEngine(ABC):
    """Requests have the id of their adapter in their body. `generate` and `prefill` raise Unavailable if it is not
    loaded."""

    max_adapters: int
    """Adapters that it holds in memory at once; 0: none. Set when the engine is entered."""

    @abstractmethod
    async def load_adapter(self, id: int, folder: str) -> None:
        """Load an adapter between two steps; loading it again has no effect. Raises ConfigError if the engine refuses
        it."""

    @abstractmethod
    async def unload_adapter(self, id: int) -> bool:
        """Free the adapter's memory. Return False, without effect, while a request uses it."""

    @abstractmethod
    def kv_fingerprint(self, body: list[bytes]) -> str:
        """The fingerprint that a handle of this request's KV must have."""


def with_adapter(fingerprint: str, adapter: int) -> str:
    """The fingerprint of KV that was computed with this adapter; 0: without one."""
    return f"{fingerprint}+{adapter:x}" if adapter else fingerprint


def adapter_folder(name: str, path: str) -> str:
    """The adapter's folder on this host. Raises ConfigError, in vLLM's words."""
    folder = Path(os.path.expanduser(path)).absolute()  # "~unknown" stays as it is
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError([f"Loading lora {name} failed: No adapter found for {path}"])
    return str(folder)


def adapter_id(folder: str, engine_args: Mapping[str, object]) -> int:
    """The id of the adapter that is in this folder now."""
    known = arguments()
    settings = {name: engine_args.get(name, known[name].default) for name in LORA_ARGUMENTS}
    paths = (path for path in Path(folder).iterdir() if _FILES.fullmatch(path.name) and path.is_file())
    files = {path.name: whole_digest(path) for path in paths}
    facts = json.dumps([files, settings], sort_keys=True, default=str)
    return int(hashlib.sha256(facts.encode()).hexdigest()[:_ID_DIGITS], 16) or 1
