"""`pdserve init --from` converts files of other tools to graphs that load, and names what it leaves out."""

import json
from pathlib import Path

import pytest
import yaml

from pdserve.cli import main
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.convert.servers import servers_of
from pdserve.convert.writer import Graph, as_yaml, graph_for
from pdserve.util.errors import ConfigError

FLAT = """\
model: demo
served_model_name: [assistant, another]
host: 0.0.0.0
port: 9000
api-key: sk-0123456789abcdef
tensor-parallel-size: 2
max-model-len: 16k
gpu-memory-utilization: 0.85
swap-space: 4
disable-log-requests: true
tool-call-parser: hermes
enable-auto-tool-choice: true
uvicorn-log-level: warning
kv-transfer-config: {kv_connector: LMCacheConnectorV1}
no-such-argument: 1
"""
SCRIPT = """\
#!/bin/bash
set -euo pipefail
export MODEL=demo
PORT=9000  # behind the proxy
ulimit -n 65535
exec vllm serve "$MODEL" \\
    --port ${PORT} -tp 2 --max-num-seqs=64 \\
    --no-enable-prefix-caching --enforce-eager \\
    --lora-modules a=/adapters/a b=/adapters/b --enable-lora \\
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}' > serve.log 2>&1
"""
DOCKER = "docker run --gpus all -p 8000:8000 --ipc=host vllm/vllm-openai:v0.9.2 --model demo --use-v2-block-manager"
DEPLOYMENT = """\
apiVersion: v1
kind: Service
metadata: {name: llm}
---
apiVersion: apps/v1
kind: Deployment
spec:
  replicas: 3
  template:
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:latest
        command: [/bin/sh, -c]
        args: ["vllm serve demo --max-model-len 4096 --trust-remote-code"]
"""
COMPOSE = """\
services:
  llm:
    image: vllm/vllm-openai:latest
    command: --model demo --max-num-seqs 32
"""


def dynamo(version: str) -> str:
    """Return a manifest of Dynamo 1.x with two decode workers and a prefill worker."""
    decode = [
        "--model",
        "demo",
        "--block-size",
        "64",
        "--connector",
        "nixl",
        "--disaggregation-mode",
        "decode",
    ]
    prefill = [*decode[:4], "--is-prefill-worker", "--max-model-len=2048"]

    def container(args: list[str]) -> dict[str, object]:
        return {"image": "x", "command": ["python3", "-m", "dynamo.vllm"], "args": args}

    frontend = {
        "image": "x",
        "command": ["python3", "-m", "dynamo.frontend"],
        "args": ["--http-port", "8000"],
    }
    parts = [("Frontend", 1, frontend), ("Decode", 2, container(decode)), ("Prefill", 1, container(prefill))]
    if version == "v1alpha1":
        services = {
            name: {"replicas": count, "extraPodSpec": {"mainContainer": each}} for name, count, each in parts
        }
        spec: dict[str, object] = {"services": services}
    else:
        components = [
            {"name": name, "replicas": count, "podTemplate": {"spec": {"containers": [each]}}}
            for name, count, each in parts
        ]
        spec = {"components": components}
    return yaml.safe_dump(
        {"apiVersion": f"nvidia.com/{version}", "kind": "DynamoGraphDeployment", "spec": spec}
    )


def converted(folder: Path, name: str, text: str, gpus: int = 4) -> tuple[Graph, Config]:
    source = folder / name
    source.write_text(text)
    graph = graph_for(servers_of(str(source)), gpus)
    (folder / "graph.yaml").write_text(as_yaml(graph, ["made by a test"]))
    return graph, load(folder / "graph.yaml", {})


def test_a_flat_file_is_converted(tmp_path: Path) -> None:
    graph, config = converted(tmp_path, "vllm.yaml", FLAT.replace("0.0.0.0", "127.0.0.1"))
    assert config.frontend is not None
    assert config.decode is not None
    assert config.prefill is not None
    assert (config.served_model_name, config.frontend.port) == ("assistant", 9000)
    assert (config.decode.count, config.prefill.count) == (1, 1)
    shared = {"tensor-parallel-size": 2, "max-model-len": 16_000, "gpu-memory-utilization": 0.85}
    assert shared.items() <= config.decode.engine_args.items()
    assert shared.items() <= config.prefill.engine_args.items()
    assert config.decode.engine_args["tool-call-parser"] == "hermes"
    assert graph.keys == ["sk-0123456789abcdef"]
    assert {name: reason.split(":")[0].rstrip(".") for name, reason in graph.dropped.items()} == {
        "swap-space": "was removed by vLLM in 0.18",
        "disable-log-requests": "was removed by vLLM in 0.17",
        "uvicorn-log-level": "is for vLLM's own HTTP server, which a worker does not have; remove it",
        "kv-transfer-config": "is set by pdserve itself",
        "no-such-argument": "is no argument of vLLM 0.32",
        "served-model-name": "of another",
    }


@pytest.mark.parametrize(
    ("gpus", "tensor", "workers"),
    [(8, 2, (2, 2)), (6, 2, (2, 1)), (2, 2, (1, 0)), (1, 1, (1, 0)), (3, 1, (2, 1)), (0, 2, (1, 1))],
)
def test_a_server_is_split_over_the_gpus(
    tmp_path: Path, gpus: int, tensor: int, workers: tuple[int, int]
) -> None:
    text = f"model: demo\ntensor-parallel-size: {tensor}\n"
    graph, config = converted(tmp_path, "vllm.yaml", text, gpus)
    assert config.decode is not None
    assert (config.decode.count, config.prefill.count if config.prefill else 0) == workers
    assert config.decode.remote_prefill is bool(workers[1])
    assert config.decode.ranks == (tensor if gpus else 1)
    assert ("tensor-parallel-size" in graph.dropped) is (not gpus)


