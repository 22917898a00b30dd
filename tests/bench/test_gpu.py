"""The script for the first owner of a card, as far as a machine without one goes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.plan.machine import Machine

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(bool(Machine.detect({}).gpus), reason="here is a GPU: run benchmarks/gpu.sh itself")
@pytest.mark.parametrize(
    ("parts", "code", "problem"),
    [([], 3, "no GPU here: first and what follows need one"), (["all"], 2, "no part is called all")],
)
def test_without_a_gpu_it_goes_as_far_as_the_plan(
    tmp_path: Path, parts: list[str], code: int, problem: str
) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "PDSERVE_STATE_DIR": str(tmp_path / "state")}
    command = ["benchmarks/gpu.sh", str(tmp_path), *parts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert problem in done.stderr
    if not parts:
        assert "0: H100" in (tmp_path / "check.log").read_text()
        assert "It fits." in (tmp_path / "check.log").read_text()
