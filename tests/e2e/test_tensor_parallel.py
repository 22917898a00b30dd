"""Engines of different tensor-parallel sizes: KV heads are divided, copied or joined in transfer, and the tokens are
those of one rank. Some layers of one model have a sliding window."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pdserve.demo import MODEL_DIR
from pdserve.util.errors import EngineDead
from tests.engine.test_vllm_engine import body, prompt_of, tokens_of, two_engines

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

PROMPTS = {length: prompt_of(length, seed=31) for length in (1, 31, 32, 33, 500, 3000)}
WINDOWS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "qkv_bias": True,  # as in Qwen2
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def changed(folder: Path, **keys: object) -> Path:
    """The demo model with changes in its config.json."""
    shutil.copytree(MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def one_kv_head(folder: Path) -> Path:
    """The demo model with only the first of its two KV heads, which all queries use."""
    changed(folder, num_key_value_heads=1)
    weights = load_file(folder / "model.safetensors")
    halved = {
        name: tensor[: len(tensor) // 2].clone() if ".k_proj." in name or ".v_proj." in name else tensor
        for name, tensor in weights.items()
    }
    save_file(halved, folder / "model.safetensors", {"format": "pt"})
    return folder


def windows(folder: Path) -> Path:
    return changed(folder, **WINDOWS)


@pytest.mark.parametrize(
    ("decode", "prefill", "model"), [(2, 1, changed), (2, 1, one_kv_head), (1, 2, windows)]
)
async def test_tokens_are_those_of_one_rank(
    tmp_path: Path, decode: int, prefill: int, model: Callable[[Path], Path]
) -> None:
    ranks = ({"tensor-parallel-size": decode}, {"tensor-parallel-size": prefill})
    async with two_engines(tmp_path / "log", *ranks, model=str(model(tmp_path / "model"))) as pair:
        whole = pair.decode if decode == 1 else pair.prefill
        expected = {
            length: await whole.generate(f"whole-{length}", prompt) for length, prompt in PROMPTS.items()
        }
        await pair.all_free()
        for length, prompt in PROMPTS.items():
            assert tokens_of(await pair.hand_over(f"alone-{length}", prompt, body())) == expected[length]
        await pair.all_free()
        await pair.decode.generate("begins alike", [*PROMPTS[500][:96], 299])
        together = (pair.hand_over(f"together-{each}", prompt, body()) for each, prompt in PROMPTS.items())
        answers = dict(zip(PROMPTS, await asyncio.gather(*together), strict=True))
        assert {length: tokens_of(outputs) for length, outputs in answers.items()} == expected
        assert not any(output.recomputed for outputs in answers.values() for output in outputs)
        assert pair.decode.failures == 0
        await pair.all_free()
        if decode == 2:
            next(each for each in pair.decode.engine.processes if "Worker" in each.name()).kill()
            with pytest.raises(EngineDead) as death:
                await asyncio.wait_for(pair.decode.engine.watch(), 5)
            assert death.value.killed, "the core and the other rank end at once"
