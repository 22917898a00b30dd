"""Make two LoRA adapters for the demo model: `python -m tools.demo_model.adapters OUT` takes a second.

Their weights are random, from fixed seeds, so their text makes no sense. The two adapters and the plain model differ
in tokens and in the KV of every layer, so that KV of the wrong adapter changes the tokens."""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from pdserve.demo import MODEL_DIR

NAMES = ("red", "blue")
RANK = 8
STRENGTH = 0.07
"""Standard deviation of both LoRA factors."""


def make(out: Path) -> dict[str, Path]:
    """Write the adapters; return their folders by name."""
    config = json.loads((MODEL_DIR / "config.json").read_text())
    return {name: _make_one(out / name, seed, config) for seed, name in enumerate(NAMES)}


def _make_one(folder: Path, seed: int, config: dict[str, int]) -> Path:
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = width // heads * config["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, kv),
        "self_attn.v_proj": (width, kv),
    }
    sizes |= {"self_attn.o_proj": (width, width), "mlp.down_proj": (inner, width)}
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (wide, high) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            weights[f"{name}.lora_A.weight"] = STRENGTH * torch.randn(RANK, wide, generator=random)
            weights[f"{name}.lora_B.weight"] = STRENGTH * torch.randn(high, RANK, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    modules = sorted(module.rpartition(".")[2] for module in sizes)
    about = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": modules,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2))
    return folder


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("out", type=Path)
    for name, folder in make(arguments.parse_args().out).items():
        print(f"{name}={folder}")
