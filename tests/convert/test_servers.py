"""`pdserve init --from` drops no argument, role, replica count or port silently."""

import json
from pathlib import Path

import pytest
import yaml

from pdserve.cli import main
from pdserve.config.engine_args.removed import is_vllm_config
from pdserve.config.load import load
from pdserve.convert.servers import Server, servers_of
from pdserve.convert.writer import graph_for
from pdserve.util.errors import ConfigError


def only(command: str) -> Server:
    [server] = servers_of(command)
    return server


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [
        ("--enable-chunked-prefill=False", "enable-chunked-prefill", False),
        ("--enable-chunked-prefill false", "enable-chunked-prefill", False),
        ("--enable-lora true", "enable-lora", True),
        ("--max-lora-rank 64", "max-lora-rank", 64),
        ("--max-model-len=8192", "max-model-len", 8192),
        ("--max-model-len -1", "max-model-len", "-1"),
        ("-O3", "optimization-level", "3"),
        ("-dcp 2", "decode-context-parallel-size", 2),
        ("-sc.method ngram --speculative-config.num_speculative_tokens=4", "speculative-config", None),
        ("--seed 1 --seed 2", "seed", 2),
    ],
)
def test_options_are_read_as_by_vllm(option: str, name: str, value: object) -> None:
    server = only(f"vllm serve demo {option} -tp 2")
    assert server.dropped == {}
    if value is None:
        value = {"method": "ngram", "num_speculative_tokens": 4}
    assert server.args == {"model": "demo", name: value, "tensor-parallel-size": 2}


def test_an_unknown_option_takes_no_option_as_its_value() -> None:
    server = only("vllm serve demo --none-such -tp 2 --other -1 more")
    assert server.args == {"model": "demo", "tensor-parallel-size": 2}
    assert set(server.dropped) == {"--none-such", "--other", "a word beside the model"}


def test_arguments_without_a_value_in_the_file_are_left_out() -> None:
    script = (
        'vllm serve "$1" --port $PORT --api-key "$KEY" --served-model-name "$(basename $1)" --seed 1 "$@"'
    )
    server = only(script)
    assert server.args == {"seed": 1}
    assert server.dropped["--api-key"] == "has $KEY, which the file does not set: set it in the graph."
    assert set(server.dropped) == {"the model", "--port", "--api-key", "--served-model-name", "$@"}
    assert "model" not in graph_for([server], 8).sections["VllmWorker"]


@pytest.mark.parametrize(
    "script",
    [
        "docker pull vllm/vllm-openai:latest",
        "IMAGE=vllm/vllm-openai:latest",
        "echo vllm serve demo",
        "which vllm serve",
        "python -m dynamo.frontend --http-port 80",
    ],
)
def test_scripts_that_start_no_server_are_refused(tmp_path: Path, script: str) -> None:
    (tmp_path / "run.sh").write_text(script)
    with pytest.raises(ConfigError, match="starts no vLLM server"):
        servers_of(str(tmp_path / "run.sh"))


def counts(servers: list[Server]) -> tuple[object, object, set[str]]:
    graph = graph_for(servers, 8)
    sections = [graph.sections.get(name) for name in ("VllmWorker", "PrefillWorker")]
    decode, prefill = [section["ServiceArgs"]["workers"] if section else 0 for section in sections]
    return decode, prefill, set(graph.dropped)


ONE = "vllm serve demo -tp 2 "


