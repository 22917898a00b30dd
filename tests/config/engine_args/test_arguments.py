"""pdserve's list of vLLM's arguments: values and command lines. (tests/engine/test_vllm_api.py compares the list
with vLLM.)"""

import re

import pytest

from pdserve.config.engine_args.arguments import canonical, for_engine, parse, to_argv


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("enforce-eager", False, False),
        ("gpu-memory-utilization", 1, 1.0),
        ("max-model-len", "16K", 16_384),
        ("max-model-len", "1.5k", 1500),
        ("max-model-len", "4096", 4096),
        ("max-model-len", -1, "auto"),
        ("kv-cache-memory-bytes", "2G", 2 * 2**30),
        ("dtype", "bfloat16", "bfloat16"),
        ("hf-overrides", {"a_b": 1}, {"a_b": 1}),
        ("compilation-config", '{"level": 3}', {"level": 3}),
        ("logits-processors", "one", ["one"]),
        ("lora-modules", [{"name": "x"}, "y=z"], [{"name": "x"}, "y=z"]),
        ("tokenizer", 7, "7"),
    ],
)
def test_values_that_vllm_takes(name: str, value: object, parsed: object) -> None:
    assert parse(name, value) == parsed
    assert type(parse(name, value)) is type(parsed)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("max-num-seqs", "20", "is '20', but must be a whole number."),
        ("max-num-seqs", 1.5, "is 1.5, but must be a whole number."),
        ("max-num-seqs", 0, "is 0, but must be at least 1."),
        ("enforce-eager", 1, "is 1, but must be true or false."),
        ("gpu-memory-utilization", 92, "is 92, but must be a share above 0 and up to 1."),
        ("max-model-len", "1.5K", "is '1.5K', but must be a whole number, also as 16k"),
        ("max-model-len", -5, "is -5, but must be at least 1."),
        ("kv-cache-dtype", "fp9", "is 'fp9', but must be one of: auto, "),
        ("compilation-config", "{level", "is not JSON ("),
        ("tokenizer", ["a"], "is ['a'], but must be a text."),
        ("tokenizer", None, "has no value: give it one or remove the line."),
    ],
)
def test_values_that_are_refused(name: str, value: object, problem: str) -> None:
    """pdserve refuses them in its own words, before vLLM starts."""
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        parse(name, value)


def test_aliases_map_to_canonical_names() -> None:
    assert canonical("device-memory-utilization") == "gpu-memory-utilization"
    assert canonical("max-num-seqs") == "max-num-seqs"
    assert canonical("max-num-seq") is None


ARGS = {
    "enforce-eager": True,
    "enable-prefix-caching": False,
    "disable-log-stats": False,
    "block-size": 64,
    "seed": -1,
    "hf-overrides": {"a_b": [1, None]},
    "logits-processors": ["one", "two"],
    "tool-call-parser": "hermes",
    "tensor-parallel-size": 2,
}


def test_arguments_become_a_command_line() -> None:
    assert to_argv(ARGS) == [
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--block-size=64",
        "--seed=-1",
        '--hf-overrides={"a_b": [1, null]}',
        "--logits-processors",
        "one",
        "two",
        "--tool-call-parser=hermes",
        "--tensor-parallel-size=2",
    ]


def test_engine_arguments_leave_out_those_of_the_api() -> None:
    assert set(ARGS) - set(for_engine(ARGS)) == {"tool-call-parser"}
