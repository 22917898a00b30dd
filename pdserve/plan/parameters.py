"""Estimates a model's weights from its config.json, for a model whose weights are not on this machine: counts the
parameters of the architectures named here, and multiplies by the bits of their quantization. Pure.

The counts are those of the published checkpoints to the last parameter (tests/plan/test_parameters.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TIED = {"gemma", "gemma2", "gemma3_text"}
"""architectures whose output layer is the embedding unless the config says otherwise; for others it must say so"""
_DENSE = {"llama", "mistral", "qwen2", "qwen3", "phi3", *_TIED}
_EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"}
_FOUR_NORMS = {"gemma2", "gemma3_text"}
_QK_NORMS = {"qwen3", "qwen3_moe", "gemma3_text"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Parameters:
    experts: int
    """in the matrices of experts that a router chooses among"""
    linear: int
    """in all other matrices of the layers"""
    rest: int
    """never quantized: embeddings, norms, biases, routers"""

    @property
    def total(self) -> int:
        return self.experts + self.linear + self.rest


def tied(config: Mapping[str, Any]) -> bool:
    """Whether the embedding is also the output layer."""
    return bool(config.get("tie_word_embeddings", config.get("model_type") in _TIED))


def estimate_weights(config: Mapping[str, Any]) -> tuple[int, Mapping[str, int]] | None:
    """The number of parameters, and bytes by safetensors dtype (`quantized` for those that are); None for an
    architecture or a quantization that is not known. Raises KeyError, TypeError and ValueError for a config that lacks
    what its architecture has."""
    found, quantization = _count(config), config.get("quantization_config") or {}
    dtype = _SAFETENSORS.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")
    if found is None:
        return None
    width = 4 if dtype == "F32" else 2
    if not quantization:
        return found.total, {dtype: found.total * width}
    bits = _bits(quantization)
    if bits is None:
        return None
    only_experts = quantization["quant_method"] == "mxfp4"
    packed = found.experts + (0 if only_experts else found.linear)
    return found.total, {"quantized": int(packed * bits / 8), dtype: (found.total - packed) * width}


def _bits(quantization: Mapping[str, Any]) -> float | None:
    """Bits of a quantized parameter, with its share of scales and zero points; None: not known."""
    match quantization.get("quant_method"):
        case "awq" | "gptq":
            bits, group = int(quantization["bits"]), int(quantization.get("group_size", 128))
            return bits + (16 + bits) / group if group > 0 else bits
        case "fp8" | "fbgemm_fp8":
            return 8
        case "mxfp4":
            return 4 + 8 / 32
        case "bitsandbytes":
            return 8 if quantization.get("load_in_8bit") else 4.5
        case "compressed-tensors":
            groups = quantization["config_groups"].values()
            weights = [group["weights"] for group in groups if group.get("weights")]
            sizes = [int(each["num_bits"]) + 16 / int(each.get("group_size") or 1 << 20) for each in weights]
            return max(sizes, default=None)
    return None


def _count(config: Mapping[str, Any]) -> Parameters | None:
    kind = config.get("model_type")
    if kind not in _DENSE | _EXPERTS:
        return None
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    attention, beside = _latent_attention(config) if config.get("kv_lora_rank") else _attention(config)
    norms = hidden * (4 if kind in _FOUR_NORMS else 2)
    experts, linear = 0, layers * attention
    rest = layers * (beside + norms) + hidden
    rest += int(config["vocab_size"]) * hidden * (1 if tied(config) else 2)
    for layer in range(layers):
        if _has_experts(config, layer):
            chosen, shared, routing = _mlp_of_experts(config)
            experts, linear, rest = experts + chosen, linear + shared, rest + routing
        else:
            linear += 3 * hidden * int(config["intermediate_size"])
    return Parameters(experts, linear, rest)


def _attention(config: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters of a layer's matrices, and beside them: biases, norms of queries and keys, sinks."""
    kind, hidden, heads = config["model_type"], int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads, width = int(config.get("num_key_value_heads") or heads), _head_dim(config)
    beside = 0
    if config.get("attention_bias") or kind in _QKV_BIAS:
        beside += (heads + 2 * kv_heads) * width + (0 if kind in _QKV_BIAS else hidden)
    beside += 2 * width * (kind in _QK_NORMS) + heads * (kind == "gpt_oss")
    return 2 * hidden * (heads + kv_heads) * width, beside


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))


def _latent_attention(config: Mapping[str, Any]) -> tuple[int, int]:
    """Multi-head latent attention: as `_attention`."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    latent, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    plain, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    queries, narrow = heads * (plain + rope), int(config.get("q_lora_rank") or 0)
    matrices = narrow * (hidden + queries) if narrow else hidden * queries
    matrices += hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * hidden
    return matrices, latent + narrow


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    match config["model_type"]:
        case "mixtral" | "gpt_oss":
            return True
        case "qwen2_moe" | "qwen3_moe":
            step = int(config.get("decoder_sparse_step") or 1)
            return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0
        case "deepseek_v2" | "deepseek_v3":
            first, step = int(config["first_k_dense_replace"]), int(config.get("moe_layer_freq") or 1)
            return layer >= first and layer % step == 0
    return False


def _mlp_of_experts(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Parameters of a layer's experts, of what all tokens pass beside them, and of the router and biases."""
    kind, hidden = config["model_type"], int(config["hidden_size"])
    count = int(config.get("num_local_experts") or config.get("num_experts") or config["n_routed_experts"])
    inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    experts, router = count * 3 * hidden * inner, hidden * count
    match kind:
        case "qwen2_moe":
            return experts, 3 * hidden * int(config["shared_expert_intermediate_size"]), router + hidden
        case "gpt_oss":
            return experts, 0, router + count + count * (2 * inner + hidden)
        case "deepseek_v2" | "deepseek_v3":
            shared = int(config.get("n_shared_experts") or 0) * 3 * hidden * inner
            return experts, shared, router + count * (kind == "deepseek_v3")
    return experts, 0, router