@pytest.mark.parametrize(
    ("script", "decode", "prefill", "dropped"),
    [
        (f"{ONE} --port 1\n{ONE} --port 2", 2, 0, set()),
        (f"{ONE} --port 1\n{ONE} --port 1", 2, 2, set()),
        (f"{ONE}\nvllm serve other", 2, 2, {"server 2 (other)"}),
        (f"{ONE} -dp 2\n", 2, 0, set()),
        (f"{ONE} -dp 4 -dpl 2\n{ONE} -dp 4 -dpl 2 -dpr 2 --headless", 4, 0, None),
        (f"{ONE} -tp nonsense", 4, 4, set()),
        (f"{ONE} -tp 0", 4, 4, set()),
        (f"{ONE} -dp 2 --enable-expert-parallel", 2, 0, {"data-parallel-size"}),
        (
            "\n".join(
                f'{ONE} --kv-transfer-config \'{{"kv_role": "kv_{role}"}}\''
                for role in ("producer", "consumer")
            ),
            1,
            1,
            {"kv-transfer-config"},
        ),
        (f'{ONE} --kv-transfer-config \'{{"kv_role": "kv_producer"}}\'', 2, 2, {"kv-transfer-config"}),
        (
            2 * "python3 -m dynamo.vllm --model demo &\n"
            + "python3 -m dynamo.vllm --model demo --is-prefill-worker",
            2,
            1,
            set(),
        ),
    ],
)
def test_workers_of_each_role_are_counted(
    tmp_path: Path, script: str, decode: int, prefill: int, dropped: set[str] | None
) -> None:
    (tmp_path / "run.sh").write_text(script)
    found = counts(servers_of(str(tmp_path / "run.sh")))
    assert found[:2] == (decode, prefill)
    assert dropped is None or found[2] == dropped


def manifest(tmp_path: Path, *documents: object) -> list[Server]:
    (tmp_path / "m.yaml").write_text(yaml.safe_dump_all(documents))
    return servers_of(str(tmp_path / "m.yaml"))


def test_roles_follow_from_labels_and_names(tmp_path: Path) -> None:
    def deployment(role: str, replicas: int, **metadata: object) -> dict[str, object]:
        container = {"image": "any", "command": ["vllm", "serve", "demo"]}
        template = {"metadata": metadata, "spec": {"containers": [container]}}
        return {"kind": "Deployment", "spec": {"replicas": replicas, "template": template}, "name": role}

    servers = manifest(
        tmp_path, deployment("x", 3, labels={"any/role": "decode"}), deployment("x", 2, name="llm-prefill")
    )
    assert counts(servers) == (3, 2, set())
    servers = manifest(tmp_path, {"roles": [deployment("prefill", 1), deployment("decode", 4)]})
    assert counts(servers) == (4, 1, set())


def test_the_environment_of_a_container_is_substituted(tmp_path: Path) -> None:
    env = [{"name": "M", "value": "demo"}, {"name": "K", "valueFrom": {"secretKeyRef": {}}}]
    scripted = {"command": ["sh", "-c"], "args": ["exec vllm serve $M --seed 3"], "env": env}
    listed = {
        "image": "vllm/vllm-openai",
        "args": ["--model=$(M)", "--seed", "3", "--api-key", "$(K)"],
        "env": env,
    }
    [first, second] = manifest(tmp_path, {"containers": [scripted, listed]})
    assert first.args == second.args == {"model": "demo", "seed": 3}
    assert list(second.dropped) == ["--api-key"]
    service = {"image": "vllm/vllm-openai", "command": "--model ${M:-demo} --seed $S", "environment": ["S=3"]}
    [third] = manifest(tmp_path, {"services": {"llm": service}})
    assert third.args == first.args


def test_a_node_count_becomes_nnodes_if_it_divides_the_ranks(tmp_path: Path) -> None:
    def worker(*args: str) -> dict[str, object]:
        container = {"command": ["python3", "-m", "dynamo.vllm", "--model", "demo", *args]}
        return {"multinode": {"nodeCount": 2}, "extraPodSpec": {"mainContainer": container}}

    assert manifest(tmp_path, worker("-tp", "16"))[0].args["nnodes"] == 2
    for args in (("-dp", "16"), ("-tp", "x"), ("-tp", "3")):
        assert "nnodes" not in manifest(tmp_path, worker(*args))[0].args


def test_the_frontend_of_a_dynamo_manifest_is_converted(tmp_path: Path) -> None:
    front = {"command": ["python3", "-m", "dynamo.frontend", "--http-port", "9000", "--router-mode", "kv"]}
    back = {"command": ["python3", "-m", "dynamo.vllm", "--model", "demo"]}
    graph = graph_for(manifest(tmp_path, {"spec": [front, back]}), 2)
    assert (graph.sections["Frontend"]["port"], graph.sections["Processor"]) == (9000, {"router": "kv"})


