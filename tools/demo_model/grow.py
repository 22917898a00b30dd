"""Make a larger demo model: `python -m tools.demo_model.grow --size 30M OUT` takes seconds, and nothing is trained.

It is the demo model with wider layers and more of them. Engines compute the added random weights too, but these do not
change the residual stream. So the model costs as much as any of its size, recalls codes as the demo model does, and a
wrong KV block shows as a wrong answer (Net2Net, Chen et al. 2016, without the noise)."""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from pdserve.demo import MODEL_DIR
from tools.demo_model.architecture import HEAD_SIZE, save

WIDTH, INNER = 1024, 2048
"""WIDTH is four times the demo model's, so that `_put_norm` scales by 1/2, which is exact in bfloat16."""
_UNITS = {"M": 10**6, "B": 10**9}


def parameters(text: str) -> int:
    """Parse a number such as `30M`. Raises ValueError."""
    return int(float(text[:-1]) * _UNITS[text[-1:]]) if text[-1:] in _UNITS else int(text)


def grow(source: Qwen2ForCausalLM, size: int) -> Qwen2ForCausalLM:
    """Return a model of at least `size` parameters, by adding layers."""
    layers = source.config.num_hidden_layers
    while (model := _empty(source.config, layers)).num_parameters() < size:
        layers += 1
    model = Qwen2ForCausalLM(model.config).float()
    with torch.no_grad():
        _copy(source, model)
    return model


def _empty(config: Qwen2Config, layers: int) -> Qwen2ForCausalLM:
    """Return a model whose weights take no memory."""
    fields = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    fields |= {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": WIDTH // HEAD_SIZE}
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(**fields))


def _copy(source: Qwen2ForCausalLM, model: Qwen2ForCausalLM) -> None:
    width = source.config.hidden_size
    rows = _rows_of_heads(source.config, model.config)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for old, new in zip(source.model.layers, model.model.layers, strict=False):
        for name in ("k_proj", "v_proj"):
            _put(getattr(new.self_attn, name), getattr(old.self_attn, name), width)
        query, asked = new.self_attn.q_proj, old.self_attn.q_proj
        query.weight[rows, :width], query.bias[rows] = asked.weight, asked.bias
        new.self_attn.o_proj.weight[:width, rows] = old.self_attn.o_proj.weight
        inner = source.config.intermediate_size
        new.mlp.gate_proj.weight[:inner, :width] = old.mlp.gate_proj.weight
        new.mlp.up_proj.weight[:inner, :width] = old.mlp.up_proj.weight
        new.mlp.down_proj.weight[:width, :inner] = old.mlp.down_proj.weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            _put_norm(getattr(new, name), getattr(old, name), width)
    _put_norm(model.model.norm, source.model.norm, width)
    model.model.embed_tokens.weight.zero_()
    model.model.embed_tokens.weight[:, :width] = source.model.embed_tokens.weight


def _rows_of_heads(old: Qwen2Config, new: Qwen2Config) -> list[int]:
    """Return the new rows of the old query heads. Each stays with its KV head, which has more query heads now."""
    few, many = (config.num_attention_heads // config.num_key_value_heads for config in (old, new))
    heads = [head // few * many + head % few for head in range(old.num_attention_heads)]
    return [head * HEAD_SIZE + place for head in heads for place in range(HEAD_SIZE)]


def _put(new: nn.Linear, old: nn.Linear, width: int) -> None:
    new.weight[:, :width], new.bias[:] = old.weight, old.bias


def _put_norm(new: nn.Module, old: nn.Module, width: int) -> None:
    """Copy a norm's weight. It is scaled, because RMSNorm's mean now includes the added dimensions, which are zero."""
    new.weight[:width] = old.weight * (width / WIDTH) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parameters, default=parameters("30M"), help="parameters, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = grow(Qwen2ForCausalLM.from_pretrained(MODEL_DIR).float(), options.size)
    save(model, Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), options.output)
    print(
        f"{options.output}: {model.num_parameters():,} parameters in {model.config.num_hidden_layers} layers"
    )


if __name__ == "__main__":
    main()
