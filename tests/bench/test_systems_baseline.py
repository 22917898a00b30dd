"""The baseline that is made of a graph's file: the same engine, with all the hardware of the graph."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from pdserve_bench.simulated import simulated, write
from pdserve_bench.systems.aggregated import (
    Baseline,
    Layout,
    batches,
    layouts,
    simulated_sections,
    vllm_arguments,
)
from pdserve_bench.systems.contest import graph_contestants
from pdserve_bench.systems.system import GraphSystem, PlainVllm

from pdserve.config.load import load
from pdserve.errors import ConfigError
from pdserve.plan.machine import Machine, what_if
from pdserve.plan.plan import Plan, make_plan

ROOT = Path(__file__).parent.parent.parent
HERE = Machine((), cores=8, memory=64 << 30, available=60 << 30, build="cpu")
ENGINES = {"engine": "vllm", "max-num-seqs": 16}


def plan_of(file: Path, gpus: str = "0") -> Plan:
    return make_plan(load(file, {}), what_if(gpus, HERE), env={})


def on_gpus(folder: Path, count: int, tensor: int, gpus: str, **more: object) -> Plan:
    worker = {"engine": "vllm", "tensor-parallel-size": tensor, "ServiceArgs": {"workers": count}, **more}
    return plan_of(write(simulated(decode=worker, prefill=worker), folder / "gpus.yaml"), gpus)


def test_on_a_cpu_host_one_engine_has_all_cores_and_the_kv_space_of_all_workers() -> None:
    plan = plan_of(ROOT / "configs/local.yaml")
    assert layouts(plan) == [Layout(threads=7), Layout(threads=8)]
    system = Baseline(plan, Layout(), 512, dtype="float32").system("base")
    assert isinstance(system, PlainVllm)
    words = " ".join(system.arguments)
    for word in ("block-size=32", "max-model-len=4096", "enforce-eager", "dtype=float32", "max-num-seqs=64"):
        assert f"--{word}" in words, words
    assert "--max-num-batched-tokens=512" in words
    assert (system.variables["OMP_NUM_THREADS"], system.variables["VLLM_CPU_KVCACHE_SPACE"]) == ("8", "2")
    assert system.served == "demo"
    fewer = Baseline(plan, Layout(threads=7), 512).system("base")
    assert isinstance(fewer, PlainVllm)
    assert fewer.variables["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("count", "tensor", "gpus", "expected"),
    [
        (1, 1, "2xA10", [Layout(1, 2), Layout(2, 1)]),
        (2, 1, "4xA10", [Layout(1, 4), Layout(4, 1)]),
        (1, 2, "4xA10", [Layout(2, 2), Layout(4, 1)]),
        (3, 1, "6xA10", [Layout(1, 6)]),  # not over 6: few models have heads for that
    ],
)
def test_gpus_are_used_by_replicas_or_by_one_engine(
    tmp_path: Path, count: int, tensor: int, gpus: str, expected: list[Layout]
) -> None:
    plan = on_gpus(tmp_path, count, tensor, gpus)
    assert layouts(plan) == expected
    for layout in expected:
        system = Baseline(plan, layout, None).system("base")
        assert isinstance(system, PlainVllm)
        assert system.variables["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(int(gpus[0]))))
        words = " ".join(system.arguments)
        assert ("--tensor-parallel-size" in words) == (layout.tensor > 1)
        assert ("--data-parallel-size" in words) == (layout.replicas > 1)
        assert "OMP_NUM_THREADS" not in system.variables


def test_workers_that_share_a_gpu_leave_their_shares_to_the_baseline(tmp_path: Path) -> None:
    resources = {"workers": 1, "resources": {"gpu-ids": [0]}}
    plan = on_gpus(tmp_path, 1, 1, "1xH100", **{"ServiceArgs": resources, "gpu-memory-utilization": 0.4})
    assert layouts(plan) == [Layout()]
    assert vllm_arguments(plan, Layout(), None)["gpu-memory-utilization"] == 0.8


@pytest.mark.parametrize(
    ("asked", "seqs", "expected"),
    [((), 16, [256, 2048, 8192]), ((), 200, [2048, 8192]), ((64, 512), 16, [64, 512])],
)
def test_batches_that_vllm_takes(
    tmp_path: Path, asked: Sequence[int], seqs: int, expected: list[int]
) -> None:
    """max-num-batched-tokens may not be below max-num-seqs, which is that of both workers together."""
    worker = {**ENGINES, "max-num-seqs": seqs}
    plan = plan_of(write(simulated(decode=worker, prefill=worker), tmp_path / "real.yaml"))
    assert batches(plan, asked) == expected


def test_a_batch_that_vllm_would_not_take(tmp_path: Path) -> None:
    plan = plan_of(write(simulated(decode=ENGINES, prefill=ENGINES), tmp_path / "real.yaml"))
    with pytest.raises(ConfigError, match=r"--batch 16: .* below max-num-seqs 32"):
        batches(plan, [16, 64])


def test_simulated_workers_are_as_many_as_those_of_the_graph(tmp_path: Path) -> None:
    """And what only the prefill workers' section took from Common is gone, or the file would be wrong."""
    sections = simulated({"step-seconds": 0.01}, prefill={"ServiceArgs": {"workers": 2}}, common={"seed": 7})
    sections["VllmWorker"]["common-configs"] = ["model", "block-size", "max-model-len"]
    plan = plan_of(write(sections, tmp_path / "sim.yaml"))
    config = load(write(simulated_sections(plan, 512), tmp_path / "base.yaml"), {})
    assert config.decode is not None
    assert (config.decode.count, config.decode.remote_prefill, config.prefill) == (3, False, None)
    assert config.decode.engine_args["max-num-batched-tokens"] == 512
    assert config.decode.engine_args["additional-config"] == {"sim": {"step-seconds": 0.01}}
    assert "seed" not in config.decode.engine_args
    system = Baseline(plan, Layout(), None).system("base")
    assert isinstance(system, GraphSystem)


@pytest.mark.parametrize(
    ("decode", "expected", "note"),
    [
        ({}, ["pdserve local", "pdserve remote", "pdserve"], ""),
        ({"conditional-disagg": False}, ["pdserve remote"], "conditional-disagg is false"),
    ],
)
def test_a_graph_takes_part_under_several_settings(
    tmp_path: Path, decode: dict[str, object], expected: list[str], note: str
) -> None:
    config = load(write(simulated(decode=decode), tmp_path / "sim.yaml"), {})
    contestants, notes = graph_contestants(config)
    assert [each.name for each in contestants] == expected
    assert {each.system for each in contestants} == {"pdserve"}
    assert note in " ".join(notes)


def test_a_graph_without_prefill_workers_takes_part_once(tmp_path: Path) -> None:
    sections = simulated(decode={"remote-prefill": False})
    del sections["PrefillWorker"]
    contestants, notes = graph_contestants(load(write(sections, tmp_path / "sim.yaml"), {}))
    assert [(each.name, each.settings) for each in contestants] == [("pdserve", None)]
    assert notes