def test_secrets_reach_neither_output_nor_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "v.yaml"
    source.write_text("model: demo\napi-key:\nhf-token: hf_secret\nhost: 0.0.0.0\n")
    main(["init", str(tmp_path / "g.yaml"), "--from", str(source)])
    assert not (tmp_path / "g.keys").exists()
    text = capsys.readouterr().out + (tmp_path / "g.yaml").read_text()
    assert "hf_secret" not in text
    assert "set HF_TOKEN in the environment" in text
    assert "api-key has no value" in text


def test_decode_and_prefill_servers_may_have_the_same_api_key(tmp_path: Path) -> None:
    roles = ("producer", "consumer")
    both = [f'{ONE} --api-key sk-1 --kv-transfer-config \'{{"kv_role": "kv_{role}"}}\'' for role in roles]
    (tmp_path / "run.sh").write_text("\n".join(both))
    graph = graph_for(servers_of(str(tmp_path / "run.sh")), 8)
    assert (graph.keys, list(graph.dropped)) == (["sk-1"], ["kv-transfer-config"])


def test_valid_api_keys_become_lines_of_a_file(tmp_path: Path) -> None:
    keys = json.dumps(["good=1", "with space", "two\nroot=lines", {"a": "b"}, True, 12345])
    (tmp_path / "v.yaml").write_text(
        f"model: demo\napi-key: {keys}\nseed: 2024-01-01\nserved-model-name: []\n"
    )
    assert (
        main(["init", str(tmp_path / "g.yaml"), "--from", str(tmp_path / "v.yaml")]) == 1
    )  # 1: the seed is wrong
    assert (tmp_path / "g.keys").read_text() == "client-1=good=1\nclient-2=12345\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("on: {push: 1}\njobs: [1]\n", "starts no vLLM server"),
        ('services: {a: {command: "don\'t"}}\n', "starts no vLLM server"),
        ("spec: {envs: [{name: DYN_DEPLOYMENT_CONFIG, value: '{'}]}\n", "holds no JSON object"),
        ("spec: {envs: [{name: DYN_DEPLOYMENT_CONFIG, value: '3'}]}\n", "holds no JSON object"),
        ("a: &a\n  - *a\n", "has an alias to a mapping that contains the alias"),
        (
            "a0: &a0 [0]\n" + "".join(f"a{n}: &a{n} [{9 * f'*a{n - 1}, '}]\n" for n in range(1, 9)),
            "aliases make more",
        ),
    ],
)
def test_odd_manifests_are_refused_in_a_sentence(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.yaml").write_text(text)
    assert main(["init", str(tmp_path / "g.yaml"), "--from", str(tmp_path / "m.yaml")]) == 2
    assert said in capsys.readouterr().err


def test_a_key_that_is_no_text_is_no_vllm_argument() -> None:
    assert not is_vllm_config([True, 3, "model"])


def test_a_graph_without_a_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text(json.dumps({"max-num-seqs": 8, "gpu-memory-utilization": 0.5}))
    assert main(["init", str(tmp_path / "g.yaml"), "--from", str(tmp_path / "v.yaml")]) == 1
    with pytest.raises(ConfigError, match="VllmWorker has no model"):
        load(tmp_path / "g.yaml", {})


def test_init_quotes_a_file_name_and_overwrites_no_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "v.yaml", tmp_path / "a b.yaml"
    source.write_text("model: demo\napi-key: sk-0123456789\n")
    assert main(["init", str(out), "--from", str(source)]) == 0
    assert f"serve -f '{out}'" in capsys.readouterr().out
    (tmp_path / "a b.keys").unlink()
    assert main(["init", str(out), "--from", str(source)]) == 2
    assert not (tmp_path / "a b.keys").exists()  # no key file beside an older graph
