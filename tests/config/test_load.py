"""The loader: good files, and the error texts of bad ones."""

import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from pdserve.config.engine_args.installed import SIMULATED_VARIABLE
from pdserve.config.load import load
from pdserve.config.lora_modules import adapter_capacity, static_adapters
from pdserve.config.schema import (
    ENGINES,
    Config,
    DecodeConfig,
    FrontendConfig,
    PrefillConfig,
    SecuritySection,
)
from pdserve.contract.slo import SloTargets
from pdserve.demo import MODEL_DIR
from pdserve.engine import spec
from pdserve.util.errors import ConfigError

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

DYNAMO = (Path(__file__).parents[2] / "configs/disagg.yaml").read_text()
"""a file of Dynamo 0.2, with comments"""


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


def graph(keys: str) -> str:
    return f"{GOOD}Graph: {{{keys}}}\n"


def processor(keys: str) -> str:
    return f"{GOOD}Processor: {{{keys}}}\n"


def slo(ttft: str) -> str:
    return f"{GOOD}Slo: {{ttft: {ttft}}}\n"


def alone(keys: str) -> str:
    return f"VllmWorker: {{model: demo, tensor-parallel-size: 2, {keys}}}\n"


def test_a_dynamo_file_runs_unchanged(tmp_path: Path) -> None:
    config = read(tmp_path, DYNAMO)
    assert config.model == "/mnt/DeepSeek-R1-Distill-Qwen-14B"
    assert config.served_model_name == "RAG_LLM"
    assert config.frontend == FrontendConfig(port=8009, router="round-robin")
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
    endpoint, connector = config.notes
    assert "graph.yaml:12: Common.kv-transfer-config: DynamoNixlConnector means pdserve's own" in connector
    assert "graph.yaml:16: Frontend.endpoint has no meaning here" in endpoint


AGGREGATED = "Frontend: {port: 80}\nVllmWorker: {model: demo}\n"
OVERRIDDEN_SEED = "Common: {model: demo, seed: 8}\nVllmWorker: {seed: 4, common-configs: [model, seed]}\n"
TWO_PROCESS_COUNTS = frontend("ServiceArgs: {workers: 2}") + "Processor: {ServiceArgs: {workers: 3}}\n"
TOOLS = {
    "block-size": 32,
    "enable-auto-tool-choice": True,
    "tool-call-parser": "mine",
    "tool-parser-plugin": "/a",
}
PARSER = processor("enable-auto-tool-choice: true, tool-call-parser: mine, tool-parser-plugin: /a")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        (AGGREGATED, "prefill", None),
        (AGGREGATED, "decode.remote_prefill", False),
        (AGGREGATED, "served_model_name", "demo"),
        (AGGREGATED, "model", str(MODEL_DIR)),
        (AGGREGATED.replace("demo", "deep/down/model"), "model", "FOLDER/deep/down/model"),
        (AGGREGATED.replace("demo", "./nowhere"), "model", "FOLDER/nowhere"),
        (AGGREGATED.replace("demo", "Qwen/Qwen3-0.6B"), "model", "Qwen/Qwen3-0.6B"),
        (GOOD.replace("block-size", "block_size"), "decode.engine_args", {"block-size": 32}),
        (OVERRIDDEN_SEED, "decode.engine_args", {"seed": 4}),
        (GOOD, "decode.policy", "adaptive"),
        (worker("max-prefill-queue-size: 3"), "decode.policy", "threshold"),
        (worker("policy: threshold\n  max-local-prefill-length: 3"), "decode.policy", "threshold"),
        (worker("kv-offload: 0"), "decode.kv_offload", 0),
        (TWO_PROCESS_COUNTS, "frontend.processes", 3),
        (PARSER, "decode.engine_args", TOOLS),
        (PARSER, "prefill.engine_args", {"block-size": 32}),
    ],
)
def test_values_of_files_are_read(tmp_path: Path, text: str, name: str, value: object) -> None:
    (tmp_path / "deep/down/model").mkdir(parents=True)
    expected = value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value
    assert attrgetter(name)(read(tmp_path, text)) == expected


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


