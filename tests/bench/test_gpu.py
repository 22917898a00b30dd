"""The script for the first owner of a card, as far as a machine without one goes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.plan.machine import Machine

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(bool(Machine.detect({}).gpus), reason="here is a GPU: run benchmarks/gpu.sh itself")
def test_without_a_gpu_it_goes_as_far_as_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "out"
    env = {**os.environ, "PYTHON": sys.executable, "PDSERVE_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(
        ["benchmarks/gpu.sh", out], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 3
    assert "no GPU here: first and what follows need one" in done.stderr
    assert "0: H100" in (out / "check.log").read_text()
    assert "It fits." in (out / "check.log").read_text()


def test_a_part_that_is_none_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        ["benchmarks/gpu.sh", tmp_path, "everything"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "no part is called everything" in done.stderr
