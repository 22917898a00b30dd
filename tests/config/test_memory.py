"""The arithmetic of memory, against numbers worked out by hand."""

from pathlib import Path

import pytest

from pdserve.config.machine import GIB, Gpu
from pdserve.config.memory import GPU_FIXED_ALLOWANCE, kv_bytes_per_token, size
from pdserve.config.model_folder import ModelFacts, find_folder, read_model
from pdserve.demo import MODEL_DIR
from pdserve.errors import ConfigError
from tests.config.models import QWEN_14B_BYTES, qwen_14b, write_safetensors

A10 = Gpu(0, "A10", 24 * GIB)


@pytest.fixture
def qwen(tmp_path: Path) -> ModelFacts:
    return read_model(qwen_14b(tmp_path))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        # 2 x 48 layers x 8 KV heads x 128 x 2 bytes
        ({}, 196_608),
        ({"tensor-parallel-size": 2}, 98_304),
        ({"tensor-parallel-size": 4}, 49_152),
        ({"tensor-parallel-size": 8}, 24_576),
        # with more ranks than KV heads each holds one
        ({"tensor-parallel-size": 20}, 24_576),
        ({"pipeline-parallel-size": 2}, 98_304),
        ({"kv-cache-dtype": "fp8"}, 98_304),
        ({"dtype": "float32"}, 393_216),
        ({"dtype": "float32", "kv-cache-dtype": "bfloat16"}, 196_608),
    ],
)
def test_kv_bytes_per_token(qwen: ModelFacts, args: dict[str, object], expected: int) -> None:
    assert kv_bytes_per_token(qwen, args) == expected


def test_two_a10s(qwen: ModelFacts) -> None:
    args = {"tensor-parallel-size": 2, "block-size": 64, "max-model-len": 10240, "max-num-seqs": 20}
    memory = size(qwen, args, A10)
    weights = QWEN_14B_BYTES // 2
    # 2,048 tokens x (6 x 5120 + 3 x 13824 / 2) x 2 bytes, and 20 x 152064 logits of 4 bytes, twice
    allowance = GPU_FIXED_ALLOWANCE + 2048 * (30_720 + 20_736) * 2 + 20 * 152_064 * 8
    space = int(24 * GIB * 0.92) - weights - allowance
    assert (memory.weights, memory.allowance, memory.kv_space) == (weights, allowance, space)
    assert memory.blocks == space // (64 * 98_304) == 1_127
    assert memory.tokens == 72_128
    assert memory.max_concurrency == pytest.approx(1_127 / 160)


def test_kv_space_that_is_given(qwen: ModelFacts) -> None:
    given = {"kv-cache-memory-bytes": 64 * 98_304 * 100, "tensor-parallel-size": 2, "block-size": 64}
    assert size(qwen, given, A10).blocks == 100


def test_no_gpu_to_measure_against(qwen: ModelFacts) -> None:
    memory = size(qwen, {}, None)
    assert (memory.kv_space, memory.blocks, memory.tokens) == (None, 0, 0)


def test_the_demo_model_on_the_cpu() -> None:
    """2 x 4 layers x 2 KV heads x 64 x 2 bytes, and 1 GiB."""
    memory = size(read_model(MODEL_DIR), {"block-size": 32, "max-model-len": 4096}, None, cpu_kv=GIB)
    assert (memory.kv_per_token, memory.blocks, memory.max_concurrency) == (2048, 16_384, 128.0)


def test_partial_blocks_count_as_whole(qwen: ModelFacts) -> None:
    memory = size(qwen, {"block-size": 64, "max-model-len": 65}, None, cpu_kv=64 * 196_608 * 4)
    assert (memory.blocks, memory.max_concurrency) == (4, 2.0)


def test_vllm_s_default_block_sizes(qwen: ModelFacts) -> None:
    assert (size(qwen, {}, A10).block_size, size(qwen, {}, None, cpu_kv=GIB).block_size) == (16, 128)


def test_latent_attention_is_not_split(tmp_path: Path) -> None:
    config = (
        '{"num_attention_heads": 16, "num_hidden_layers": 27, "hidden_size": 2048, "vocab_size": 102400, '
        '"kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}'
    )
    (tmp_path / "config.json").write_text(config)
    model = read_model(tmp_path)
    assert kv_bytes_per_token(model, {"tensor-parallel-size": 2}) == 27 * 576 * 2


# ── what the folder says ──────────────────────────────────────────────────────────────────


def folder_with(tmp_path: Path, tensors: dict[str, tuple[str, int]], missing: int = 0) -> Path:
    qwen_14b(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    write_safetensors(tmp_path / "model.safetensors", tensors, missing)
    return tmp_path


def test_weights_from_headers(tmp_path: Path) -> None:
    model = read_model(
        folder_with(tmp_path, {"a": ("BF16", 1000), "b": ("BF16", 24), "scale": ("F8_E4M3", 10)})
    )
    assert model.stored == {"BF16": 1024, "F8_E4M3": 10}
    assert model.weights("bfloat16") == 1034
    assert model.weights("float32") == 2 * 1024 + 10


def test_float32_weights_are_halved(tmp_path: Path) -> None:
    model = read_model(folder_with(tmp_path, {"a": ("F32", 4000)}))
    assert model.weights(model.resolve_dtype("auto")) == 2000


def test_only_the_files_of_the_index_count(tmp_path: Path) -> None:
    folder = qwen_14b(tmp_path)
    write_safetensors(folder / "model-1.safetensors", {"a": ("BF16", 100)})
    write_safetensors(folder / "consolidated.safetensors", {"a": ("BF16", 100)})
    assert read_model(folder).stored == {"BF16": 100}


def test_weights_cut_short(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.safetensors is cut short: download it again"):
        read_model(folder_with(tmp_path, {"a": ("BF16", 1000)}, missing=1))


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 16, (5).to_bytes(8, "little") + b"{nope"])
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes) -> None:
    folder = folder_with(tmp_path, {})
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is not a model that pdserve understands"):
        read_model(folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"num_attention_heads": "x"}', '{"num_attention_heads": 0}']
)
def test_configs_that_are_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="is not a model that pdserve understands"):
        read_model(tmp_path)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json cannot be read \(No such file or directory\)"):
        read_model(tmp_path)


def test_hub_ids_are_looked_up_in_the_cache(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path)}
    assert find_folder("a/b", env=env) is None
    cache = tmp_path / "hub/models--a--b"
    snapshot = qwen_14b(cache / "snapshots/123abc")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("123abc\n")
    assert find_folder("a/b", env=env) == snapshot
    assert find_folder("a/b", "123abc", env) == snapshot
    assert find_folder("a/b", "other", env) is None