SECURITY_AND_SLO = """\
Security:
  credentials: secrets
  api-keys: /etc/keys.yaml
  tls-certificate: edge.pem
  tls-key: edge-key.pem
  allow: [no-keys, plain-graph]
Slo: {ttft: 1.5s, gap: 60 ms}
"""


def test_all_sections_are_read(tmp_path: Path) -> None:
    """Relative paths are resolved from the file's folder."""
    limits = "port: 80\n  max-wait: 2.5\n  max-waiting: 7\n  max_waiting_tokens: 90\n  max-outputs: 3"
    sections = GRAPH.replace("Security: {allow: [plain-graph]}\n", SECURITY_AND_SLO)
    config = read(tmp_path, frontend(limits) + sections)
    assert config.frontend == FrontendConfig(
        port=80, max_wait=2.5, max_waiting=7, max_waiting_tokens=90, max_outputs=3
    )
    assert (config.namespace, config.host, config.kv_port) == ("blue", "10.0.0.7", 7000)
    assert (config.nats, config.etcd) == ("nats://10.0.0.5:4222", "10.0.0.5:2379")
    assert (config.request_timeout, config.drain_timeout) == (60.0, 0.0)
    assert config.state_dir == tmp_path / "state"
    security = config.security
    assert (security.credentials, security.api_keys) == (tmp_path / "secrets", Path("/etc/keys.yaml"))
    assert (security.tls_certificate, security.tls_key) == (tmp_path / "edge.pem", tmp_path / "edge-key.pem")
    assert security.allow == ("no-keys", "plain-graph")
    assert config.slo == SloTargets(1.5, 0.06)
    without = read(tmp_path, f"{GOOD}Slo:\n")
    assert (without.frontend, without.security) == (FrontendConfig(), SecuritySection())
    assert not without.slo


ENVIRONMENT = {
    "PDSERVE_NATS": "nats://h:1",
    "PDSERVE_ETCD": "h:2",
    "PDSERVE_STATE_DIR": "/s",
    "PDSERVE_HOST": "10.0.0.8",
    "PDSERVE_KV_PORT": "7100",
    "PDSERVE_STREAM_PORT": "7200",
    "PDSERVE_PAGES_PORT": "7300",
    "PDSERVE_FRONTEND_HOST": "127.0.0.2",
    "PDSERVE_FRONTEND_PORT": "8443",
    "PDSERVE_BATCHES": "/b",
    "PDSERVE_KV_OFFLOAD_FOLDER": "kv",
    "PDSERVE_CREDENTIALS": "~/secrets",
    "PDSERVE_TLS_CERTIFICATE": "/c.pem",
    "PDSERVE_TLS_KEY": "key.pem",
    "PDSERVE_ALLOW": "no-keys, plain-http",
}


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD + GRAPH, ENVIRONMENT)
    assert (config.nats, config.etcd, config.state_dir) == ("nats://h:1", "h:2", Path("/s"))
    assert (config.host, config.kv_port) == ("10.0.0.8", 7100)
    assert (config.stream_port, config.pages_port) == (7200, 7300)
    assert config.frontend is not None
    assert (config.frontend.host, config.frontend.port) == ("127.0.0.2", 8443)
    assert config.frontend.batches == Path("/b")
    assert [each.kv_offload_folder for each in workers(config)] == [Path.cwd() / "kv"] * 2
    security = config.security
    assert (security.credentials, security.allow) == (Path.home() / "secrets", ("no-keys", "plain-http"))
    assert (security.tls_certificate, security.tls_key) == (Path("/c.pem"), Path.cwd() / "key.pem")
    assert "PDSERVE_NATS (Graph.nats)" in config.from_environment
    assert len(config.from_environment) == len(ENVIRONMENT) + 1  # 1: both workers have kv-offload-folder
    without = read(tmp_path, GOOD, dict.fromkeys(ENVIRONMENT, ""))
    assert (without.nats, without.etcd, without.frontend) == (None, None, FrontendConfig())


