"""The loader: good files, and the error texts of bad ones."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from pdserve.config.adapters import most_adapters, static_adapters
from pdserve.config.load import load
from pdserve.config.schema import (
    ENGINES,
    Config,
    DecodeConfig,
    FrontendConfig,
    PrefillConfig,
    SecuritySection,
)
from pdserve.demo import MODEL_DIR
from pdserve.engine import spec
from pdserve.errors import ConfigError
from pdserve.slo import Promised

GOOD = """\
Common:
  model: demo
  block-size: 32
Frontend:
  port: 8000
VllmWorker:
  remote-prefill: true
  common-configs: [model, block-size]
PrefillWorker:
  common-configs: [model, block-size]
"""

DYNAMO = """\
Common:
  model: /mnt/DeepSeek-R1-Distill-Qwen-14B
  block-size: 64
  max-model-len: 10240
  kv-transfer-config: '{"kv_connector":"DynamoNixlConnector"}'

Frontend:
  served_model_name: RAG_LLM
  endpoint: dynamo.Processor.chat/completions
  port: 8009

Processor:
  router: round-robin
  common-configs: [model, block-size]

VllmWorker:
  remote-prefill: true
  conditional-disagg: true
  max-local-prefill-length: 1
  max-prefill-queue-size: 10
  max-num-seqs: 20
  enable-prefix-caching: true
  tensor-parallel-size: 2
  ServiceArgs:
    workers: 1
    resources:
      gpu: 2
  common-configs: [model, block-size, max-model-len, kv-transfer-config]

PrefillWorker:
  max-num-batched-tokens: 32768
  tensor-parallel-size: 2
  enable-prefix-caching: true
  max-num-seqs: 20
  ServiceArgs:
    workers: 1
    resources:
      gpu: 2
  common-configs: [model, block-size, max-model-len, kv-transfer-config]
