"""The candidates of a comparison use the same hardware."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pdserve_bench.compare.candidates import Candidate, CandidateMaker, hardware, unequal
from pdserve_bench.compare.systems import PlainVllm
from pdserve_bench.graphs.sections import read_sections, reshape
from pdserve_bench.graphs.simulated import simulated, write

from pdserve.config.load import load
from pdserve.plan.machine import Gpu, Machine, what_if
from pdserve.plan.model_folder import ModelFacts
from pdserve.plan.plan import make_plan
from tests.plan.models import QWEN_14B, qwen_14b

CONFIGS = Path(__file__).parents[3] / "configs"
CPU = Machine((), cores=4, memory=2**35, build="cpu")
GPUS = Machine(tuple(Gpu(number, "A10", 22 * 2**30) for number in range(4)), 16, 2**37)
SMALL = ModelFacts(Path(), 2, 8, 2, 64, 512, 2048, 1000, 4096, "bfloat16", {"BF16": 2**20})


def maker(file: Path, machine: Machine, model: ModelFacts | None = None) -> CandidateMaker:
    config = load(file, {})
    return CandidateMaker(config, read_sections(file), hardware(config, machine), machine, model)


def made(maker: CandidateMaker) -> list[Candidate]:
    return [*maker.aggregated(), *maker.disaggregated()]


def names(candidates: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in candidates]


@pytest.mark.parametrize(
    ("file", "machine"), [("local.yaml", CPU), ("disagg.yaml", GPUS), ("agg.yaml", GPUS)]
)
def test_each_candidate_is_a_file_that_can_be_served(file: str, machine: Machine, tmp_path: Path) -> None:
    found = maker(CONFIGS / file, machine, SMALL)
    for candidate in made(found):
        changed = load(write(reshape(found.base, candidate.shape), tmp_path / "changed.yaml"), {})
        assert changed.decode is not None
        assert changed.decode.count == candidate.shape.decode
        assert (changed.prefill.count if changed.prefill else 0) == candidate.shape.prefill
        assert changed.decode.remote_prefill == (not candidate.aggregated)
        assert changed.decode.engine == "vllm"


def test_on_the_cpu_engines_share_the_threads() -> None:
    candidates = made(maker(CONFIGS / "local.yaml", CPU))
    assert names(candidates) == [
        "aggregated: 1 engine x 3 threads",
        "aggregated: 1 engine x 4 threads",
        "aggregated: 1 engine x 3 threads, batch 512",
        "aggregated: 2 engines x 2 threads",
        "1 prefill + 1 decode",
    ]
    system = candidates[2].system
    assert isinstance(system, PlainVllm)
    assert system.variables["OMP_NUM_THREADS"] == "3"
    assert "--max-num-batched-tokens=512" in system.arguments
    words = " ".join(system.arguments)
    for word in ("block-size=32", "max-model-len=4096", "enforce-eager", "max-num-seqs=64"):
        assert f"--{word}" in words, words
    assert system.variables["VLLM_CPU_KVCACHE_SPACE"] == "2", "the sum of both workers"
    assert system.served == "demo"


def test_an_engine_has_all_gpus_if_they_divide_its_heads() -> None:
    (engine, *_) = maker(CONFIGS / "disagg.yaml", GPUS, SMALL).aggregated()
    assert engine.name.startswith("aggregated: 1 engine x 4 GPUs")
    system = engine.system
    assert isinstance(system, PlainVllm)
    assert system.variables["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert "OMP_NUM_THREADS" not in system.variables
    assert "--tensor-parallel-size=4" in system.arguments
    odd = ModelFacts(Path(), 2, 6, 3, 64, 384, 1024, 1000, 4096, "bfloat16", {})
    assert not any("1 engine" in name for name in names(made(maker(CONFIGS / "disagg.yaml", GPUS, odd))))


@pytest.mark.parametrize(("keys", "share"), [("gpu-memory-utilization: 0.4", 0.8), ("max-num-seqs: 8", 0.92)])
def test_one_engine_gets_the_gpu_memory_of_all_workers_on_the_gpu(
    tmp_path: Path, keys: str, share: float
) -> None:
    worker = f"model: demo, {keys}, ServiceArgs: {{resources: {{gpu: 0.5}}}}"
    file = tmp_path / "shared.yaml"
    file.write_text(
        f"Frontend: {{}}\nVllmWorker: {{remote-prefill: true, {worker}}}\nPrefillWorker: {{{worker}}}\n"
    )
    found = maker(file, replace(GPUS, gpus=GPUS.gpus[:1]), SMALL)
    assert found.here.units == 1
    engines = [each.system for each in found.aggregated() if isinstance(each.system, PlainVllm)]
    assert engines
    assert all(f"--gpu-memory-utilization={share}" in engine.arguments for engine in engines)


def test_a_single_engine_is_halved_into_prefill_and_decode() -> None:
    found = maker(CONFIGS / "agg.yaml", GPUS, SMALL)
    (separate,) = found.disaggregated()
    sections = reshape(found.base, separate.shape)
    assert sections["PrefillWorker"]["tensor-parallel-size"] == 2
    assert sections["VllmWorker"]["tensor-parallel-size"] == 2
    assert sections["VllmWorker"]["ServiceArgs"] == {"workers": 1, "resources": {"gpu": 2}}


def workers(folder: Path, prefill: int, decode: int, *ranks: int) -> dict[str, dict[str, object]]:
    """Return a graph file's sections with these workers, for a model of 27.5 GiB with 8 KV heads. Without prefill
    workers, decode workers prefill. `ranks`: ranks of a prefill worker and of a decode worker (default 1, 1)."""

    def worker(count: int, size: int) -> dict[str, object]:
        keys = {
            "model": str(folder),
            "max-model-len": 10240,
            "max-num-seqs": 20,
            "tensor-parallel-size": size,
        }
        return {**keys, "ServiceArgs": {"workers": count}}

    narrow, wide = ranks or (1, 1)
    found = {"Frontend": {}, "VllmWorker": worker(decode, wide) | {"remote-prefill": bool(prefill)}}
    return found | ({"PrefillWorker": worker(prefill, narrow)} if prefill else {})


@pytest.mark.parametrize(
    ("gpus", "split", "change", "expected"),
    [
        ("4xH100", (0, 1, 1, 4), {}, ["2Px1+1Dx2", "1Px2+2Dx1"]),
        ("8xH100", (4, 4), {}, ["4Px1+2Dx2", "2Px2+4Dx1"]),
        ("8xH100", (1, 3), {}, ["2Px1+1Dx2", "1Px2+2Dx1"]),  # the file uses four GPUs
        ("3xH100", (1, 1, 1, 2), {}, ["1Px2+1Dx1"]),  # the other split is the file's own
        ("8xA10", (2, 2, 2, 2), {}, ["2Px2+1Dx4", "1Px4+2Dx2"]),  # the weights do not fit on one GPU
        ("4xA10", (1, 1, 2, 2), {}, []),
        ("2xH100", (1, 1), {}, []),
        # decode ranks may have copies of KV heads
        ("4xH100", (2, 2), {"num_key_value_heads": 1, "num_attention_heads": 8}, ["2Px1+1Dx2"]),
        ("4xH100", (2, 2), {"num_key_value_heads": 5, "num_attention_heads": 5, "hidden_size": 640}, []),
    ],
)
def test_on_gpus_the_roles_get_unequal_ranks(
    tmp_path: Path, gpus: str, split: tuple[int, ...], change: dict[str, int], expected: list[str]
) -> None:
    folder = qwen_14b(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(QWEN_14B | change))
    file = write(workers(folder, *split), tmp_path / "file.yaml")
    found = maker(file, what_if(gpus, GPUS)).disaggregated()
    assert list(dict.fromkeys(each.split for each in found if "x" in each.split)) == expected


def test_unequal_ranks_come_after_the_files_own_split(tmp_path: Path) -> None:
    on = what_if("4xH100", GPUS)
    made = maker(write(workers(qwen_14b(tmp_path / "model"), 2, 2), tmp_path / "file.yaml"), on)
    found = made.disaggregated()
    assert names(found) == [
        "2 prefill + 2 decode",
        "2 prefill x 1 GPU + 1 decode x 2 GPUs",
        "1 prefill x 2 GPUs + 2 decode x 1 GPU",
        "1 prefill + 3 decode",
        "3 prefill + 1 decode",
    ]
    for candidate in found:
        changed = load(write(reshape(made.base, candidate.shape), tmp_path / "changed.yaml"), {})
        assert make_plan(changed, on, env={}).problems == ()
        used = sum(worker.count * worker.ranks for worker in (changed.decode, changed.prefill) if worker)
        assert used == 4


@pytest.mark.parametrize("key", ["pipeline-parallel-size", "nnodes"])
def test_workers_with_pipeline_stages_or_several_hosts_keep_their_ranks(tmp_path: Path, key: str) -> None:
    sections = workers(qwen_14b(tmp_path / "model"), 0, 1, 1, 4)
    sections["VllmWorker"][key] = 2
    assert unequal(load(write(sections, tmp_path / "file.yaml"), {}), what_if("8xH100", GPUS), 8) == []


@pytest.mark.parametrize("decode", [{"max-local-prefill-length": 0}, {"conditional-disagg": False}])
def test_a_split_keeps_the_files_policy_for_remote_prefill(tmp_path: Path, decode: dict[str, object]) -> None:
    file = write(simulated(decode=decode), tmp_path / "sim.yaml")
    found = maker(file, CPU)
    (split,) = found.disaggregated()
    changed = load(write(reshape(found.base, split.shape), tmp_path / "changed.yaml"), {}).decode
    own = load(file, {}).decode
    assert changed is not None
    assert own is not None
    assert changed.remote_prefill
    for name in ("policy", "max_local_prefill_length", "conditional_disagg"):
        assert getattr(changed, name) == getattr(own, name)


def test_batch_sizes_are_not_below_vllms_minimum(tmp_path: Path) -> None:
    sections = read_sections(CONFIGS / "local.yaml")
    sections["VllmWorker"] |= {"max-num-seqs": 256, "max-num-batched-tokens": 1024}
    found = maker(write(sections, tmp_path / "file.yaml"), CPU)
    # vLLM's minimum is the engine's max-num-seqs: 288, the sum of the decode worker's 256 and the prefill worker's 32
    assert {candidate.shape.batch for candidate in found.aggregated()} == {1024, 512}
