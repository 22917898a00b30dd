"""Reads a worker's LoRA adapters (`lora-modules`), and how many its engine holds."""

from collections.abc import Mapping

LORA_ARGUMENTS = (
    "enable-mixed-moe-lora-format",
    "enable-moe-shared-loras",
    "enable-tower-connector-lora",
    "lora-dtype",
    "lora-target-modules",
)
"""Engine arguments that change what an engine computes with an adapter."""


def adapter_capacity(engine_args: Mapping[str, object]) -> int:
    """Return how many adapters an engine with these arguments holds."""
    capacity = engine_args.get("max-cpu-loras") or engine_args.get("max-loras", 1)
    return int(str(capacity)) if engine_args.get("enable-lora") else 0


def static_adapters(engine_args: Mapping[str, object]) -> dict[str, str]:
    """Return adapter name -> folder. The file has `name=path`, or a mapping with name and path."""
    found = {}
    for module in engine_args.get("lora-modules", ()):  # type: ignore[attr-defined]
        if isinstance(module, Mapping):
            found[str(module.get("name", ""))] = str(module.get("path", ""))
        else:
            name, _, path = str(module).partition("=")
            found[name] = path
    return found
