"""What a process is called, and what it has spent."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from pdserve_bench.systems.cpu import CpuMeter, CpuReading, label, name_of

PYTHON = "/work/.venv/bin/python"
SHELL = ("bash", ["bash"])
SERVE = ("python", [PYTHON, "-m", "pdserve", "serve", "-f", "/tmp/x/graph.yaml"])
DECODE = ("python", [PYTHON, "-m", "pdserve", "decode", "-f", "/tmp/x/graph.yaml"])
INSTALLED = ("pdserve", [PYTHON, "/work/.venv/bin/pdserve", "prefill", "-f", "graph.yaml"])
SERVER = (
    "python",
    [PYTHON, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", "/models/pdserve"],
)
CORE = ("VLLM::EngineCore", ["VLLM::EngineCore", "", ""])
CORE_DP = ("VLLM::EngineCore_DP1", ["VLLM::EngineCore_DP1"])
WORKER = ("VLLM::Worker", ["VLLM::Worker", "", ""])
WORKER_TP = ("VLLM::Worker_PP0_TP1", ["VLLM::Worker_PP0_TP1"])
TRACKER = ("python", [PYTHON, "-B", "-c", "from multiprocessing.resource_tracker import main;main(20)"])
GUARDIAN = ("python", [PYTHON, "-I", "-S", "/work/pdserve/supervisor/guardian.py", "40.0"])


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([SERVE, SHELL], "supervisor"),
        ([GUARDIAN, SERVE, SHELL], "guardian"),
        (
            [("nats-server", ["/venv/bin/nats-server", "--config", "/x/pdserve/nats.conf"]), SERVE],
            "nats-server",
        ),
        ([("etcd", ["/venv/etcd", "--name=pdserve"]), SERVE], "etcd"),
        ([DECODE, SERVE, SHELL], "decode"),
        ([INSTALLED, SERVE], "prefill"),
        ([CORE, DECODE, SERVE], "decode EngineCore"),
        ([WORKER, CORE, DECODE, SERVE], "decode VllmWorker"),
        ([WORKER_TP, CORE, INSTALLED], "prefill VllmWorker"),
        ([TRACKER, DECODE, SERVE], "decode resource tracker"),
        ([SERVER, SHELL], "vllm server"),
        ([CORE_DP, SERVER], "vllm EngineCore"),
        ([WORKER, CORE, SERVER, SHELL], "vllm VllmWorker"),
        ([WORKER], "vllm VllmWorker"),
        ([SHELL], "bash"),
    ],
)
def test_labels(chain: list[tuple[str, list[str]]], expected: str) -> None:
    """Names and command lines as they were seen on vLLM 0.32, CPU."""
    assert name_of(chain) == expected


def test_a_meter_reads_what_was_spent_in_between() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            meter = CpuMeter([psutil.Process(child.pid), psutil.Process(os.getpid())])
            before = meter.read()
            while meter.read().since(before).total < 0.3:
                time.sleep(0.05)
        finally:
            child.kill()
    spent = meter.read().since(before)
    assert spent.seconds[label(psutil.Process())] >= 0
    assert spent.total >= 0.3, "the child has ended, but what it spent stays"
    assert 0.3 <= spent.at < 60


def test_the_same_kind_is_added_up() -> None:
    before, after = CpuReading({"decode": 1.0}, at=10.0), CpuReading({"decode": 2.5, "etcd": 0.5}, at=12.0)
    assert after.since(before) == CpuReading({"decode": 1.5, "etcd": 0.5}, at=2.0)
    assert after.since(before).total == 2.0
