"""`benchmarks/gpu.sh`, as far as it runs without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.plan.machine import Machine
from pdserve.util.net import free_port
from tests.serving import kv_ports, processes_below
from tests.terminal import Terminal

SCRIPT = str(Path(__file__).parents[2] / "benchmarks/gpu.sh")


def variables(**more: str) -> dict[str, str]:
    port, kv_port = str(free_port("127.0.0.1")), str(kv_ports())
    return {**os.environ, "PYTHON": sys.executable, "PORT": port, "PDSERVE_KV_PORT": kv_port, **more}


def run(folder: Path, *parts: str, **more: str) -> "subprocess.CompletedProcess[str]":
    command, env = [SCRIPT, str(folder), *parts], variables(**more)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=560, check=False)


@pytest.mark.skipif(bool(Machine.detect({}).gpus), reason="this machine has a GPU: run benchmarks/gpu.sh")
@pytest.mark.parametrize(
    ("parts", "code", "problem"),
    [([], 3, "no GPU here: graph and what follows need one"), (["all"], 2, "no part is called all")],
)
def test_the_script_ends_early_without_a_gpu_or_with_an_unknown_part(
    tmp_path: Path, parts: list[str], code: int, problem: str
) -> None:
    done = run(tmp_path, *parts)
    assert done.returncode == code
    assert problem in done.stderr
    if not parts:
        assert "0: H100" in (tmp_path / "check.log").read_text()
        assert "It fits." in (tmp_path / "check.log").read_text()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("limit", "code"), [("500", 0), ("10", 1)])
def test_a_part_stops_what_it_started(tmp_path: Path, limit: str, code: int) -> None:
    """With simulated engines, the first prompt is prefilled remotely and the outputs are those of one engine. A part
    that times out stops its servers too."""
    done = run(tmp_path, "graph", SIM="1", LIMIT=limit)
    assert done.returncode == code, done.stdout + done.stderr
    assert processes_below(tmp_path) == []
    if not code:
        assert "x-pdserve-prefill: remote" in done.stdout
        assert "same: 20 of 20 answers" in done.stdout
        assert done.stdout.count("measured: stopped after") == 2


@pytest.mark.timeout(600)
def test_ctrl_c_stops_a_part_and_what_it_started(tmp_path: Path) -> None:
    """`env` restores SIGINT, which processes of a background shell ignore."""
    command = ["env", "--default-signal=INT", SCRIPT, str(tmp_path), "graph", "float32"]
    with Terminal(command, variables(SIM="1")) as terminal:
        terminal.until("measured: ready")
        terminal.type("\x03")
        terminal.until("the exit code is 130")
    assert "== float32" not in terminal.text
    assert processes_below(tmp_path) == []