def test_a_wrong_variable_is_named(tmp_path: Path) -> None:
    wrong = {
        "PDSERVE_NATS": ("10.0.0.5", "'10.0.0.5'"),
        "PDSERVE_ETCD": ("127.0.0.1:3,b", "'b'"),
        "PDSERVE_HOST": ("http://a", "'http://a'"),
        "PDSERVE_PAGES_PORT": ("70000", "70000"),
        "PDSERVE_FRONTEND_PORT": ("80x", "'80x'"),
    }
    found = problems(tmp_path, GOOD, {name: value for name, (value, _) in wrong.items()})
    named = {problem.partition(", but must be ")[0] for problem in found}
    assert named == {f"Environment variable {name} is {shown}" for name, (_, shown) in wrong.items()}
    (exposed,) = problems(tmp_path, GOOD, {"PDSERVE_ETCD": "h:2"})
    assert exposed.startswith("Environment variable PDSERVE_ETCD is h, on another machine")
    (unknown,) = problems(tmp_path, GOOD, {"PDSERVE_ALLOW": "all"})
    assert unknown.startswith("Environment variable PDSERVE_ALLOW is ['all'], but must be a list of no-keys")


def test_simulated_engines_replace_those_of_the_file(tmp_path: Path) -> None:
    """The file is still checked. The demo model replaces an absent model, and arguments that need the absent model's
    tokenizer are dropped."""
    keys = "kv-offload: 4GiB\n  reasoning-parser: qwen3\n  max-model-len: 20000\n  tensor-parallel-size: 2"
    text = f"VllmWorker:\n  model: nobody/absent\n  {keys}\n"
    for env, kind in (({}, "vllm"), ({SIMULATED_VARIABLE: "0"}, "vllm"), ({SIMULATED_VARIABLE: "1"}, "sim")):
        config = read(tmp_path, text, env)
        assert config.decode is not None
        assert config.decode.engine == kind
        assert config.decode.kv_offload == (4 << 30) * (kind == "vllm")
        assert ("reasoning-parser" in config.decode.engine_args) == (kind == "vllm")
    assert config.model == str(MODEL_DIR)
    assert config.decode is not None
    assert config.decode.engine_args["hf-overrides"] == {"max_position_embeddings": 20000}
    assert (config.served_model_name, config.decode.ranks) == ("absent", 2)
    assert config.from_environment == (f"{SIMULATED_VARIABLE} (engine: sim)",)
    assert "demo model's tokenizer" in " ".join(config.notes)
    assert problems(tmp_path, text.replace("qwen3", "qwen9"), {SIMULATED_VARIABLE: "1"})


def test_kubernetes_service_variables_are_ignored(tmp_path: Path) -> None:
    env = {"PDSERVE_FRONTEND_PORT": "tcp://10.96.0.7:8000"}
    config = read(tmp_path, frontend("port: 9"), env)
    assert config.frontend is not None
    assert (config.frontend.port, config.from_environment) == (9, ())


def test_several_servers_may_be_a_list_or_a_text(tmp_path: Path) -> None:
    nats, etcd = ["nats://127.0.0.1:1", "nats://127.0.0.1:2"], ["127.0.0.1:3", "http://127.0.0.1:4"]
    for keys in (f"nats: {nats}, etcd: {etcd}", f"nats: '{', '.join(nats)}', etcd: '{','.join(etcd)}'"):
        config = read(tmp_path, graph(keys))
        assert (config.nats, config.etcd) == (",".join(nats), "127.0.0.1:3,127.0.0.1:4")
    config = read(
        tmp_path, GOOD, {"PDSERVE_NATS": ", ".join(nats), "PDSERVE_ETCD": "127.0.0.1:3,127.0.0.1:4"}
    )
    assert (config.nats, config.etcd) == (",".join(nats), "127.0.0.1:3,127.0.0.1:4")


