"""Each file of configs/ loads and plans; its only problems are files that this machine lacks."""

import re
from pathlib import Path

import pytest

from pdserve.config.load import load
from pdserve.plan.machine import what_if
from pdserve.plan.plan import make_plan
from tests.plan.models import machine

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLES = {
    "agg": ("decode-0 frontend-0", "/mnt/DeepSeek-R1-Distill-Qwen-14B"),
    "both": ("both-0 both-1 frontend-0", ""),
    "disagg": ("decode-0 prefill-0 frontend-0", "/mnt/DeepSeek-R1-Distill-Qwen-14B"),
    "hosts": ("decode-0 prefill-0 frontend-0", "secrets"),
    "local": ("decode-0 prefill-0 frontend-0", ""),
    "secure": ("decode-0 frontend-0", "keys.yaml|server.pem"),
}
"""Example -> its processes, and a pattern of the missing files that its problems name."""


def test_every_example_is_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_planned(name: str) -> None:
    processes, missing = EXAMPLES[name]
    found = make_plan(load(CONFIGS / f"{name}.yaml", {}), what_if("4xA10", machine()), env={})
    assert " ".join(slot.name for slot in found.slots) == processes
    assert len(found.problems) == len(missing.split("|")) - (not missing), found.problems
    assert all(re.search(missing, problem) for problem in found.problems), found.problems