"""
"""reference/dynamo-0.2-disagg.yaml, to the letter but for its first comment"""


def read(folder: Path, text: str, env: dict[str, str] | None = None) -> Config:
    path = folder / "graph.yaml"
    path.write_text(text)
    return load(path, env or {})


def workers(config: Config) -> tuple[DecodeConfig, PrefillConfig]:
    assert config.decode is not None
    assert config.prefill is not None
    return config.decode, config.prefill


def problems(folder: Path, text: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(folder, text, env)
    return [problem.replace(str(folder / "graph.yaml"), "FILE") for problem in caught.value.problems]


def frontend(keys: str) -> str:
    return GOOD.replace("port: 8000", keys)


def worker(keys: str) -> str:
    return GOOD.replace("remote-prefill: true", f"remote-prefill: true\n  {keys}")


def prefill(keys: str) -> str:
    return GOOD.replace("PrefillWorker:\n", f"PrefillWorker:\n  {keys}\n")


def test_a_dynamo_file_runs_unchanged(tmp_path: Path) -> None:
    config = read(tmp_path, DYNAMO)
    assert config.model == "/mnt/DeepSeek-R1-Distill-Qwen-14B"
    assert config.served_model_name == "RAG_LLM"
    assert config.frontend is not None
    assert (config.frontend.port, config.frontend.router, config.frontend.processes) == (
        8009,
        "round-robin",
        1,
    )
    decode, prefill = workers(config)
    assert (decode.count, decode.gpus, decode.ranks, prefill.count, prefill.gpus) == (1, 2, 2, 1, 2)
    assert (decode.remote_prefill, decode.conditional_disagg) == (True, True)
    assert (decode.max_local_prefill_length, decode.max_prefill_queue_size) == (1, 10)
    common = {"block-size": 64, "max-model-len": 10240}
    both = {"tensor-parallel-size": 2, "enable-prefix-caching": True, "max-num-seqs": 20}
    assert decode.engine_args == {**common, **both}
    assert prefill.engine_args == {**common, **both, "max-num-batched-tokens": 32768}
    assert decode.origins["block-size"] == "Common"
    assert decode.origins["max-num-seqs"] == "VllmWorker"


def test_limits(tmp_path: Path) -> None:
    limits = "{port: 8000, max-wait: 2.5, max-waiting: 7, max_waiting_tokens: 90, max-outputs: 3}"
    found = read(tmp_path, GOOD.replace("Frontend:\n  port: 8000", f"Frontend: {limits}")).frontend
    assert found == FrontendConfig(max_wait=2.5, max_waiting=7, max_waiting_tokens=90, max_outputs=3)
    assert read(tmp_path, GOOD).frontend == FrontendConfig()


def test_reinterpreted_keys_give_one_note_each(tmp_path: Path) -> None:
    notes = read(tmp_path, DYNAMO).notes
    assert len(notes) == 2
    assert any(
        "graph.yaml:5: Common.kv-transfer-config: DynamoNixlConnector means pdserve's own" in n for n in notes
    )
    assert any("graph.yaml:9: Frontend.endpoint has no meaning here" in n for n in notes)


def test_our_disagg_means_what_the_dynamo_file_does(tmp_path: Path) -> None:
    ours = load(Path(__file__).parents[2] / "configs" / "disagg.yaml", {})
    theirs = read(tmp_path, DYNAMO)
    aside = {"path": None, "notes": None}
    assert {**asdict(ours), **aside} == {**asdict(theirs), **aside}


def test_an_aggregated_graph_needs_no_prefill_worker(tmp_path: Path) -> None:
    config = read(tmp_path, "Frontend: {port: 80}\nVllmWorker: {model: demo}\n")
    assert config.prefill is None
    assert config.decode is not None
    assert not config.decode.remote_prefill
    assert config.model == str(MODEL_DIR)
    assert config.served_model_name == "demo"


def test_keys_may_be_snake_case_or_kebab_case(tmp_path: Path) -> None:
    text = GOOD.replace("port: 8000", "port: 8000\n  served_model_name: x").replace(
        "block-size", "block_size"
    )
    config = read(tmp_path, text)
    assert config.served_model_name == "x"
    assert workers(config)[0].engine_args == {"block-size": 32}


def test_a_section_wins_over_common(tmp_path: Path) -> None:
    text = GOOD.replace("block-size: 32\nF", "block-size: 32\n  max-num-seqs: 8\nF").replace(
        "remote-prefill: true\n  common-configs: [",
        "remote-prefill: true\n  max-num-seqs: 4\n  common-configs: [max-num-seqs, ",
    )
    decode, _ = workers(read(tmp_path, text))
    assert (decode.engine_args["max-num-seqs"], decode.origins["max-num-seqs"]) == (4, "VllmWorker")


def test_no_host_memory_may_be_written_as_a_plain_zero(tmp_path: Path) -> None:
    decode = read(tmp_path, worker("kv-offload: 0")).decode
    assert decode is not None
    assert decode.kv_offload == 0


def test_yaml_anchors_and_merges_work(tmp_path: Path) -> None:
    text = (
        "PrefillWorker: &worker\n  model: demo\n  max-num-seqs: 4\n  ServiceArgs: {workers: 2}\n"
        "VllmWorker:\n  <<: *worker\n  max-num-seqs: 8\n  remote-prefill: true\n"
    )
    config = read(tmp_path, text)
    decode, prefill = workers(config)
    assert (decode.count, prefill.count) == (2, 2)
    assert decode.engine_args == {"max-num-seqs": 8}
    assert prefill.engine_args == {"max-num-seqs": 4}


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        ("", "adaptive"),
        ("policy: adaptive", "adaptive"),
        ("policy: threshold", "threshold"),
        ("max-prefill-queue-size: 3", "threshold"),
        ("policy: threshold\n  max-local-prefill-length: 3", "threshold"),
    ],
)
def test_the_policy(tmp_path: Path, keys: str, policy: str) -> None:
    assert workers(read(tmp_path, worker(keys)))[0].policy == policy


GRAPH = """\
Graph:
  namespace: blue
  nats: nats://10.0.0.5:4222
  etcd: http://10.0.0.5:2379/
  host: 10.0.0.7
  kv-port: 7000
  state-dir: state
  request-timeout: 60
  drain-timeout: 0
