"""The parameters of public models, by their published configs, against their published numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.plan.model_folder import read_model
from pdserve.plan.parameters import estimate_weights
from tests.plan.models import MIXTRAL, QWEN_14B, QWEN_14B_BYTES, write_safetensors


def config(kind: str, sizes: tuple[int, int, int, int, int, int], **more: object) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys = (*names, "num_key_value_heads", "vocab_size")
    return {
        "model_type": kind,
        "torch_dtype": "bfloat16",
        **dict(zip(keys, sizes, strict=True)),
        **more,
    }


TIED = {"tie_word_embeddings": True}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
QWEN_7B = config("qwen2", (3584, 18944, 28, 28, 4, 152064))
GPT_OSS = config(
    "gpt_oss", (2880, 2880, 24, 64, 8, 201088), head_dim=64, num_local_experts=32, attention_bias=True
)
MODELS = {
    "Llama-3.1-8B": (config("llama", (4096, 14336, 32, 32, 8, 128256)), 8_030_261_248),
    "Llama-3.1-70B": (config("llama", (8192, 28672, 80, 64, 8, 128256)), 70_553_706_496),
    "Mistral-7B-v0.1": (config("mistral", (4096, 14336, 32, 32, 8, 32000)), 7_241_732_096),
    "Qwen2.5-7B": (QWEN_7B, 7_615_616_512),
    "Qwen2.5-0.5B": (config("qwen2", (896, 4864, 24, 14, 2, 151936), **TIED), 494_032_768),
    "Qwen3-0.6B": (config("qwen3", (1024, 3072, 28, 16, 8, 151936), head_dim=128, **TIED), 596_049_920),
    "Qwen3-8B": (config("qwen3", (4096, 12288, 36, 32, 8, 151936), head_dim=128), 8_190_735_360),
    "Gemma-2-9B": (config("gemma2", (3584, 14336, 42, 16, 8, 256000), head_dim=256), 9_241_705_984),
    "Gemma-3-1B": (config("gemma3_text", (1152, 6912, 26, 4, 1, 262144), head_dim=256), 999_885_952),
    "Phi-3-mini": (config("phi3", (3072, 8192, 32, 32, 32, 32064)), 3_821_079_552),
    "Mixtral-8x7B": (MIXTRAL, 46_702_792_704),
    "Qwen1.5-MoE-A2.7B": (
        config(
            "qwen2_moe",
            (2048, 5632, 24, 16, 16, 151936),
            num_experts=60,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        config(
            "qwen3_moe",
            (2048, 6144, 48, 32, 4, 151936),
            head_dim=128,
            num_experts=128,
            moe_intermediate_size=768,
        ),
        30_532_122_624,
    ),
    "DeepSeek-V2-Lite": (
        config(
            "deepseek_v2",
            (2048, 10944, 27, 16, 16, 102400),
            q_lora_rank=None,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            **LATENT,
        ),
        15_706_484_224,
    ),
    "DeepSeek-V3": (
        config(
            "deepseek_v3",
            (7168, 18432, 61, 128, 128, 129280),
            q_lora_rank=1536,
            n_routed_experts=256,
            n_shared_experts=1,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
            **LATENT,
        ),
        671_026_419_200,
    ),
    "gpt-oss-20b": (GPT_OSS, 20_914_757_184),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_were_published(name: str) -> None:
    model, parameters = MODELS[name]
    assert estimate_weights(model) == (parameters, {"BF16": 2 * parameters})


def test_the_config_of_a_real_model_gives_the_size_of_its_weights() -> None:
    _, stored = estimate_weights(QWEN_14B) or (0, {})
    assert stored == {"BF16": QWEN_14B_BYTES}


@pytest.mark.parametrize(
    ("model", "quantization", "gigabytes"),
    [
        (QWEN_7B, {"quant_method": "awq", "bits": 4, "group_size": 128}, 5.57),
        (QWEN_7B, {"quant_method": "fp8"}, 8.7),
        (GPT_OSS, {"quant_method": "mxfp4"}, 13.76),
        (
            QWEN_7B,
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": None}}},
            },
            8.7,
        ),
    ],
)
def test_quantized_checkpoints(model: dict[str, Any], quantization: dict[str, Any], gigabytes: float) -> None:
    """Published sizes of Qwen2.5-7B-Instruct-AWQ, its FP8 and INT8 versions, and gpt-oss-20b."""
    _, stored = estimate_weights({**model, "quantization_config": quantization}) or (0, {})
    assert sum(stored.values()) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("changed", [{"model_type": "mamba"}, {"quantization_config": {"quant_method": "?"}}])
def test_what_is_not_known_is_not_estimated(changed: dict[str, Any]) -> None:
    assert estimate_weights(QWEN_7B | changed) is None


def test_a_download_that_was_broken_off_does_not_count_as_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    write_safetensors(tmp_path / "model-00001-of-00004.safetensors", {"a": ("BF16", 100)})
    assert read_model(tmp_path).parameters == MODELS["Qwen2.5-7B"][1]
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", {"a": ("BF16", 100)})
    (tmp_path / "model-00001-of-00004.safetensors").unlink()
    assert read_model(tmp_path).stored == {"BF16": 100}


def test_of_a_model_with_a_tower_the_text_alone_is_no_estimate(tmp_path: Path) -> None:
    whole = {"model_type": "gemma3", "text_config": MODELS["Gemma-3-1B"][0], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_model(tmp_path).stored == {}
