"""Files of Dynamo 0.1 to 0.3 load; keys without a meaning in pdserve are noted."""

import os
from pathlib import Path

import pytest

from pdserve.config.load import load
from pdserve.plan.plan import make_plan
from tests.config.test_load import problems, read, workers
from tests.plan.models import machine

FILE = """\
Common:
  model: demo
  block-size: 64
  max-model-len: 4096
  router: kv
  kv-transfer-config: '{"kv_connector":"DynamoNixlConnector"}'
Frontend:
  served_model_name: chat
  endpoint_chat: dynamo.Processor.chat/completions
  endpoint_completions: dynamo.Processor.completions
  port: 8001
Processor:
  router-num-threads: 4
  common-configs: [model, block-size, max-model-len, router]
Router:
  model-name: demo
  min-workers: 1
  common-configs: [model, block-size, router]
VllmWorker:
  remote-prefill: true
  conditional-disagg: true
  max-local-prefill-length: 10
  max-prefill-queue-size: 2
  min-workers: 1
  ServiceArgs:
    workers: 1
    resources: {gpu: '1', cpu: '10', memory: 20Gi}
  common-configs: [model, block-size, max-model-len, router, kv-transfer-config]
PrefillWorker:
  priority-queue: shortest
  ServiceArgs:
    workers: 2
    resources: {gpu: '1'}
  common-configs: [model, block-size, max-model-len, kv-transfer-config]
Planner:
  environment: local
  no-operation: true
"""
WITHOUT_ROUTER = FILE.replace("max-model-len, router", "max-model-len").replace("  router: kv\n", "")
SAMPLES = Path(__file__).parents[4] / "shared/reference/files"
"""Dynamo files written by others, kept outside the repository"""


def notes(folder: Path, text: str) -> list[str]:
    return [note.split("graph.yaml:", 1)[1] for note in read(folder, text).notes]


def test_keys_without_a_meaning_are_noted_and_change_nothing(tmp_path: Path) -> None:
    config = read(tmp_path, FILE)
    decode, prefill = workers(config)
    assert config.frontend is not None
    assert (config.frontend.router, config.frontend.port, config.served_model_name) == ("kv", 8001, "chat")
    assert (decode.gpus, decode.max_local_prefill_length, decode.max_prefill_queue_size) == (1, 10, 2)
    assert (decode.policy, prefill.count) == ("threshold", 2)
    assert decode.engine_args == prefill.engine_args == {"block-size": 64, "max-model-len": 4096}
    said = " ".join(config.notes)
    for key in (
        "Frontend.endpoint_chat",
        "Frontend.endpoint_completions",
        "Processor.router-num-threads",
        "Router",
        "VllmWorker.min-workers",
        "VllmWorker.ServiceArgs.resources.cpu",
        "VllmWorker.ServiceArgs.resources.memory",
        "PrefillWorker.priority-queue",
        "Planner",
    ):
        assert f": {key} has no meaning here: " in said
    assert len(config.notes) == 9 + 1  # one more: the note about the connector
    assert not make_plan(config, machine(*[("A10", 24)] * 3), env={}).problems


@pytest.mark.parametrize(
    ("text", "router", "said"),
    [
        (FILE, "kv", None),
        (
            WITHOUT_ROUTER.replace("VllmWorker:\n", "VllmWorker:\n  router: kv\n"),
            "kv",
            "means Processor.router here.",
        ),
        (
            FILE.replace("Processor:\n", "Processor:\n  router: round-robin\n"),
            "round-robin",
            None,
        ),
        (FILE.replace("router: kv", "router: random"), "round-robin", ": random means round-robin here."),
        (FILE.replace("router: kv", "router: kv-load"), "least-loaded", ": kv-load means least-loaded here."),
        (
            FILE.replace(
                "Processor:\n  router-num-threads: 4\n  common", "Processor:\n  router: kv\n  common"
            ),
            "kv",
            None,
        ),
        (FILE.replace("max-model-len, router]", "max-model-len]"), "kv", "means Processor.router here."),
    ],
)
def test_the_frontend_gets_the_router_of_the_file(
    tmp_path: Path, text: str, router: str, said: str | None
) -> None:
    config = read(tmp_path, text)
    assert config.frontend is not None
    assert config.frontend.router == router
    about = [
        note for note in notes(tmp_path, text) if "outer" in note and " has no meaning here: " not in note
    ]
    assert not about if said is None else said in " ".join(about)