Security: {allow: [plain-graph]}
"""


def test_the_graph_section(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD + GRAPH)
    assert (config.namespace, config.host, config.kv_port) == ("blue", "10.0.0.7", 7000)
    assert (config.nats, config.etcd) == ("nats://10.0.0.5:4222", "10.0.0.5:2379")
    assert (config.request_timeout, config.drain_timeout) == (60.0, 0.0)
    assert config.state_dir == tmp_path / "state"


def test_the_environment_wins(tmp_path: Path) -> None:
    env = {"PDSERVE_NATS": "nats://h:1", "PDSERVE_ETCD": "h:2", "PDSERVE_STATE_DIR": "/s"}
    config = read(tmp_path, GOOD + GRAPH, env)
    assert (config.nats, config.etcd, config.state_dir) == ("nats://h:1", "h:2", Path("/s"))
    for name, value in env.items():
        if name != "PDSERVE_STATE_DIR":
            (problem,) = problems(tmp_path, GOOD, {name: value})
            assert problem.startswith(
                f"Environment variable {name} is h, which is reached over the network, but"
            )
    assert config.from_environment == (
        "PDSERVE_NATS (Graph.nats)",
        "PDSERVE_ETCD (Graph.etcd)",
        "PDSERVE_STATE_DIR (Graph.state-dir)",
    )
    config = read(tmp_path, GOOD, {"PDSERVE_NATS": "", "PDSERVE_ETCD": ""})
    assert (config.nats, config.etcd) == (None, None)
    found = problems(tmp_path, GOOD, {"PDSERVE_NATS": "10.0.0.5"})
    assert found == [
        "Environment variable PDSERVE_NATS is '10.0.0.5', but must be a NATS URL, as in nats://10.0.0.5:4222."
    ]


def test_each_key_that_differs_by_host_has_a_variable(tmp_path: Path) -> None:
    env = {
        "PDSERVE_HOST": "10.0.0.8",
        "PDSERVE_KV_PORT": "7100",
        "PDSERVE_STREAM_PORT": "7200",
        "PDSERVE_PAGES_PORT": "7300",
        "PDSERVE_FRONTEND_HOST": "127.0.0.2",
        "PDSERVE_FRONTEND_PORT": "8443",
        "PDSERVE_CREDENTIALS": "~/secrets",
    }
    config = read(tmp_path, frontend("port: 9") + GRAPH, env)
    assert (config.host, config.kv_port) == ("10.0.0.8", 7100)
    assert (config.stream_port, config.pages_port) == (7200, 7300)
    assert config.frontend is not None
    assert (config.frontend.host, config.frontend.port) == ("127.0.0.2", 8443)
    assert config.security.credentials == Path.home() / "secrets"
    assert read(tmp_path, frontend("port: 9"), dict.fromkeys(env, "")).frontend.port == 9  # type: ignore[union-attr]


def test_a_wrong_variable_is_named(tmp_path: Path) -> None:
    env = {"PDSERVE_FRONTEND_PORT": "80x", "PDSERVE_PAGES_PORT": "70000", "PDSERVE_HOST": "http://a"}
    found = problems(tmp_path, frontend("port: 9"), env)
    assert [problem.partition(", but must be ")[0] for problem in found] == [
        "Environment variable PDSERVE_HOST is 'http://a'",
        "Environment variable PDSERVE_PAGES_PORT is 70000",
        "Environment variable PDSERVE_FRONTEND_PORT is '80x'",
    ]


def test_the_variables_of_a_kubernetes_service_are_none_of_ours(tmp_path: Path) -> None:
    env = {"PDSERVE_FRONTEND_PORT": "tcp://10.96.0.7:8000"}
    config = read(tmp_path, frontend("port: 9"), env)
    assert config.frontend is not None
    assert (config.frontend.port, config.from_environment) == (9, ())


def test_lists_of_servers(tmp_path: Path) -> None:
    nats, etcd = ["nats://127.0.0.1:1", "nats://127.0.0.1:2"], ["127.0.0.1:3", "http://127.0.0.1:4"]
    for graph in (f"nats: {nats}, etcd: {etcd}", f"nats: '{', '.join(nats)}', etcd: '{','.join(etcd)}'"):
        config = read(tmp_path, f"{GOOD}Graph: {{{graph}}}\n")
        assert (config.nats, config.etcd) == (",".join(nats), "127.0.0.1:3,127.0.0.1:4")
    config = read(
        tmp_path, GOOD, {"PDSERVE_NATS": ", ".join(nats), "PDSERVE_ETCD": "127.0.0.1:3,127.0.0.1:4"}
    )
    assert (config.nats, config.etcd) == (",".join(nats), "127.0.0.1:3,127.0.0.1:4")
    (found,) = problems(tmp_path, GOOD, {"PDSERVE_ETCD": "127.0.0.1:3,b"})
    assert found == (
        "Environment variable PDSERVE_ETCD is 'b', but must be etcd's client address, as in 10.0.0.5:2379."
    )


SECURITY = """\
Security:
  credentials: secrets
  api-keys: /etc/keys.yaml
  tls-certificate: edge.pem
  tls-key: edge-key.pem
  allow: [no-keys, plain-graph]