def test_mistakes_in_the_security_section_are_reported(tmp_path: Path) -> None:
    found = problems(tmp_path, f"{GOOD}Security: {{tls-certificate: a, allow: [nothing, plain-graph]}}\n")
    assert found[0].startswith("FILE:11: Security.allow is ['nothing', 'plain-graph'], but must be a list of")
    assert found[1] == "FILE:11: Security.tls-certificate needs tls-key beside it."


def adapters(keys: str) -> str:
    text = worker(keys).replace("block-size: 32", "block-size: 32\n  enable-lora: true\n  max-loras: 2")
    return text.replace("[model, block-size]", "[model, block-size, enable-lora, max-loras]")


def test_prefill_workers_have_the_adapters_of_decode_workers(tmp_path: Path) -> None:
    both = workers(read(tmp_path, adapters("lora-modules: [red=/red, {name: blue, path: /blue}]")))
    for each in both:
        assert static_adapters(each.engine_args) == {"red": "/red", "blue": "/blue"}
    assert adapter_capacity(both[1].engine_args) == 2


@pytest.mark.parametrize("stand_in", [True, False])
def test_stand_ins_get_the_arguments_that_change_responses(tmp_path: Path, stand_in: bool) -> None:
    text = GOOD.replace("VllmWorker:\n", "VllmWorker:\n  logprobs-mode: raw_logits\n  max-num-seqs: 3\n")
    text = text.replace("PrefillWorker:\n", f"PrefillWorker:\n  stand-in: {str(stand_in).lower()}\n")
    _, prefill = workers(read(tmp_path, text))
    assert prefill.engine_args.get("logprobs-mode") == ("raw_logits" if stand_in else None)
    assert "max-num-seqs" not in prefill.engine_args


def test_an_unused_parser_is_noted(tmp_path: Path) -> None:
    (note,) = read(tmp_path, GOOD + "Processor: {tool-call-parser: hermes}\n").notes
    assert note.endswith("tool-call-parser has no effect without enable-auto-tool-choice: true.")