def test_a_shell_script_is_converted(tmp_path: Path) -> None:
    graph, config = converted(tmp_path, "run.sh", SCRIPT)
    assert graph.dropped == {}
    assert config.frontend is not None
    assert config.decode is not None
    assert config.frontend.port == 9000
    assert config.decode.engine_args == {
        "tensor-parallel-size": 2,
        "max-num-seqs": 64,
        "enable-prefix-caching": False,
        "enforce-eager": True,
        "lora-modules": ["a=/adapters/a", "b=/adapters/b"],
        "enable-lora": True,
        "max-cpu-loras": 2,
        "speculative-config": {"method": "ngram", "num_speculative_tokens": 3},
    }


def test_container_commands_and_manifests_are_converted(tmp_path: Path) -> None:
    graph, config = converted(tmp_path, "run.sh", DOCKER)
    assert list(graph.dropped) == ["--use-v2-block-manager"]
    assert config.prefill is not None
    _, config = converted(tmp_path, "deployment.yaml", DEPLOYMENT)
    assert config.decode is not None
    assert (config.decode.count, config.prefill) == (3, None)
    assert config.decode.engine_args == {"max-model-len": 4096, "trust-remote-code": True}
    _, config = converted(tmp_path, "compose.yaml", COMPOSE)
    assert config.decode is not None
    assert config.decode.engine_args == {"max-num-seqs": 32}


@pytest.mark.parametrize("version", ["v1alpha1", "v1beta1"])
def test_a_dynamo_manifest_is_converted(tmp_path: Path, version: str) -> None:
    graph, config = converted(tmp_path, "graph-deployment.yaml", dynamo(version))
    assert config.decode is not None
    assert config.prefill is not None
    assert (config.decode.count, config.prefill.count) == (2, 1)
    assert config.decode.remote_prefill
    assert config.decode.engine_args == {"block-size": 64}
    assert config.prefill.engine_args == {"block-size": 64, "max-model-len": 2048}
    assert list(graph.dropped) == ["connector"]


def run(*words: str) -> int:
    return main(["init", *words])


def test_a_command_line_after_dashes_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "--from -- vllm serve demo --port 9000 --gpu-memory-utilization 0.5 --api-key sk-secret-secret-secret"
    )
    assert run("--gpu", *words.split()) == 0
    config = load(tmp_path / "graph.yaml", {})
    assert config.frontend is not None
    assert config.frontend.port == 9000
    keys = tmp_path / "graph.keys"
    assert (keys.read_text(), keys.stat().st_mode & 0o777) == ("client-1=sk-secret-secret-secret\n", 0o600)
    assert "secret" not in capsys.readouterr().out + (tmp_path / "graph.yaml").read_text()
    assert run("--gpu", *words.split()) == 2  # never overwrites
    assert "graph.yaml exists" in capsys.readouterr().err


def test_a_server_without_tls_becomes_a_graph_without_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.yaml").write_text(FLAT)
    assert run(str(tmp_path / "out.yaml"), "--gpu", "--from", str(tmp_path / "vllm.yaml")) == 0
    assert load(tmp_path / "out.yaml", {}).security.allow == ("plain-http",)
    assert "Left out: swap-space was removed by vLLM in 0.18.\n" in capsys.readouterr().out


def test_problems_of_a_converted_graph_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.yaml").write_text("model: demo\nmax-num-seqs: -4\n")
    assert run(str(tmp_path / "out.yaml"), "--from", str(tmp_path / "vllm.yaml")) == 1
    assert "max-num-seqs is -4, but must be at least 1." in capsys.readouterr().out


def test_a_manifest_that_contains_a_graph_is_converted(tmp_path: Path) -> None:
    graph = {
        "Common": {"model": "demo"},
        "VllmWorker": {"common-configs": ["model"]},
        "Planner": {"environment": "k"},
    }
    envs = [{"name": "DYN_DEPLOYMENT_CONFIG", "value": json.dumps(graph)}]
    source = tmp_path / "deploy.yaml"
    source.write_text(
        yaml.safe_dump({"apiVersion": "nvidia.com/v1alpha1", "kind": "X", "spec": {"envs": envs}})
    )
    assert run(str(tmp_path / "out.yaml"), "--from", str(source)) == 0
    assert load(tmp_path / "out.yaml", {}).decode is not None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.sh", "echo hello\n", "starts no vLLM server: there is no `vllm serve` in it."),
        ("pod.yaml", "kind: Pod\nspec: {containers: [{image: nginx}]}\n", "starts no vLLM server"),
        ("bad.yaml", "a: [", "this is not YAML"),
        ("own.yaml", "VllmWorker: {model: demo}\n", r"is a graph already: pdserve serve -f .*own\.yaml"),
    ],
)
def test_sources_without_a_server_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        servers_of(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"absent\.yaml not found"):
        servers_of(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("text", "what"),
    [(FLAT, "a file of `vllm serve --config`"), (dynamo("v1beta1"), "a Kubernetes manifest")],
)
def test_a_file_of_another_tool_is_reported_in_one_sentence(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    [problem] = caught.value.problems
    assert problem.startswith(f"{path} is {what}, not a graph: `")
    assert f"init graph.yaml --from {path}` makes a graph of it." in problem
