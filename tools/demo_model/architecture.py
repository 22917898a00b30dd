"""Shape and initial weights of the demo model, and how it is saved."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from tools.demo_model.tokenizer import END_OF_TEXT, IM_END, MAX_POSITIONS, VOCAB_SIZE, save_tokenizer

HEADS, HEAD_SIZE = 4, 64
LOOKS_BACK = ((1, 2, 3, 4), (2, 3, 4, 5))
"""How many tokens each head of the first two layers looks back when training starts (`ease_start`)."""


def build_model(tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """Return a Qwen2 with initial weights. All attention backends support head size 64; two KV heads allow TP 2."""
    stops = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        # RoPE turns half of a head's dimensions less than once in 8,192 tokens: these compare contents.
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=stops,
        pad_token_id=stops[1],
        dtype="bfloat16",
    )
    model = Qwen2ForCausalLM(config).float()
    ease_start(model)
    return model


def ease_start(model: Qwen2ForCausalLM, strength: float = 6.0, pairs: int = 10) -> None:
    """Set initial weights from which recall appears within a hundred steps. With random weights a thousand steps are
    too few.

    Attention and MLP outputs start at zero, so that the residual stream carries the tokens. Each head of the first two
    layers starts by attending to the token at a fixed distance: its key bias is constant, and its query bias is turned
    by RoPE's angle for that distance. Finding these distances by chance is the slow part of learning to copy.
    """
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.mul_(5)
        model.model.norm.weight.fill_(0.3)
        for layer, distances in zip(model.model.layers, LOOKS_BACK, strict=False):
            attention = layer.self_attn
            angles = model.model.rotary_emb.inv_freq[:pairs]
            attention.k_proj.bias.view(-1, HEAD_SIZE)[:, :pairs] = strength
            for distance, bias in zip(distances, attention.q_proj.bias.view(-1, HEAD_SIZE), strict=True):
                bias[:pairs] = strength * torch.cos(angles * distance)
                bias[HEAD_SIZE // 2 : HEAD_SIZE // 2 + pairs] = -strength * torch.sin(angles * distance)


def save(model: Qwen2ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that transformers and vLLM load, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    stops = model.config.eos_token_id
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[1])
    model.save_pretrained(folder)
    # vLLM takes its default temperature from this file; 0 makes responses repeatable. transformers would not write it.
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.0}, indent=2) + "\n")
    save_tokenizer(tokenizer, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