Mistakes = list[tuple[Callable[[str], str], str, dict[str, str]]]
MISTAKES: Mistakes = [
    (
        frontend,
        "5: Frontend.",
        {
            "router: round-robin": "router is not a key of Frontend: move it to Processor.",
            "zzz: 1": "zzz is not a key of Frontend: remove it, or use one of: allowed-origins, batches,",
            "port: eighty": "port is 'eighty', but must be a whole number, 1 to 65535.",
            "ServiceArgs: {resources: {gpu: 1}}": "ServiceArgs.resources.gpu is 1, but must be 0.",
        },
    ),
    (
        graph,
        "11: Graph.",
        {
            "ServiceArgs: {workers: 2}": "ServiceArgs is not a key of Graph: move it to Frontend,",
            "nats: 'nats://127.0.0.1:1, http://x:1'": "nats is 'http://x:1', but must be a NATS URL",
            "nats: 'wss://x:1'": "nats is 'wss://x:1', but must be a NATS URL without WebSockets",
            "etcd: ['127.0.0.1:1', 'http://127.0.0.1:1']": "etcd names '127.0.0.1:1' twice: name each",
            "etcd: '10.0.0.5'": "etcd is '10.0.0.5', but must be etcd's client address",
            "host: 0.0.0.0": "host is '0.0.0.0', but must be the address at which other machines reach",
            "host: '::'": "host is '::', but must be the address at which other machines reach this one",
            "host: 'http://x'": "host is 'http://x', but must be a host name or IP address without scheme",
            "namespace: a.b": "namespace is 'a.b', but may have letters, digits, - and _ only",
            "queue-replicas: 3": "queue-replicas is 3, which needs Graph.nats",
            "request-timeout: 0": "request-timeout is 0, but must be a number of seconds above 0",
            f"drain-timeout: {10**400}": f"drain-timeout is {10**400}, but must be a number of seconds, 0",
            "state-dir: '~no-such-user/x'": "state-dir is '~no-such-user/x', but this host has no home",
        },
    ),
    (
        processor,
        "11: Processor.",
        {
            "router: best": "router is 'best', but must be one of: ",
            "block-size: 16": "block-size is 16, but the worker has 32, and the worker's value counts",
            "enable-auto-tool-choice: true": "enable-auto-tool-choice needs tool-call-parser beside it",
            "tool-call-parser: hermess, enable-auto-tool-choice: true": "tool-call-parser is hermess, which",
        },
    ),
    (
        worker,
        "8: VllmWorker.",
        {
            "max-num-seq: 4": "max-num-seq is neither a key of VllmWorker nor a vLLM argument: did you",
            "ServiceArgs: {worker: 2}": "ServiceArgs.worker is not a key of VllmWorker.ServiceArgs: did",
            "ServiceArgs: {resources: {gpu: }}": "ServiceArgs.resources.gpu is empty, but must be a whole",
            "kv-offload: 32": "kv-offload is 32, but must be a size as in 32GiB.",
            "kv-offloading-size: 32": "kv-offloading-size is kv-offload in pdserve",
            "max-prefill-queue-size: 3\n  policy: adaptive": "max-prefill-queue-size has no effect under",
            "speculative-config: {method: eagle3, model: a/b}": "speculative-config makes the draft model",
            "kv-transfer-config: {kv_connector: Lmcache}": "kv-transfer-config is set by pdserve, which",
            "kv-transfer-config: {kv_connector: NixlConnector, kv_load_failure_policy: fail}": (
                "kv-transfer-config sets kv_load_failure_policy, but only kv_connector and"
            ),
            "kv-transfer-config: {kv_connector: NixlConnector, b: 1, 2: x}": (
                "kv-transfer-config has a key that is not a word"
            ),
            "enable-lora: true": "enable-lora is True, but vLLM's default in PrefillWorker;",
            "lora-target-modules: [q_proj]": "lora-target-modules is ['q_proj'], but",
            "enable-moe-shared-loras: true": "enable-moe-shared-loras is True, but False in PrefillWorker; both",
            "lora-modules: [a=/a]": "lora-modules needs enable-lora: true beside it, for all workers.",
            "port: 9000": "port belongs in Frontend",
            "host: 0.0.0.0": "host belongs in Frontend",
            "served-model-name: x": "served-model-name belongs in Frontend",
            "api-server-count: 2": "api-server-count is Frontend.ServiceArgs.workers",
            "data-parallel-size: 2": "data-parallel-size is ServiceArgs.workers",
            "disable-log-stats: true": "disable-log-stats would turn off",
            "kv-events-config: {}": "kv-events-config is set by pdserve",
            "ssl-keyfile: x": "ssl-keyfile is for vLLM's own HTTP server",
            "otlp-traces-endpoint: http://h": "otlp-traces-endpoint is Graph.otlp-endpoint in pdserve",
            "api-key: [x]": "api-key is for vLLM's own HTTP server",
            "device-ids: '0'": "device-ids is chosen by pdserve",
            "node-rank: 1": "node-rank differs by host: start `pdserve decode`",
            "master-addr: 10.0.0.5": "master-addr is not needed",
        },
    ),
    (
        adapters,
        "10: VllmWorker.lora-modules ",
        {
            "lora-modules: [a=/a, b=/b, c=/c]": "names 3 adapters, but the engine holds 2: set max-cpu-loras: 3.",
            "lora-modules: [a=/a, a=/b]": "names an adapter twice.",
            "lora-modules: [a=/a, demo=/b]": "names an adapter demo, like the model: choose another name.",
            "lora-modules: [a]": "must be a list of name=folder, or of mappings with name and path.",
        },
    ),
    (
        slo,
        "11: Slo.ttft is ",
        {each: f"{each or 'empty'}, but must be" for each in ("500", "'2h'", "['1s']", "")},
    ),
    (
        prefill,
        "10: PrefillWorker.",
        {
            "block-size: 64": "block-size is 64, but 32 in VllmWorker;",
            "dtype: float32": "dtype is float32, but auto in VllmWorker; KV",
            "model: gpt2": "model is gpt2, but demo in VllmWorker; the KV of one",
            "max-logprobs: 5": "max-logprobs is 5, but 20 in VllmWorker: set the same value in both, or",
        },
    ),
    (
        alone,
        "1: VllmWorker.",
        {
            "ServiceArgs: {resources: {gpu: 4}}": "ServiceArgs.resources.gpu is 4, but",
            "ServiceArgs: {resources: {gpu-ids: [0]}}": "ServiceArgs.resources.gpu-ids names 1 GPUs, but 1",
            "nnodes: 3": "nnodes is 3, but the 2 ranks (tensor-parallel-size) are not a multiple of it",
            "nnodes: 2, distributed-executor-backend: ray": "distributed-executor-backend is ray, but",
            "nnodes: 2, ServiceArgs: {resources: {gpu-ids: [0, 1]}}": (
                "ServiceArgs.resources.gpu-ids names GPUs of one host, but nnodes needs several hosts"
            ),
            "gpu-memory-utilization: 0.5, device-memory-utilization: 0.6": (
                "device-memory-utilization is the same vLLM argument as VllmWorker.gpu-memory-utilization in line 1"
            ),
        },
    ),
]
"""function that puts keys into a file, place of the problem, and the beginning of each key's problem"""


