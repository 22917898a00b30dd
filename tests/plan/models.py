"""Model folders without weights, and machines without hardware."""

import json
from pathlib import Path

from pdserve.plan.machine import GIB, Gpu, Machine

QWEN_14B = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
"""DeepSeek-R1-Distill-Qwen-14B"""
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
"""Mixtral-8x7B"""
MIXTRAL_BYTES = 93_405_585_408
QWEN_14B_BYTES = 29_540_067_328


def qwen_14b(folder: Path) -> Path:
    """Its config and safetensors index, as after a download that fetched no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN_14B))
    index = {
        "metadata": {"total_size": QWEN_14B_BYTES},
        "weight_map": {"lm_head.weight": "model-1.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_safetensors(path: Path, tensors: dict[str, tuple[str, int]], missing: int = 0) -> None:
    """Zeros, by hand: `tensors` are dtype and bytes by name; `missing` bytes are left out at the end."""
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
