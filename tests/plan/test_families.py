"""What the plan explains and refuses of model families, read from published config.json files without weights."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from pdserve.config.load import load
from pdserve.plan.machine import what_if
from pdserve.plan.model_folder import read_model
from pdserve.plan.plan import Plan, make_plan
from tests.plan.models import FOLDERS, machine, published

STATE = "whose state is not in KV blocks and cannot move from prefill to decode workers: set remote-prefill: false"
FAMILIES = {
    "DeepSeek-V3": ("one entry of 576 numbers in each of 61 layers", "all 256 experts", ""),
    "DeepSeek-V2-Lite": ("one entry of 576 numbers in each of 27 layers", "all 64 experts", ""),
    "Mixtral-8x7B": ("8 heads of 128 numbers, shared by 32 query heads, in each of 32", "all 8 experts", ""),
    "Qwen3-30B-A3B": ("4 heads of 128 numbers", "all 128 experts", ""),
    "gpt-oss-20b": ("Some layers have a sliding window of 128 tokens", "all 32 experts", ""),
    "gemma-3-4b-it": ("Some layers have a sliding window of 1,024 tokens", "It takes more than text", ""),
    "gemma-2-9b": (
        "Some layers have a sliding window of 4,096 tokens",
        "KV of the whole prompt is kept and moved",
        "",
    ),
    "c4ai-command-r7b": (
        "Some layers have a sliding window of 4,096 tokens",
        "KV of the whole prompt is kept and moved",
        "",
    ),
    "Mistral-7B-v0.1": (
        "All layers have a sliding window of 4,096 tokens",
        "",
        "All layers of the model have a sliding",
    ),
    "Qwen2.5-7B": ("4 heads of 128 numbers", "", ""),
    "Llama-4-Scout-17B-16E": ("8 heads of 128 numbers", "all 16 experts", ""),
    "granite-4.0-micro": ("8 heads of 64 numbers", "", ""),
    "granite-4.0-h-tiny": ("Hybrid: layers of mamba", "all 64 experts", STATE),
    "Kimi-Linear-48B-A3B": ("Hybrid: layers of Mamba or linear attention", "all 256 experts", STATE),
    "Qwen3-Next-80B-A3B": ("Hybrid: layers of Mamba or linear attention", "all 512 experts", STATE),
    "Jamba-1.5-Mini": ("Hybrid: layers of Mamba or linear attention", "all 16 experts", STATE),
    "Nemotron-H-8B": ("Hybrid: layers of Mamba or linear attention", "", STATE),
    "LFM2-1.2B": ("Hybrid: layers of conv", "", STATE),
    "falcon-mamba-7b": ("", "", "have a state and no attention"),
}
"""Folder -> two parts of the explanation, and a part of the problem (empty: no problem)."""


def planned(tmp_path: Path, family: str, keys: str = "", remote: str = "true") -> Plan:
    path = tmp_path / "graph.yaml"
    common = "common-configs: [model, block-size]"
    prefill = f"PrefillWorker: {{{common}{keys}}}\n" if remote == "true" else ""
    path.write_text(
        f"Common: {{model: {FOLDERS / family}, block-size: 64}}\n"
        f"VllmWorker: {{remote-prefill: {remote}, {common}{keys}}}\n{prefill}"
    )
    return make_plan(load(path, {}), what_if("2xH200", machine()), env={})


def test_each_folder_has_its_row() -> None:
    assert {folder.name for folder in FOLDERS.iterdir()} == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_explained_or_refused(tmp_path: Path, family: str) -> None:
    *expected, refused = FAMILIES[family]
    found = planned(tmp_path, family)
    text = " ".join(found.explained)
    assert all(words in text for words in expected), text
    assert len(found.problems) == bool(refused), found.problems
    assert all(refused in problem for problem in found.problems), found.problems


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_that_transformers_makes(family: str) -> None:
    config = AutoConfig.from_pretrained(FOLDERS / family).get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if family == "falcon-mamba-7b":
        assert kinds == {"linear_attention"}
        return
    facts = read_model(FOLDERS / family)
    assert bool(facts.stateful_layers) == bool(kinds & {"linear_attention", "conv"})
    assert facts.kv_heads == config.num_key_value_heads
    assert facts.vocab == config.vocab_size
    if facts.window:
        assert facts.window == config.sliding_window
        assert facts.only_windows == ("full_attention" not in kinds)
    assert bool(facts.window) == ("sliding_attention" in kinds or family == "Mistral-7B-v0.1")


def test_layers_of_an_unknown_kind_are_not_refused(tmp_path: Path) -> None:
    config = published("granite-4.0-micro") | {"layer_types": ["mlp", "attention"] * 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_model(tmp_path)
    assert (facts.odd_layers, facts.stateful_layers) == (("mlp",), ())


@pytest.mark.parametrize("family", ["Jamba-1.5-Mini", "Mistral-7B-v0.1"])
def test_refused_families_are_served_without_remote_prefill(tmp_path: Path, family: str) -> None:
    assert planned(tmp_path, family, remote="false").problems == ()


@pytest.mark.parametrize(
    "keys",
    [
        ", max-model-len: 4096",
        ", disable-sliding-window: true",
        ", hf-overrides: {sliding_window: null}",
    ],
)
def test_kv_of_prompts_within_the_window_may_be_transferred(tmp_path: Path, keys: str) -> None:
    assert planned(tmp_path, "Mistral-7B-v0.1", keys).problems == ()


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Mistral-7B-v0.1", {"sliding_window": -1}, (0, False, ())),
        ("Mistral-7B-v0.1", {"hybrid_layer_pattern": [0, 1] * 16}, (4096, False, ())),
        ("Mistral-7B-v0.1", {"max_position_embeddings": "32768"}, (4096, True, ())),
        ("Mistral-7B-v0.1", {"mamba_d_state": None}, (4096, True, ())),
        ("Mistral-7B-v0.1", {"mamba_d_state": 16}, (4096, True, ("Mamba or linear attention",))),
        ("Qwen2.5-7B", {"layer_types": [0, 1] * 14}, (0, False, ())),
        ("Qwen2.5-7B", {"num_experts": [8, 64]}, (0, False, ())),
    ],
)
def test_older_and_unusual_configs_are_read(
    tmp_path: Path, family: str, changes: dict[str, object], expected: tuple[int, bool, tuple[str, ...]]
) -> None:
    config = published(family)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    facts = read_model(tmp_path)
    assert (facts.window, facts.only_windows, facts.stateful_layers) == expected
    assert facts.experts == (64 if "num_experts" in changes else 0)
    assert facts.positions == int(config["max_position_embeddings"])