def named(folder: Path, text: str, start: str) -> list[str]:
    """Return the problems; one must begin with `start`."""
    found = problems(folder, text)
    assert any(problem.startswith(start) for problem in found), found
    assert all(problem.startswith("FILE") and problem.endswith((".", "?")) for problem in found), found
    return found


@pytest.mark.parametrize(
    ("make", "keys", "start"),
    [(make, keys, f"FILE:{at}{said}") for make, at, rows in MISTAKES for keys, said in rows.items()],
)
def test_mistakes_in_keys_are_reported(
    tmp_path: Path, make: Callable[[str], str], keys: str, start: str
) -> None:
    assert len(named(tmp_path, make(keys), start)) == 1


CHANGES = [
    ("VllmWorker:", "VLLMWorker:", ":6: VLLMWorker is not a section: did you mean VllmWorker?"),
    ("remote-prefill", "remote-prefil", ":7: VllmWorker.remote-prefil is neither a key of VllmWorker nor"),
    ("32", "true", ":3: Common.block-size is True, but must be a whole number."),
    ("32", "2024-13-45", ":3: Common.block-size has no valid value (month must be in 1..12)"),
    ("32", "032", ":3: Common.block-size has no valid value (032 begins with 0)"),
    ("32", "!!python/object:os.system 1", ":3: Common.block-size has no valid value (could not determine"),
    ("prefill: true", "prefill: 'yes'", ":7: VllmWorker.remote-prefill is 'yes', but must be true or false."),
    ("common-configs: [model, ", "common-configs: [", ":6: VllmWorker has no model: set it in Common"),
    ("demo", "'what is this'", ":2: Common.model is 'what is this', but must be demo, a model folder or a"),
    ("block-size: 32", "block-size: 32\n  block_size: 64", ":4: Common.block_size was already set in line 3"),
    ("block-size: 32", "block-size: 32\n  max-model-len: 4096", ":4: Common.max-model-len has no effect"),
    ("Frontend:\n  port: 8000", "Frontend: 8000", ":4: Frontend must be a mapping"),
    ("port: 8000", "8000: port", ":5: Frontend has a key that is not a word"),
    ("block-size]\nP", "block-siz]\nP", ":8: VllmWorker.common-configs lists block-siz, which Common does"),
    ("[model, block-size]\nP", "model\nP", ":8: VllmWorker.common-configs must be a list of keys of Common"),
    ("remote-prefill: true", "role: both", ":7: VllmWorker.role is both, but no prompt is ever sent"),
    ("true", "false", ":9: PrefillWorker would never get a prompt"),
    ("PrefillWorker:\n  common-configs: [model, block-size]", "PrefillWorker: {model: demo}", ":3:"),
    (GOOD, "Frontend: {port: 80}\n", ": there is no VllmWorker section"),
    (GOOD, "VllmWorker: {model: demo, remote-prefill: true}\n", ":1: VllmWorker.remote-prefill is true,"),
    (GOOD, "VllmWorker: &x\n  model: demo\n  additional-config: *x\n", ":3: VllmWorker.additional-config"),
    (GOOD, "- a\n", ":1: the file is not a mapping of sections"),
    (GOOD, "# nothing\n", " is empty"),
    (GOOD, "Frontend:\n  port: 8000\n bad\n", ":3: this is not YAML (expected <block end>, but found"),
    (GOOD, "Frontend: \x07\n", ": this is not YAML (special characters are not allowed)"),
    (GOOD, f"{GOOD}---\n{GOOD}", ":11: this is not YAML (but found another document)"),
]


