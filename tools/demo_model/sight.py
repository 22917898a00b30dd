"""Make a vision-language model from the demo model: `python -m tools.demo_model.sight OUT` takes some seconds.

It is an Idefics3, because vLLM 0.32 needs torchvision for most other architectures (docs/decisions/0086). Its vision
tower is random and its text weights are the demo model's plus noise, both from fixed seeds. Its text makes no sense,
but for another image it has another first token. An image is 64 tokens and three marks."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pdserve.demo import MODEL_DIR

SIDE, PATCH, WIDTH, LAYERS = 112, 14, 64, 2
"""Pixels of an image's and of a patch's side; width and depth of the vision tower."""
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
ROOM = 64
"""Rows that MARKS add to the vocabulary, with padding."""
NOISE = 4.0
"""Noise added to the text matrices, in units of 1 / sqrt(columns). Without it the model ignores images."""
_OF_TEXT = "{%- set content = message.content | map(attribute='text') | join('') %}"
_OF_PARTS = (
    "{%- set content %}{%- for part in message.content %}"
    "{{- '<image>' if part.type == 'image' else part.text }}{%- endfor %}{%- endset %}"
)


def make(out: Path) -> Path:
    """Write the model into the folder `out`; return it."""
    out.mkdir(parents=True, exist_ok=True)
    text, tokenizer, about = map(_read, ("config.json", "tokenizer.json", "tokenizer_config.json"))
    marks, eos = text["vocab_size"], text.pop("eos_token_id")
    del text["architectures"]
    text |= {"model_type": "llama", "qkv_bias": True, "vocab_size": marks + ROOM}
    special = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        special | {"id": marks + n, "content": mark} for n, mark in enumerate(MARKS)
    ]
    assert _OF_TEXT in about["chat_template"]
    about |= {"chat_template": about["chat_template"].replace(_OF_TEXT, _OF_PARTS)}
    files = {
        "config.json": {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "model_type": "idefics3",
            "dtype": text["dtype"],
            "eos_token_id": eos,
            "image_token_id": marks,
            "pad_token_id": text["pad_token_id"],
            "scale_factor": 1,
            "text_config": text,
            "tie_word_embeddings": True,
            "vision_config": {
                "model_type": "idefics3_vision",
                "hidden_size": WIDTH,
                "image_size": SIDE,
                "intermediate_size": 2 * WIDTH,
                "num_attention_heads": 2,
                "num_hidden_layers": LAYERS,
                "patch_size": PATCH,
            },
        },
        "generation_config.json": _read("generation_config.json"),
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": False,
            "max_image_size": {"longest_edge": SIDE},
            "size": {"longest_edge": SIDE},
        },
        "processor_config.json": {
            "processor_class": "Idefics3Processor",
            "image_seq_len": (SIDE // PATCH) ** 2,
        },
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": about,
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2))
    save_file(_text() | _sight(text["hidden_size"]), out / "model.safetensors", {"format": "pt"})
    return out


def _text() -> dict[str, torch.Tensor]:
    weights = load_file(MODEL_DIR / "model.safetensors")
    weights = {name.replace("model.", "model.text_model.", 1): tensor for name, tensor in weights.items()}
    words = weights["model.text_model.embed_tokens.weight"]
    weights["model.text_model.embed_tokens.weight"] = torch.cat([words, torch.zeros_like(words[:ROOM])])
    random = torch.Generator().manual_seed(1)
    for name in sorted(name for name, tensor in weights.items() if ".layers." in name and tensor.dim() == 2):
        shape = weights[name].shape
        noise = NOISE / math.sqrt(shape[1]) * torch.randn(shape, generator=random)
        weights[name] = (weights[name] + noise).to(words.dtype)
    return weights


def _sight(text_width: int) -> dict[str, torch.Tensor]:
    random, weights, wide = torch.Generator().manual_seed(0), dict[str, torch.Tensor](), 2 * WIDTH

    def add(name: str, *shape: int, bias: bool = True) -> None:
        norm, inputs = len(shape) == 1, math.prod(shape[1:])
        weights[f"model.{name}.weight"] = norm + torch.randn(*shape, generator=random) / math.sqrt(inputs)
        if bias:
            weights[f"model.{name}.bias"] = 0.1 * torch.randn(shape[0], generator=random)

    add("vision_model.embeddings.patch_embedding", WIDTH, 3, PATCH, PATCH)
    add("vision_model.embeddings.position_embedding", (SIDE // PATCH) ** 2, WIDTH, bias=False)
    for layer in range(LAYERS):
        at = f"vision_model.encoder.layers.{layer}"
        for part in ("q", "k", "v", "out"):
            add(f"{at}.self_attn.{part}_proj", WIDTH, WIDTH)
        add(f"{at}.mlp.fc1", wide, WIDTH)
        add(f"{at}.mlp.fc2", WIDTH, wide)
        add(f"{at}.layer_norm1", WIDTH)
        add(f"{at}.layer_norm2", WIDTH)
    add("vision_model.post_layernorm", WIDTH)
    add("connector.modality_projection.proj", text_width, WIDTH, bias=False)
    return weights


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODEL_DIR / name).read_text())
    return content


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("out", type=Path)
    print(make(arguments.parse_args().out))
