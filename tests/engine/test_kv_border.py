"""The plan and vLLM agree on whether the KV cache has room for one request, to the byte."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import check_enough_kv_cache_memory
from vllm.v1.kv_cache_interface import FullAttentionSpec

from pdserve.demo import MODEL_DIR
from pdserve.engine.vllm import api
from pdserve.plan.memory import size
from pdserve.plan.model_folder import read_model

MODEL = read_model(MODEL_DIR)
CONFIG = api.engine_config(["--model", str(MODEL_DIR), "--block-size", "32", "--max-model-len", "4096"])
CONFIG.cache_config.kv_cache_layout = "LBHNC"  # vLLM's choice for the CPU
REFUSALS = ("To serve at least one request", "No available memory")


def vllm_takes(block_size: int, length: int, space: int) -> bool:
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=MODEL.kv_heads, head_size=MODEL.head_dim, dtype=torch.bfloat16
    )
    CONFIG.model_config.max_model_len, CONFIG.cache_config.block_size = length, block_size
    try:
        check_enough_kv_cache_memory(CONFIG, {f"layers.{at}": spec for at in range(MODEL.layers)}, space)
    except ValueError as error:
        if not str(error).startswith(REFUSALS):
            raise
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(
    unit=st.integers(1, 8),
    length=st.integers(1, 8192),
    blocks=st.integers(-2, 2),
    rest=st.sampled_from([-1, 0, 1]),
)
@example(unit=1, length=4096, blocks=0, rest=0)
def test_the_plan_takes_what_vllm_takes(unit: int, length: int, blocks: int, rest: int) -> None:
    """Tries caches of the size that the longest request needs, up to two blocks and a byte more or less."""
    block_size = 32 * unit
    args: dict[str, object] = {"block-size": block_size, "max-model-len": length, "dtype": "bfloat16"}
    per_block = block_size * size(MODEL, args, None, cpu_kv=0).kv_per_token
    space = max(1, (-(-length // block_size) + blocks) * per_block + rest)
    assert size(MODEL, args, None, cpu_kv=space).fits is vllm_takes(block_size, length, space)


@pytest.mark.parametrize(("blocks", "fits"), [(128, False), (129, True)])
def test_an_override_includes_the_block_that_vllm_uses_itself(blocks: int, fits: bool) -> None:
    args = {"block-size": 32, "max-model-len": 4096, "num-gpu-blocks-override": blocks}
    memory = size(MODEL, args, None, cpu_kv=1 << 30)
    assert (memory.blocks, memory.fits) == (blocks, fits)
    assert vllm_takes(32, 4096, blocks * 32 * memory.kv_per_token) is fits