@pytest.mark.parametrize(("old", "new", "said"), CHANGES)
def test_other_mistakes_are_reported(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    named(tmp_path, GOOD.replace(old, new), f"FILE{said}")


@pytest.mark.parametrize("level", ["[{0}, {0}]", "{{x: {0}, y: {0}}}", "{{<<: [{0}, {0}], x: 1}}"])
def test_aliases_that_multiply_are_refused_with_their_line(tmp_path: Path, level: str) -> None:
    """Written out, 30 levels of two aliases each are a billion values."""
    levels = (f"  a{n}: &a{n} {level.format(f'*a{n - 1}')}" for n in range(1, 31))
    text = "\n".join(["Common:", "  a0: &a0 {x: 1}", *levels])
    (told,) = problems(tmp_path, text)
    line = int(told.split(":")[1])
    assert 15 < line < 20
    assert told.endswith(f":{line}: aliases make more than 100,000 values of this: write fewer of them.")


@pytest.mark.parametrize("depth", [250, 2000])
def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    """Python 3.12 and newer can parse 250 levels; the file is then refused because `Common` is a list."""
    told = problems(tmp_path, f"Common: {'[' * depth}{']' * depth}")
    reads_it = sys.version_info >= (3, 12) and depth == 250
    assert told[-1].startswith(
        "FILE:1: Common must be a mapping" if reads_it else "FILE is nested too deeply: "
    )


def test_a_number_that_begins_with_0_is_reported_once(tmp_path: Path) -> None:
    (told,) = problems(tmp_path, f"{GOOD}Graph: {{kv-port: 05600}}\n")
    assert told.endswith("(05600 begins with 0): correct it, or quote it if it is text.")


def test_dates_do_not_depend_on_imported_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-format-enforcer, which vLLM imports, makes PyYAML read dates as strings."""
    constructors = yaml.SafeLoader.yaml_constructors
    monkeypatch.setitem(constructors, "tag:yaml.org,2002:timestamp", constructors["tag:yaml.org,2002:str"])
    test_other_mistakes_are_reported(tmp_path, *CHANGES[3])


def test_all_problems_are_found_at_once_and_in_order(tmp_path: Path) -> None:
    """A problem in Common is reported once, even if several sections list its key."""
    text = GOOD.replace("8000", "0").replace("32", "x").replace("true", "maybe") + "Oops: 1\n"
    assert [problem.split(":")[1] for problem in problems(tmp_path, text)] == ["3", "5", "7", "11"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, "cannot be read (No such file or directory)"),
        (lambda path: path.mkdir(), "cannot be read (Is a directory)"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00\x81"), "is not UTF-8 text"),
    ],
)
def test_unreadable_files_are_reported(tmp_path: Path, make: Callable[[Path], object], expected: str) -> None:
    path = tmp_path / "graph.yaml"
    make(path)
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert caught.value.problems == [f"{path} {expected}: give the path of a YAML file with -f."]


def test_every_engine_that_a_file_may_name_can_be_made() -> None:
    assert set(ENGINES) == set(spec.ENGINES)