"""


def test_the_security_section(tmp_path: Path) -> None:
    security = read(tmp_path, GOOD + SECURITY).security
    assert (security.credentials, security.api_keys) == (tmp_path / "secrets", Path("/etc/keys.yaml"))
    assert (security.tls_certificate, security.tls_key) == (tmp_path / "edge.pem", tmp_path / "edge-key.pem")
    assert security.allow == ("no-keys", "plain-graph")
    assert read(tmp_path, GOOD).security == SecuritySection()
    assert read(tmp_path, GOOD, {"PDSERVE_CREDENTIALS": "/s"}).security.credentials == Path("/s")


def test_mistakes_of_the_security_section(tmp_path: Path) -> None:
    text = SECURITY.replace("  tls-key: edge-key.pem\n", "").replace("no-keys", "nothing")
    line = len(GOOD.splitlines())
    assert problems(tmp_path, GOOD + text) == [
        f"FILE:{line + 4}: Security.tls-certificate needs tls-key beside it.",
        f"FILE:{line + 5}: Security.allow is ['nothing', 'plain-graph'], but must be a list of no-keys, plain-http, "
        "plain-graph.",
    ]


def test_the_slo_section(tmp_path: Path) -> None:
    assert read(tmp_path, f"{GOOD}Slo: {{ttft: 1.5s, gap: 60 ms}}\n").slo == Promised(1.5, 0.06)
    assert read(tmp_path, f"{GOOD}Slo: {{gap: 60ms}}\n").slo == Promised(gap=0.06)
    assert not read(tmp_path, f"{GOOD}Slo:\n").slo
    assert not read(tmp_path, GOOD).slo


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("500", "500"),
        ("0ms", "'0ms'"),
        ("2h", "'2h'"),
        ("[1s]", "['1s']"),
        ("", "empty"),
        ("3601s", "'3601s'"),
    ],
)
def test_mistakes_of_the_slo_section(tmp_path: Path, value: str, shown: str) -> None:
    line = len(GOOD.splitlines()) + 2
    assert problems(tmp_path, f"{GOOD}Slo:\n  ttft: {value}\n") == [
        f"FILE:{line}: Slo.ttft is {shown}, but must be a duration with its unit, 1ms to 3600s, as in 500ms or 2s."
    ]
    (unknown,) = problems(tmp_path, f"{GOOD}Slo:\n  tpot: 60ms\n")
    assert unknown == f"FILE:{line}: Slo.tpot is not a key of Slo: remove it, or use one of: gap, ttft."


def test_the_larger_number_of_workers_counts_frontend_processes(tmp_path: Path) -> None:
    text = frontend("ServiceArgs: {workers: 2}") + "Processor: {ServiceArgs: {workers: 3}}\n"
    found = read(tmp_path, text).frontend
    assert found is not None
    assert found.processes == 3


def test_a_processor_gives_its_templates_to_the_workers(tmp_path: Path) -> None:
    own = "Processor: {tool-call-parser: hermes, enable-auto-tool-choice: true, reasoning-parser: qwen3}\n"
    config = read(tmp_path, GOOD + own)
    decode, prefill = workers(config)
    assert decode.engine_args["tool-call-parser"] == "hermes"
    assert decode.origins["tool-call-parser"] == "Processor"
    assert decode.engine_args["reasoning-parser"] == "qwen3"
    assert "tool-call-parser" not in prefill.engine_args


ADAPTERS = GOOD.replace("block-size: 32", "block-size: 32\n  enable-lora: true\n  max-loras: 2")
ADAPTERS = ADAPTERS.replace("[model, block-size]", "[model, block-size, enable-lora, max-loras]")


def test_prefill_workers_have_the_adapters_of_decode_workers(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    modules = "[red=/red, {name: blue, path: /blue}]"
    file.write_text(
        ADAPTERS.replace("remote-prefill: true", f"remote-prefill: true\n  lora-modules: {modules}")
    )
    config = load(file)
    assert config.decode is not None
    assert config.prefill is not None
    assert static_adapters(config.decode.engine_args) == {"red": "/red", "blue": "/blue"}
    assert static_adapters(config.prefill.engine_args) == {"red": "/red", "blue": "/blue"}
    assert most_adapters(config.prefill.engine_args) == 2


@pytest.mark.parametrize(
    ("modules", "without", "problem"),
    [
        ("[a=/a, b=/b, c=/c]", "", "names 3 adapters, but the engine holds 2: set max-cpu-loras: 3."),
        ("[a=/a, a=/b]", "", "names an adapter twice."),
        ("[a=/a, demo=/b]", "", "names an adapter demo, as the model: choose another name."),
        ("[a]", "", "must be a list of name=folder, or of mappings with name and path."),
        ("[a=/a]", "enable-lora: true", "needs enable-lora: true beside it, for all workers."),
    ],
)
def test_adapters_that_a_worker_cannot_hold(tmp_path: Path, modules: str, without: str, problem: str) -> None:
    file = tmp_path / "graph.yaml"
    text = ADAPTERS.replace("remote-prefill: true", f"remote-prefill: true\n  lora-modules: {modules}")
    file.write_text(text.replace(without, "enable-lora: false") if without else text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert any(problem in each and "VllmWorker.lora-modules" in each for each in caught.value.problems)


@pytest.mark.parametrize(
    "own", ["enable-lora: true", "lora-target-modules: [q_proj]", "enable-moe-shared-loras: true"]
)
def test_both_kinds_of_workers_compute_alike_with_adapters(tmp_path: Path, own: str) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(GOOD.replace("remote-prefill: true", f"remote-prefill: true\n  {own}"))
    with pytest.raises(ConfigError, match="both compute with the same adapters"):
        load(file)


@pytest.mark.parametrize("stand_in", [True, False])
def test_prefill_workers_that_stand_in_have_what_answers_depend_on(tmp_path: Path, stand_in: bool) -> None:
    text = GOOD.replace("VllmWorker:\n", "VllmWorker:\n  logprobs-mode: raw_logits\n  max-num-seqs: 3\n")
    text = text.replace("PrefillWorker:\n", f"PrefillWorker:\n  stand-in: {str(stand_in).lower()}\n")
    _, prefill = workers(read(tmp_path, text))
    assert prefill.engine_args.get("logprobs-mode") == ("raw_logits" if stand_in else None)
    assert "max-num-seqs" not in prefill.engine_args


def test_parsers_of_a_plugin_have_any_name(tmp_path: Path) -> None:
    own = "{tool-call-parser: mine, tool-parser-plugin: /a.py, enable-auto-tool-choice: true}"
    decode, _ = workers(read(tmp_path, f"{GOOD}Processor: {own}\n"))
    assert decode.engine_args["tool-call-parser"] == "mine"


def test_a_parser_that_is_never_asked_is_noted(tmp_path: Path) -> None:
    (note,) = read(tmp_path, GOOD + "Processor: {tool-call-parser: hermes}\n").notes
    assert note.endswith("tool-call-parser has no effect without enable-auto-tool-choice: true.")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("demo", str(MODEL_DIR)),
        ("here", "FOLDER/here"),
        ("deep/down/model", "FOLDER/deep/down/model"),
        ("./nowhere", "FOLDER/nowhere"),
        ("/mnt/nowhere", "/mnt/nowhere"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("gpt2", "gpt2"),
    ],
)
def test_model_folders_and_hub_ids(tmp_path: Path, model: str, expected: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "deep/down/model").mkdir(parents=True)
    config = read(tmp_path, f"VllmWorker: {{model: {model}}}\n")
    assert config.model == expected.replace("FOLDER", str(tmp_path))


BAD = {
    GOOD.replace("VllmWorker", "VLLMWorker", 1): (
        "FILE:6: VLLMWorker is not a section: did you mean VllmWorker?"
    ),
    GOOD.replace("remote-prefill", "remote-prefil"): (
        "FILE:7: VllmWorker.remote-prefil is neither a key of VllmWorker nor a vLLM argument: did you mean "
        "remote-prefill?"
    ),
    worker("max-num-seq: 4"): (
        "FILE:8: VllmWorker.max-num-seq is neither a key of VllmWorker nor a vLLM argument: did you mean max-num-seqs?"
    ),
    worker("ServiceArgs: {worker: 2}"): (
        "FILE:8: VllmWorker.ServiceArgs.worker is not a key of VllmWorker.ServiceArgs: did you mean workers?"
    ),
    GOOD + "Processor: {tool-call-parser: hermess, enable-auto-tool-choice: true}\n": (
        "FILE:11: Processor.tool-call-parser is hermess, no parser of vLLM's (a plugin's needs tool-parser-plugin): "
        "did you mean hermes?"
    ),
    GOOD + "Processor: {enable-auto-tool-choice: true}\n": (
        "FILE:11: Processor.enable-auto-tool-choice needs tool-call-parser beside it: how the model writes its calls "
        "(hermes for Qwen)."
    ),
    frontend("router: round-robin"): (
        "FILE:5: Frontend.router is not a key of Frontend: move it to Processor."
    ),
    frontend("zzz: 1"): (
        "FILE:5: Frontend.zzz is not a key of Frontend: remove it, or use one of: allowed-origins, batches, endpoint, "
        "header-timeout, host, max-connections, max-outputs, max-request-timeout, max-wait, max-waiting, "
        "max-waiting-tokens, port, served-model-name, ServiceArgs, write-timeout."
    ),
    frontend("max_waiting: 0"): "FILE:5: Frontend.max_waiting is 0, but must be a whole number, 1 or more.",
    GOOD + "Graph: {ServiceArgs: {workers: 2}}\n": (
        "FILE:11: Graph.ServiceArgs is not a key of Graph: move it to Frontend, Processor, VllmWorker or "
        "PrefillWorker."
    ),
    worker("vllm.max-num-seqs: 4"): (
        "FILE:8: VllmWorker.vllm.max-num-seqs is neither a key of VllmWorker nor a vLLM argument: did you mean "
        "max-num-seqs?"
    ),
    "Common: {model: demo, remote-prefill: true}\nVllmWorker: {common-configs: [model, remote-prefill]}\n": (
        "FILE:1: Common.remote-prefill is true, but there is no PrefillWorker section: add one, set role: both, or "
        "set it to false."
    ),
    GOOD + "Graph: {nats: }\n": (
        "FILE:11: Graph.nats is empty, but must be a URL as in nats://10.0.0.5:4222, or a list of URLs."
    ),
    GOOD + "Graph: {nats: 'nats://127.0.0.1:1, http://x:1'}\n": (
        "FILE:11: Graph.nats is 'http://x:1', but must be a NATS URL, as in nats://10.0.0.5:4222."
    ),
    GOOD + "Graph: {etcd: ['127.0.0.1:1', '127.0.0.1:2', 'http://127.0.0.1:1']}\n": (
        "FILE:11: Graph.etcd names '127.0.0.1:1' twice: name each server once."
    ),
    GOOD + "Graph: {queue-replicas: 3}\n": (
        "FILE:11: Graph.queue-replicas is 3, which needs Graph.nats: `serve` starts one server, which keeps one copy."
    ),
    GOOD + "Graph: {nats: 'nats://127.0.0.1:1', queue-replicas: 6}\n": (
        "FILE:11: Graph.queue-replicas is 6, but must be a whole number, 1 to 5."
    ),
    worker("ServiceArgs: {resources: {gpu: }}"): (
        "FILE:8: VllmWorker.ServiceArgs.resources.gpu is empty, but must be a whole number, 0 or more, or a share"
    ),
    frontend("ServiceArgs: {resources: {gpu: 1}}"): (
        "FILE:5: Frontend.ServiceArgs.resources.gpu is 1, but must be 0."
    ),
    GOOD + f"Graph: {{drain-timeout: {10**400}}}\n": (
        f"FILE:11: Graph.drain-timeout is {10**400}, but must be a number of seconds, 0 or more."
    ),
    GOOD + "Graph: {state-dir: '~no-such-user/x'}\n": (
        "FILE:11: Graph.state-dir is '~no-such-user/x', but this host knows no home folder for it."
    ),
    GOOD.replace("8000", "eighty"): (
        "FILE:5: Frontend.port is 'eighty', but must be a whole number, 1 to 65535."
    ),
    worker("kv-offload: 32"): "FILE:8: VllmWorker.kv-offload is 32, but must be a size as in 32GiB.",
    worker("kv-offload: 32GB"): "FILE:8: VllmWorker.kv-offload is '32GB', but must be a size as in 32GiB.",
    worker(
        "kv-offload-disk: 1TB"
    ): "FILE:8: VllmWorker.kv-offload-disk is '1TB', but must be a size as in 32GiB.",
    worker(
        "kv-offloading-size: 32"
    ): "FILE:8: VllmWorker.kv-offloading-size is kv-offload in pdserve, as in kv-offload",
    GOOD.replace("32", "true"): "FILE:3: Common.block-size is True, but must be a whole number.",
    GOOD.replace("prefill: true", "prefill: 'yes'"): (
        "FILE:7: VllmWorker.remote-prefill is 'yes', but must be true or false."
    ),
    GOOD.replace("common-configs: [model, block-size]\nP", "common-configs: [block-size]\nP"): (
        "FILE:6: VllmWorker has no model: set it in Common (demo, a folder or a hub id) and list it in common-configs."
    ),
    GOOD.replace("demo", "'what is this'"): (
        "FILE:2: Common.model is 'what is this', but must be demo, a model folder or a hub id, as in Qwen/Qwen3-0.6B."
    ),
    GOOD.replace("  block-size: 32", "  block-size: 32\n  block_size: 64"): (
        "FILE:4: Common.block_size was already set in line 3: keep one of the two."
    ),
    "VllmWorker: {model: demo, gpu-memory-utilization: 0.5,\n  device-memory-utilization: 0.6}\n": (
        "FILE:2: VllmWorker.device-memory-utilization is the same vLLM argument as VllmWorker.gpu-memory-utilization "
        "in line 1: keep one of the two."
    ),
    GOOD.replace("Frontend:\n  port: 8000", "Frontend: 8000"): (
        "FILE:4: Frontend must be a mapping: indent `key: value` lines under it."
    ),
    worker("policy: adaptive\n  max-prefill-queue-size: 3"): (
        "FILE:9: VllmWorker.max-prefill-queue-size has no effect under policy: adaptive; remove it, or set policy: "
        "threshold."
    ),
    GOOD.replace("block-size: 32", "block-size: 32\n  max-model-len: 4096"): (
        "FILE:4: Common.max-model-len has no effect: list max-model-len in the common-configs of a section, or remove "
        "it."
    ),
    GOOD.replace("block-size]\nP", "block-siz]\nP"): (
        "FILE:8: VllmWorker.common-configs lists block-siz, which Common does not have: did you mean block-size?"
    ),
    GOOD.replace("[model, block-size]\nP", "model\nP"): (
        "FILE:8: VllmWorker.common-configs must be a list of keys of Common, as in [model, block-size]."
    ),
    GOOD.replace("remote-prefill: true", "role: both"): (
        "FILE:7: VllmWorker.role is both, but no prompt is ever queued: set remote-prefill: true beside it."
    ),
    GOOD.replace("true", "false"): (
        "FILE:9: PrefillWorker would never get work: set remote-prefill: true in VllmWorker, or remove this section."
    ),
    "Frontend: {port: 80}\n": "FILE: there is no VllmWorker section: add one, as in configs/local.yaml.",
    prefill("block-size: 64"): (
        "FILE:10: PrefillWorker.block-size makes block-size 32 in VllmWorker but 64 in PrefillWorker; unequal KV "
        "blocks give wrong tokens: set it once in Common and list it in the common-configs of both."
    ),
    GOOD.replace("PrefillWorker:\n  common-configs: [model, block-size]", "PrefillWorker: {model: demo}"): (
        "FILE:3: Common.block-size makes block-size 32 in VllmWorker but vLLM's default in PrefillWorker; unequal KV "
        "blocks give wrong tokens: set it once in Common and list it in the common-configs of both."
    ),
    prefill("dtype: float32"): (
        "FILE:10: PrefillWorker.dtype makes dtype auto in VllmWorker but float32 in PrefillWorker; KV blocks are "
        "moved byte by byte: set it once in Common and list it in the common-configs of both."
    ),
    worker("speculative-config: {method: eagle3, model: a/b}"): (
        "FILE:8: VllmWorker.speculative-config makes the draft model {'method': 'eagle3', 'model': 'a/b'} in "
        "VllmWorker but none in PrefillWorker; KV blocks have its KV, too: set it once in Common and list it in the "
        "common-configs of both (n-gram has no KV)."
    ),
    prefill("max-logprobs: 5"): (
        "FILE:10: PrefillWorker.max-logprobs is 5, but 20 in VllmWorker: set both alike, or stand-in: false."
    ),
    prefill("model: gpt2"): (
        "FILE:10: PrefillWorker.model makes model demo in VllmWorker but gpt2 in PrefillWorker; the KV of one model "
        "means nothing to another: set it once in Common and list it in the common-configs of both."
    ),
    GOOD + "Processor: {block-size: 16}\n": (
        "FILE:11: Processor.block-size is 16, but the worker says 32: the processor follows its workers; set it there."
    ),
    worker("kv-transfer-config: {kv_connector: Lmcache}"): (
        "FILE:8: VllmWorker.kv-transfer-config is set by pdserve, which moves KV blocks with its own NIXL connector "
        "over UCX: remove it."
    ),
    worker("kv-transfer-config: {kv_connector: NixlConnector, kv_load_failure_policy: fail}"): (
        "FILE:8: VllmWorker.kv-transfer-config sets kv_load_failure_policy, which pdserve sets itself (role, lease, "
        "recompute): remove it."
    ),
    worker("kv-transfer-config: {kv_connector: NixlConnector, b: 1, 2: x}"): (
        "FILE:8: VllmWorker.kv-transfer-config has a key that is not a word: put quotes round it or remove it."
    ),
    DYNAMO.replace("gpu: 2", "gpu: 4", 1): (
        "FILE:27: VllmWorker.ServiceArgs.resources.gpu is 4, but tensor-parallel-size x pipeline-parallel-size makes "
        "2, one for each GPU: set tensor-parallel-size: 4 or gpu: 2."
    ),
    "VllmWorker: {model: demo, tensor-parallel-size: 2, ServiceArgs: {resources: {gpu-ids: [0]}}}\n": (
        "FILE:1: VllmWorker.ServiceArgs.resources.gpu-ids names 1 GPUs, but 1 x 2 ranks need 2: name 2."
    ),
    "VllmWorker: {model: demo, tensor-parallel-size: 3, nnodes: 2}\n": (
        "FILE:1: VllmWorker.nnodes is 2, but 3 ranks (tensor-parallel-size) cannot be shared by as many hosts: make "
        "them a multiple."
    ),
    "VllmWorker: {model: demo, tensor-parallel-size: 2, nnodes: 2, distributed-executor-backend: ray}\n": (
        "FILE:1: VllmWorker.distributed-executor-backend is ray, but nnodes is of vLLM's own mode: remove "
        "one of the two."
    ),
    "VllmWorker: {model: demo, tensor-parallel-size: 2, nnodes: 2, ServiceArgs: {resources: {gpu-ids: [0, 1]}}}\n": (
        "FILE:1: VllmWorker.ServiceArgs.resources.gpu-ids names GPUs of one host, but nnodes makes several: set "
        "CUDA_VISIBLE_DEVICES on each."
    ),
    GOOD + "Graph: {nats: 'wss://x:1'}\n": (
        "FILE:11: Graph.nats is 'wss://x:1', but NATS is reached without WebSockets only, as in nats://10.0.0.5:4222."
    ),
    GOOD + "Graph: {etcd: '10.0.0.5'}\n": (
        "FILE:11: Graph.etcd is '10.0.0.5', but must be etcd's client address, as in 10.0.0.5:2379."
    ),
    GOOD + "Graph: {host: 'http://x'}\n": (
        "FILE:11: Graph.host is 'http://x', but must be a host name or IP address without scheme or port, as in "
        "10.0.0.5."
    ),
    GOOD + "Graph: {namespace: a.b}\n": (
        "FILE:11: Graph.namespace is 'a.b', but may have letters, digits, - and _ only: it becomes part of NATS "
        "subjects."
    ),
    GOOD + "Graph: {request-timeout: 0}\n": (
        "FILE:11: Graph.request-timeout is 0, but must be a number of seconds above 0."
    ),
    GOOD + "Processor: {router: best}\n": "FILE:11: Processor.router is 'best', but must be one of: ",
    frontend("8000: port"): (
        "FILE:5: Frontend has a key that is not a word: put quotes round it or remove it."
    ),
    GOOD.replace("32", "2024-13-45"): (
        "FILE:3: Common.block-size has no plain value (month must be in 1..12): put quotes round it."
    ),
    GOOD.replace("32", "!!python/object:os.system 1"): (
        "FILE:3: Common.block-size has no plain value (could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object:os.system'): put quotes round it."
    ),
    "VllmWorker: &x\n  model: demo\n  additional-config: *x\n": (
        "FILE:3: VllmWorker.additional-config is an alias to what contains it: write the value out."
    ),
    "- a\n": "FILE:1: the file is not a mapping of sections: start from configs/local.yaml.",
    "# nothing\n": "FILE is empty: start from configs/local.yaml.",
    "Frontend:\n  port: 8000\n bad\n": (
        "FILE:3: this is not YAML (expected <block end>, but found '<scalar>'): correct the line, its indentation or "
        "its quotes."
    ),
    "Frontend: \x07\n": (
        "FILE: this is not YAML (special characters are not allowed): correct the line, its indentation or its quotes."
    ),
    GOOD + "---\n" + GOOD: (
        "FILE:11: this is not YAML (but found another document): correct the line, its indentation or its quotes."
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_error_text_of_each_mistake(tmp_path: Path, text: str) -> None:
    found = problems(tmp_path, text)
    assert any(problem.startswith(BAD[text]) for problem in found), found
    assert all(problem.startswith("FILE") and problem.endswith((".", "?")) for problem in found), found


def test_dates_are_read_alike_whatever_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-format-enforcer, which vLLM imports, makes words of every YAML date in its process."""
    constructors = yaml.SafeLoader.yaml_constructors
    monkeypatch.setitem(constructors, "tag:yaml.org,2002:timestamp", constructors["tag:yaml.org,2002:str"])
    test_error_text_of_each_mistake(tmp_path, GOOD.replace("32", "2024-13-45"))


