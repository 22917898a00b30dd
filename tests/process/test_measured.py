"""What a worker says of its memory when it starts."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.config.load import load
from pdserve.demo import MODEL_DIR
from pdserve.engine.base import EngineFacts
from pdserve.plan.machine import GIB
from pdserve.plan.memory import Memory
from pdserve.plan.slots import Slot
from pdserve.process.engine_checks import compare, log_memory
from pdserve.records import Role

FACTS = EngineFacts(16_384, 32, 4096, 32, 2048, 128.0, "0.32.0", ["generate"])
"""of the demo model with 1 GiB for KV on the CPU"""
PLANNED = Memory(
    10 * GIB, 1024, 4096, 16, activations=GIB, graphs=GIB, runtime=GIB, kv_space=1000 * 16 * 1024
)


def told(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, facts: EngineFacts, engine: str = "vllm"
) -> list[str]:
    path = tmp_path / "graph.yaml"
    path.write_text(
        f"VllmWorker: {{model: {MODEL_DIR}, engine: {engine}, block-size: 32, max-model-len: 4096}}\n"
    )
    with caplog.at_level(logging.INFO):
        log_memory(load(path, {}), Slot(Role.DECODE, 0), facts)
    return [f"{record.levelname} {record.message}" for record in caplog.records]


def test_as_planned(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    expected = "INFO memory, measured / planned: KV blocks 16,384 / 16,384 (x 1.00)"
    assert told(caplog, tmp_path, FACTS) == [expected]


def test_not_as_planned(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (line,) = told(caplog, tmp_path, replace(FACTS, kv_blocks=12_000))
    expected = "WARNING memory is not as planned, measured / planned: KV blocks 12,000 / 16,384 (x 0.73);"
    assert line.startswith(expected)


def test_a_simulated_engine_has_no_plan(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert told(caplog, tmp_path, FACTS, "sim") == []


@pytest.mark.parametrize(
    ("facts", "off"),
    [
        ({}, []),
        ({"kv_blocks": 790}, ["KV blocks"]),
        ({"kv_blocks": 1210}, ["KV blocks"]),
        ({"kv_blocks": 810, "weight_bytes": 11 * GIB}, []),
        ({"weight_bytes": 13 * GIB}, ["weights"]),
        ({"consumed_bytes": 14 * GIB}, ["weights and runtime"]),
        # so small a part may be far off: the KV blocks say whether that matters
        ({"peak_bytes": 3 * GIB}, []),
    ],
)
def test_what_is_worth_a_warning(facts: dict[str, int], off: list[str]) -> None:
    found = list(compare(PLANNED, replace(FACTS, **({"kv_blocks": 1000} | facts))))  # type: ignore[arg-type]
    assert [part.part for part in found if part.off] == off


def test_each_part_has_its_factor() -> None:
    facts = replace(FACTS, kv_blocks=1100, weight_bytes=11 * GIB, consumed_bytes=11 * GIB, peak_bytes=3 * GIB)
    assert [str(each) for each in compare(PLANNED, facts)] == [
        "KV blocks 1,100 / 1,000 (x 1.10)",
        "weights 11.00 / 10.00 GiB (x 1.10)",
        "weights and runtime 11.00 / 11.00 GiB (x 1.00)",
        "activations and CUDA graphs 3.00 / 2.00 GiB (x 1.50)",
    ]
