"""The configuration and slot that `serve` passes to its roles."""

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.config.load import load
from pdserve.contract.records import Role
from pdserve.plan.graph import from_environment, to_environment
from pdserve.plan.slots import Slot

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))

SLOT = Slot(Role.DECODE, 1, (2, 3), 5600, {"CUDA_VISIBLE_DEVICES": "2,3"})


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_a_configuration_survives_encoding(file: Path) -> None:
    config = replace(load(file, {}), nats="nats://127.0.0.1:4222", etcd="127.0.0.1:2379")
    assert from_environment(to_environment(config, SLOT)) == (config, SLOT)


def test_numbers_of_any_size_survive_encoding() -> None:
    config = load(CONFIGS[0], {})
    assert config.decode is not None
    arguments = {
        **config.decode.engine_args,
        "seed": 2**70,
        "deep": {"list": [1, None, True, "x", 1.5, float("inf")]},
    }
    config = replace(config, decode=replace(config.decode, engine_args=arguments))
    assert from_environment(to_environment(config, SLOT)) == (config, SLOT)