OWNED = {
    "port: 9000": "belongs in Frontend",
    "host: 0.0.0.0": "belongs in Frontend",
    "served-model-name: x": "belongs in Frontend",
    "api-server-count: 2": "ServiceArgs.workers",
    "data-parallel-size: 2": "ServiceArgs.workers",
    "disable-log-stats: true": "would blind",
    "kv-events-config: {}": "is set by pdserve",
    "ssl-keyfile: x": "is about vLLM's own HTTP server",
    "api-key: [x]": "is about vLLM's own HTTP server",
    "device-ids: '0'": "is decided by the placement",
    "node-rank: 1": "differs by host: start `pdserve decode`",
    "master-addr: 10.0.0.5": "is found through etcd",
}


@pytest.mark.parametrize("line", OWNED)
def test_arguments_of_the_graph_are_refused_with_the_reason(tmp_path: Path, line: str) -> None:
    found = problems(tmp_path, worker(line))
    assert len(found) == 1
    assert found[0].startswith(f"FILE:8: VllmWorker.{line.split(':')[0]} ")
    assert OWNED[line] in found[0]


def test_all_problems_are_found_at_once_and_in_order(tmp_path: Path) -> None:
    text = GOOD.replace("8000", "0").replace("32", "x").replace("true", "maybe") + "Oops: 1\n"
    assert [problem.split(":")[1] for problem in problems(tmp_path, text)] == ["3", "5", "7", "11"]


def test_a_mistake_in_common_is_reported_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, GOOD.replace("32", "x"))) == 1


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, "cannot be read (No such file or directory)"),
        (lambda path: path.mkdir(), "cannot be read (Is a directory)"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00\x81"), "is not UTF-8 text"),
    ],
)
def test_unreadable_files(tmp_path: Path, make: Callable[[Path], object], expected: str) -> None:
    path = tmp_path / "graph.yaml"
    make(path)
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert caught.value.problems == [f"{path} {expected}: give the path of a YAML file with -f."]


def test_every_engine_that_a_file_may_name_can_be_made() -> None:
    assert set(ENGINES) == set(spec.ENGINES)
