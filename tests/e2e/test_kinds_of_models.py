"""Models whose KV is not that of full attention in all layers, made of the demo model's weights: through the graph they
answer as one plain engine does. Their prefill engine has two ranks, their decode engine one: KV heads are joined."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.cases import Case
from tests.e2e.conftest import plain_answers
from tests.e2e.test_tensor_parallel import changed, check, sizes
from tests.real import one_vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

WINDOWS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "qkv_bias": True,  # what makes it Qwen2
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


async def test_layers_with_a_sliding_window_of_two_ranks_whose_kv_heads_are_joined(
    tmp_path: Path, cases: list[Case], reference: dict[str, list[int]]
) -> None:
    model = changed(tmp_path / "model", **WINDOWS)
    (tmp_path / "plain").mkdir()
    with one_vllm(tmp_path / "plain", model) as server:
        expected = await asyncio.to_thread(plain_answers, server)
    assert expected != reference, "the window does nothing"
    await check(tmp_path, sizes(2, 1).replace("model: demo", f"model: {model}"), cases, expected)