def test_a_wrong_router_is_still_a_problem(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, FILE.replace("router: kv", "router: nearest"))
    assert "Common.router is 'nearest', but must be one of: " in problem


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("router: kv", "router: kv\n  swap-space: 4", "Common.swap-space has no effect: no section lists it"),
        (
            "max-model-len, kv-transfer-config]",
            "max-model-len, enforce-eager]",
            "lists enforce-eager, which Common",
        ),
        ("  port: 8001", "  port: 8001\n  model: demo", "Frontend.model has no meaning here: "),
        (
            "  priority-queue: shortest",
            "  max-local-prefill-length: 10",
            "PrefillWorker.max-local-prefill-length has",
        ),
        ("  priority-queue: shortest", "  enable-reasoning: true", "vLLM removed it in 0.10."),
        (
            "    workers: 2",
            "    workers: 2\n    worker-env: [A=1]",
            "PrefillWorker.ServiceArgs.worker-env has no",
        ),
    ],
)
def test_what_dynamo_ignored_is_noted(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in " ".join(notes(tmp_path, FILE.replace(old, new)))


def test_mock_workers_are_simulated(tmp_path: Path) -> None:
    text = FILE.replace("VllmWorker:", "MockVllmWorker:").replace("PrefillWorker:", "MockPrefillWorker:")
    decode, prefill = workers(read(tmp_path, text))
    assert (decode.engine, prefill.engine, prefill.count) == ("sim", "sim", 2)


def test_section_names_of_vllm_v1_examples_load(tmp_path: Path) -> None:
    """Dynamo 0.3 has other section names in `examples/vllm_v1`."""
    common = "  common-configs: [model, kv-transfer-config, served_model_name]\n"
    text = (
        "Common:\n  model: demo\n  served_model_name: chat\n"
        "  kv-transfer-config: {kv_connector: NixlConnector, kv_role: kv_both}\n"
        "Frontend:\n  endpoint: dynamo.SimpleLoadBalancer.generate\n  port: 8001\n"
        "  common-configs: [served_model_name]\n"
        f"SimpleLoadBalancer:\n  enable_disagg: true\n{common}"
        f"VllmPrefillWorker:\n  enforce-eager: true\n{common}VllmDecodeWorker:\n  enforce-eager: true\n{common}"
        "Prometheus:\n  global: {scrape_interval: 5s}\n"
    )
    config = read(tmp_path, text)
    decode, prefill = workers(config)
    assert config.frontend is not None
    assert (config.served_model_name, config.frontend.port) == ("chat", 8001)
    assert decode.remote_prefill
    assert decode.engine_args == prefill.engine_args == {"enforce-eager": True}


@pytest.mark.parametrize("key", ["block-size: 128", "tensor-parallel-size: 8"])
def test_a_workers_argument_in_the_processor_is_noted(tmp_path: Path, key: str) -> None:
    text = FILE.replace("  router-num-threads: 4\n", f"  {key}\n").replace(
        "Processor:\n", "Processor:\n  model: demo\n"
    )
    assert f"Processor.{key.split(':')[0]} has no meaning here: set it in the worker's section" in " ".join(
        notes(tmp_path, text)
    )


def test_a_removed_argument_is_refused_with_its_replacement(tmp_path: Path) -> None:
    text = FILE.replace(
        "  priority-queue: shortest", "  rope-scaling: '{}'\n  guided-decoding-backend: xgrammar"
    )
    first, second = problems(tmp_path, text)
    assert first.endswith(
        'rope-scaling was removed by vLLM in 0.11: set hf-overrides, as in {"rope_parameters": '
        '{"rope_type": "yarn", "factor": 4.0}}.'
    )
    assert second.endswith("was removed by vLLM in 0.11: set structured-outputs-config.")


def test_a_decode_worker_alone_needs_named_servers(tmp_path: Path) -> None:
    text = "VllmWorker: {model: demo, remote-prefill: true}\n"
    [problem] = problems(tmp_path, text)
    assert "Graph.nats and Graph.etcd" in problem
    servers = {"PDSERVE_NATS": "nats://127.0.0.1:4222", "PDSERVE_ETCD": "127.0.0.1:2379"}
    config = read(tmp_path, text, servers)
    assert config.frontend is None
    assert config.decode is not None
    assert config.decode.remote_prefill
    assert config.prefill is None


def test_a_dynamo_file_without_a_frontend_gets_one(tmp_path: Path) -> None:
    assert read(tmp_path, "VllmWorker: {model: demo}\n").frontend is None, "not a Dynamo file"
    config = read(tmp_path, "VllmWorker: {model: demo, router: round-robin}\n")
    assert config.frontend is not None
    assert config.frontend.port == 8000
    assert "there is no Frontend section" in config.notes[-1]


def test_prefill_workers_may_take_shorter_prompts(tmp_path: Path) -> None:
    text = FILE.replace("priority-queue: shortest", "max-model-len: 2048")
    decode, prefill = workers(read(tmp_path, text))
    assert (decode.engine_args["max-model-len"], prefill.engine_args["max-model-len"]) == (4096, 2048)
    assert not prefill.stand_in
    assert "longer prompts are prefilled locally" in " ".join(notes(tmp_path, text))
    [problem] = problems(tmp_path, text.replace("PrefillWorker:", "PrefillWorker:\n  stand-in: true"))
    assert problem.endswith("set stand-in: false, or the same length in both.")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  model: demo\n  block", "  block", "has no model: set it in Common"),
        ("  priority-queue: shortest", "  model: other/name", "the KV of one model means nothing to another"),
        ("gpu: '1', cpu", "gpu: '4', cpu", "set tensor-parallel-size: 4 or gpu: 1."),
        ("  remote-prefill: true\n", "", "set remote-prefill: true in VllmWorker, or remove this section."),
    ],
)
def test_refused_keys_say_what_to_write(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in " ".join(problems(tmp_path, FILE.replace(old, new)))


@pytest.mark.parametrize(("size", "said"), [(16, "set nnodes"), (3, "see pdserve plan --role")])
def test_a_lack_of_gpus_is_reported_with_advice(tmp_path: Path, size: int, said: str) -> None:
    sized = FILE.replace("gpu: '1'", f"gpu: '{size}'").replace(
        "  router: kv", f"  tensor-parallel-size: {size}"
    )
    config = read(
        tmp_path,
        sized.replace("max-model-len", "max-model-len, tensor-parallel-size")
        .replace("tensor-parallel-size: 4096", "max-model-len: 4096")
        .replace(", router", ""),
    )
    [problem] = [
        each for each in make_plan(config, machine(*[("A10", 24)] * 4), env={}).problems if "GPU" in each
    ]
    assert said in problem


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="needs the samples that are not part of the repository")
def test_dynamo_files_of_other_people_get_a_plan() -> None:
    found = sorted(SAMPLES.glob("dynamo-*.yaml"))
    assert len(found) >= 4
    for path in found:
        if path.name == "dynamo-462.yaml":  # refused: a PrefillWorker without remote-prefill
            continue
        assert make_plan(load(path, dict(os.environ)), machine(*[("A100-80GB", 80)] * 4), env={}).slots
