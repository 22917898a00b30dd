"""Workers of different tensor-parallel sizes: KV heads are divided, copied or joined on their way, and the
answers are one plain engine's. Also of a model whose KV is not that of full attention in all layers."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pdserve.demo import MODEL_DIR
from pdserve.ports import free_port
from tests.e2e.cases import Case
from tests.e2e.conftest import plain_answers
from tests.e2e.graph import serving
from tests.e2e.test_identity import all_at_once
from tests.real import GRAPH, one_vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def changed(folder: Path, **keys: object) -> Path:
    """The demo model with other keys in its config.json."""
    shutil.copytree(MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def one_kv_head(folder: Path) -> Path:
    """The demo model without the second of its two KV heads: all queries go to the first."""
    changed(folder, num_key_value_heads=1)
    weights = load_file(folder / "model.safetensors")
    halved = {
        name: tensor[: len(tensor) // 2].clone() if ".k_proj." in name or ".v_proj." in name else tensor
        for name, tensor in weights.items()
    }
    save_file(halved, folder / "model.safetensors", {"format": "pt"})
    return folder


async def check(folder: Path, yaml: str, cases: list[Case], reference: dict[str, list[int]]) -> None:
    with serving(yaml, folder) as graph:
        answers = await all_at_once(graph, cases)
        assert [name for name, answer in answers if answer.tokens != reference[name]] == []
        assert {answer.prefill for _, answer in answers} == {"local", "remote"}
        metrics = graph.metrics()
        assert metrics("pdserve_warm_ups_total", result="ok") == 1
        slow = {"timeout", "expired"}  # the machine was busy
        assert metrics.values("pdserve_remote_prefill_failures_total", "reason") <= slow


async def answers_of(model: Path, folder: Path) -> dict[str, list[int]]:
    """Of one plain engine."""
    (folder / "plain").mkdir()
    with one_vllm(folder / "plain", model) as server:
        return await asyncio.to_thread(plain_answers, server)


def sizes(prefill: int, decode: int) -> str:
    yaml = GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2), decode=1, prefill=1)
    yaml = yaml.replace("VllmWorker:", f"VllmWorker:\n  tensor-parallel-size: {decode}")
    return yaml.replace("PrefillWorker:", f"PrefillWorker:\n  tensor-parallel-size: {prefill}")


async def test_decode_ranks_share_kv_heads(
    tmp_path: Path, cases: list[Case], reference: dict[str, list[int]]
) -> None:
    await check(tmp_path, sizes(1, 2), cases, reference)


async def test_ranks_have_copies_of_a_kv_head(tmp_path: Path, cases: list[Case]) -> None:
    model = one_kv_head(tmp_path / "model")
    reference = await answers_of(model, tmp_path)
    await check(tmp_path, sizes(1, 2).replace("model: demo", f"model: {model}"), cases, reference)


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
    expected = await answers_of(model, tmp_path)
    assert expected != reference, "the window does nothing"
    await check(tmp_path, sizes(2, 1).replace("model: demo", f"model: {model}"), cases, expected)
