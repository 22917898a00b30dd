"""The LoRA adapters that a worker's section names, and how many its engine holds."""

from collections.abc import Mapping

LORA_ARGUMENTS = (
    "enable-mixed-moe-lora-format",
    "enable-moe-shared-loras",
    "enable-tower-connector-lora",
    "lora-dtype",
    "lora-target-modules",
)
"""engine arguments that change what is computed with the same adapter"""


def adapter_capacity(engine_args: Mapping[str, object]) -> int:
    """How many adapters an engine with these arguments holds."""
    most = engine_args.get("max-cpu-loras") or engine_args.get("max-loras", 1)
    return int(str(most)) if engine_args.get("enable-lora") else 0


def static_adapters(engine_args: Mapping[str, object]) -> dict[str, str]:
    """Folder by name, of the adapters in a worker's section: `name=path`, or a mapping with name and path."""
    found = {}
    for module in engine_args.get("lora-modules", ()):  # type: ignore[attr-defined]
        if isinstance(module, Mapping):
            found[str(module.get("name", ""))] = str(module.get("path", ""))
        else:
            name, _, path = str(module).partition("=")
            found[name] = path
    return found
