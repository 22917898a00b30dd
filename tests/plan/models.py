"""Model folders without weights, and machines without hardware."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.plan.machine import GIB, Gpu, Machine

FOLDERS = Path(__file__).parent / "families"
"""a folder per family, with the fields of a published config.json"""


def published(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDERS / name / "config.json").read_text()))


MIXTRAL = published("Mixtral-8x7B")
QWEN_14B = published("Qwen2.5-7B") | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
}
"""DeepSeek-R1-Distill-Qwen-14B"""
MIXTRAL_BYTES = 93_405_585_408
QWEN_14B_BYTES = 29_540_067_328


def without_weights(folder: Path, config: Mapping[str, object], size: int) -> Path:
    """Write config and safetensors index, as after a download without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": size}, "weight_map": {"lm_head.weight": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def qwen_14b(folder: Path) -> Path:
    return without_weights(folder, QWEN_14B, QWEN_14B_BYTES)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, int]], missing: int = 0) -> None:
    """Write zeros. `tensors`: name -> dtype and bytes; the last `missing` bytes are left out."""
    header, end = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end - missing))


def machine(*cards: tuple[str, int], cores: int = 8, ram: int = 64, build: str = "") -> Machine:
    """`cards` are names and GiB."""
    gpus = tuple(Gpu(index, name, size * GIB) for index, (name, size) in enumerate(cards))
    build = build or ("cuda" if cards else "cpu")
    return Machine(gpus, cores, ram * GIB, build)
