"""LoRA adapters in an engine: their part of the engine contract, and what identifies one.

An adapter is known by a number made of its files, not by its name: a name may be given to other weights later, or to
others on another host. The engine's prefix cache, the names of prefixes (`contract/prefixes.py`) and the fingerprint of
KV have the number, so that KV of one adapter is never used for another, nor for the model itself."""

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

_ID = 15
"""hex digits: a number that fits vLLM's 64 bits, signed"""
_FILES = re.compile(r"adapter_(config\.json|model\..*)")
"""what vLLM reads of an adapter: of its weights, the file of the first format that it knows"""


class AdapterEngine(ABC):
    """Requests name their adapter in their body, by its number. `generate`, `prefill` and `prefix_hit` raise
    Unavailable where it is not loaded."""

    max_adapters: int
    """how many adapters it holds at once, so that none has to be read again; 0: none. Set when the engine is entered"""

    @abstractmethod
    async def load_adapter(self, id: int, folder: str) -> None:
        """Load an adapter between two steps; a second call for a number has no effect. Raises ConfigError where the
        engine refuses it: no weights, too high a rank, other modules than the model's."""

    @abstractmethod
    async def unload_adapter(self, id: int) -> bool:
        """Free the adapter's memory. Return False, without effect, while a request uses it."""

    @abstractmethod
    def kv_fingerprint(self, body: list[bytes]) -> str:
        """What a handle of this request's KV has to carry."""


def with_adapter(fingerprint: str, adapter: int) -> str:
    """The fingerprint of KV that was computed with an adapter; 0: without any."""
    return f"{fingerprint}+{adapter:x}" if adapter else fingerprint


def adapter_folder(name: str, path: str) -> str:
    """The adapter's folder on this host. Raises ConfigError, in vLLM's words."""
    folder = Path(os.path.expanduser(path)).absolute()  # of an unknown user: as it is
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError([f"Loading lora {name} failed: No adapter found for {path}"])
    return str(folder)


def adapter_id(folder: str, engine_args: Mapping[str, object]) -> int:
    """The number of the adapter that this folder holds now."""
    known = arguments()
    settings = {name: engine_args.get(name, known[name].default) for name in LORA_ARGUMENTS}
    paths = (path for path in Path(folder).iterdir() if _FILES.fullmatch(path.name) and path.is_file())
    files = {path.name: whole_digest(path) for path in paths}
    facts = json.dumps([files, settings], sort_keys=True, default=str)
    return int(hashlib.sha256(facts.encode()).hexdigest()[:_ID], 16) or 1
