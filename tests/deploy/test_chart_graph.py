"""What the chart starts is what pdserve understands: the pods' arguments, environment and YAML in pdserve's own command
line, loader and plan. And what users of other charts complain of (the threads are named) does not happen."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cli import build_group
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.credentials import Credentials
from pdserve.plan.machine import Machine, what_if
from pdserve.plan.plan import Plan, make_plan
from pdserve.process.life import LAST_RESORT
from pdserve.process.nodes import GROUP_VARIABLE
from pdserve.records import Role
from tests.deploy.helm import COMBINATIONS, FILES, OPEN, Container, Rendering, combination, graph_yaml, render
from tests.deploy.prometheus import promtool
from tests.test_metrics_page import METRICS

EACH = pytest.mark.parametrize("name", ["demo", "gpus", "both", "alone", "clusters", "servers", "joined"])
POD_IP = "10.1.2.3"
FIELDS = {"status.podIP": POD_IP}
"""and labels of a LeaderWorkerSet, which are numbers"""
RANK = "PDSERVE_NODE_RANK"
ENGINE = Path(__file__).parents[2] / "pdserve/engine/vllm/process.py"
LEASE = int(re.findall(r"^LEASE = (\d+)$", ENGINE.read_text(), re.M)[0])
"""of KV that was prefilled; read, since the module imports vLLM"""
SECURITY = (Path(__file__).parents[2] / "docs/security.md").read_text()


class Pods:
    """The pods of a rendering as pdserve sees them."""

    def __init__(self, name: str, folder: Path, credentials: Credentials) -> None:
        self.rendering = combination(name)
        self.file = folder / "graph.yaml"
        self.file.write_text(graph_yaml(self.rendering))
        self.keys = folder / "api-keys"
        self.keys.write_text("a-long-enough-key")
        self._credentials = credentials

    def env(self, each: Container) -> dict[str, str]:
        mounted = {
            "/etc/pdserve/credentials": str(self._credentials.folder),
            "@/etc/pdserve/keys/api-keys": f"@{self.keys}",
        }
        env: dict[str, str] = {}
        for name, variable in each.env.items():
            if "value" in variable:
                env[name] = mounted.get(str(variable["value"]), str(variable["value"]))
            elif "fieldRef" in variable["valueFrom"]:
                env[name] = FIELDS.get(variable["valueFrom"]["fieldRef"]["fieldPath"], "0")
        return env

    def config(self, role: str) -> Config:
        return load(self.file, self.env(self.rendering.roles()[role]))

    def plan(self, role: str) -> Plan:
        machine = replace(what_if("2xA10", Machine.detect({})), devices={POD_IP: "eth0"})
        env = self.env(self.rendering.roles()[role])
        return make_plan(self.config(role), machine, roles={Role(role)}, index=0, env=env)


@pytest.fixture
def pods(name: str, tmp_path: Path, credentials: Credentials) -> Pods:
    return Pods(name, tmp_path, credentials)


def test_arguments_are_those_of_the_command_line() -> None:
    given = {
        (role, *each.spec["args"])
        for name in COMBINATIONS
        for role, each in combination(name).roles().items()
    }
    assert {role for role, *_ in given} == {"frontend", "decode", "prefill", "both"}
    for role, command, *words in given:
        made = (
            build_group()
            .commands[command]
            .make_context(command, [word.replace(f"$({RANK})", "1") for word in words])
        )
        assert (command, str(made.params["file"])) == (role, "/etc/pdserve/graph/graph.yaml")


@EACH
def test_each_role_of_the_file_is_a_deployment(name: str, pods: Pods) -> None:
    """P/D that silently is none: kserve#5987, modelplane#175, llm-d#1189."""
    config = pods.config(next(iter(pods.rendering.roles())))
    sections = [config.decode and config.decode.role, config.prefill and "prefill"]
    sections += ["frontend"] if config.frontend and name != "joined" else []
    assert set(pods.rendering.roles()) == set(filter(None, sections))
    counts = {
        "frontend": config.frontend and config.frontend.processes,
        "prefill": config.prefill and config.prefill.count,
    }
    for role, each in pods.rendering.roles().items():
        if name != "gpus" and "replicas" in each.owner["spec"]:
            assert each.owner["spec"]["replicas"] == counts.get(role, config.decode and config.decode.count)


@EACH
def test_gpus_are_those_of_the_plan(name: str, pods: Pods) -> None:
    for role, each in pods.rendering.roles().items():
        planned = [worker.gpus for worker in pods.plan(role).workers] or [0]
        assert [each.spec["resources"].get("limits", {}).get("nvidia.com/gpu", 0)] == planned


@EACH
def test_ports_and_addresses_are_the_pods_own(name: str, pods: Pods) -> None:
    """A side channel at 0.0.0.0, or none: kthena#1781, llm-d#650."""
    for role, each in pods.rendering.roles().items():
        config, (slot,) = pods.config(role), pods.plan(role).slots
        assert (config.host, slot.pages_port) == (POD_IP, each.ports["pages"])
        if role == "frontend":
            assert config.frontend
            assert (config.frontend.host, config.frontend.port) == ("0.0.0.0", each.ports["http"])
        else:
            assert slot.stream_port == each.ports["stream"]
            assert slot.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == slot.env["VLLM_HOST_IP"] == POD_IP
            assert "eth0" in slot.env["UCX_NET_DEVICES"]


def test_a_worker_that_spans_hosts_is_a_leaderworkerset(tmp_path: Path, credentials: Credentials) -> None:
    """Each pod learns by its labels which host of which worker it is, and has the GPUs of its own ranks."""
    pods = Pods("hosts", tmp_path, credentials)
    assert set(pods.rendering.of("Deployment")) == {"pdserve-frontend", "pdserve-prefill"}
    spec = pods.rendering.of("LeaderWorkerSet")["pdserve-decode"]["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    pod = pods.rendering.roles()["decode"]
    sources = [pod.env[name]["valueFrom"]["fieldRef"]["fieldPath"] for name in (RANK, GROUP_VARIABLE)]
    assert [re.findall(r"sigs\.k8s\.io/([\w-]+)", each) for each in sources] == [
        ["worker-index"],
        ["group-index"],
    ]
    words = [word.replace(f"$({RANK})", "1") for word in pod.spec["args"]]
    assert build_group().commands["decode"].make_context("decode", words[1:]).params["node_rank"] == 1
    planned = pods.plan("decode").workers
    assert [(worker.slot.node, worker.gpus) for worker in planned] == [(0, 2), (1, 2)]
    assert pod.spec["resources"]["limits"]["nvidia.com/gpu"] == 2


@EACH
def test_the_graph_is_one(name: str, pods: Pods) -> None:
    configs = [pods.config(role) for role in pods.rendering.roles()]
    assert len({(each.nats, each.etcd, each.namespace, each.security.credentials) for each in configs}) == 1
    services = pods.rendering.of("Service")
    for server, given in (("nats", configs[0].nats), ("etcd", configs[0].etcd)):
        assert given
        for address in re.findall(rf"pdserve-{server}-\d\.([\w-]+):(\d+)", given):
            (port,) = services[address[0]]["spec"]["ports"]
            assert str(port["port"]) == address[1]


@EACH
def test_a_pod_may_take_as_long_to_end_as_its_process(name: str, pods: Pods) -> None:
    for role, each in pods.rendering.roles().items():
        slept = each.spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        needs = pods.config(role).drain_timeout + LEASE + LAST_RESORT + int(slept[1])
        assert each.pod["spec"]["terminationGracePeriodSeconds"] == needs


def test_a_longer_drain_is_a_longer_grace() -> None:
    text = FILES["local"] + OPEN + "Graph: {drain-timeout: 120}"
    grace = {
        role: each.pod["spec"]["terminationGracePeriodSeconds"]
        for role, each in render({"config": text}).roles().items()
    }
    assert grace == {"decode": 165, "prefill": 165, "frontend": 170}


# the network


def _reaches(rendering: Rendering, source: str, target: str, graph: str = "pdserve") -> set[str]:
    """The names of the target's ports that a pod of the component `source` may reach; `*` for all."""
    (policy,) = [
        each
        for each in rendering.of("NetworkPolicy").values()
        if each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == target
    ]
    labels = {"app.kubernetes.io/name": "pdserve", "app.kubernetes.io/part-of": graph}
    found = set()
    for rule in policy["spec"]["ingress"]:
        if "from" not in rule or any(_is_peer(peer, source, labels) for peer in rule["from"]):
            found |= {port["port"] for port in rule.get("ports", [{"port": "*"}])}
    return found


def _is_peer(peer: dict[str, Any], source: str, labels: dict[str, str]) -> bool:
    selector = peer.get("podSelector", {})
    (expression,) = selector.get("matchExpressions", [{"values": []}])
    return source in expression["values"] and selector["matchLabels"] == labels


REACHED = {
    ("stranger", "frontend"): {"http"},
    ("stranger", "decode"): set[str](),
    ("stranger", "prefill"): set(),
    ("stranger", "nats"): set(),
    ("stranger", "etcd"): set(),
    ("frontend", "frontend"): {"http", "pages"},
    ("frontend", "decode"): {"stream", "pages"},
    ("frontend", "prefill"): {"stream", "pages"},
    ("decode", "frontend"): {"http"},
    ("decode", "prefill"): {"*"},
    ("prefill", "decode"): {"*"},
    ("decode", "decode"): {"*"},
    ("decode", "nats"): {"nats"},
    ("prefill", "etcd"): {"client"},
    ("frontend", "etcd"): {"client"},
    ("nats", "decode"): set(),
    ("etcd", "prefill"): set(),
    ("nats", "etcd"): set(),
    ("etcd", "etcd"): set(),
    ("nats", "nats"): set(),
}


@pytest.mark.parametrize(("source", "target"), REACHED)
def test_what_may_reach_what(source: str, target: str) -> None:
    assert _reaches(combination("demo"), source, target) == REACHED[source, target]


def test_members_of_a_cluster_reach_each_other_and_a_joined_model_its_graph() -> None:
    clusters, joined = combination("clusters"), combination("joined")
    assert _reaches(clusters, "nats", "nats") == {"routes"}
    assert _reaches(clusters, "etcd", "etcd") == {"client", "peers"}
    assert _reaches(joined, "frontend", "decode", graph="first") == {"stream", "pages"}
    assert _reaches(joined, "frontend", "decode") == set()


def test_monitoring_reaches_pages_alone() -> None:
    for policy in combination("gpus").of("NetworkPolicy").values():
        for rule in policy["spec"]["ingress"]:
            if any("namespaceSelector" in peer for peer in rule["from"]):
                assert rule["ports"] == [{"port": "pages"}]


def test_each_port_is_on_the_page_of_security() -> None:
    rows = " ".join(re.findall(r"^\| .*", SECURITY.split("## Ports")[1].split("## ")[0], re.M))
    names = {
        "http": "frontend",
        "pages": "*pages*",
        "stream": "*stream*",
        "client": "etcd",
        "peers": "other etcds",
    }
    named = {port for each in combination("clusters").containers() for port in each.ports}
    assert named - {"nats", "routes"} == names.keys()
    assert [name for name in names.values() if name not in rows] == []


# before an install


def _check(values: dict[str, Any], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run what the hook runs, with the YAML of its annotation."""
    rendering = render(values)
    (job,) = rendering.of("Job").values()
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    pod = job["spec"]["template"]
    (file, keys) = folder / "graph.yaml", folder / "api-keys"
    file.write_text(pod["metadata"]["annotations"]["pdserve/graph"])
    assert file.read_text() == graph_yaml(rendering)
    keys.write_text("a-long-enough-key")
    shim = folder / "pdserve"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m pdserve "$@"\n')
    shim.chmod(0o755)
    (container,) = pod["spec"]["containers"]
    env = {each["name"]: each["value"].replace("/etc/pdserve/keys", str(folder)) for each in container["env"]}
    command = [word.replace("/etc/pdserve/graph", str(folder)) for word in container["command"]]
    env = os.environ | env | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_check_takes_what_serves(tmp_path: Path) -> None:
    checked = _check({"config": FILES["both"] + OPEN}, tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "both-0" in checked.stdout
    assert "frontend-0" in checked.stdout


def test_the_check_refuses_what_cannot_work(tmp_path: Path) -> None:
    checked = _check({"config": FILES["local"].replace("max-num-seqs", "max-num-seq") + OPEN}, tmp_path)
    assert checked.returncode == 1
    assert "did you mean max-num-seqs" in checked.stderr


def test_the_check_plans_with_the_gpus_of_a_pod() -> None:
    (job,) = combination("gpus").of("Job").values()
    script = job["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert "plan --role decode --gpus '2xA10'\n" in script
    assert "plan --role prefill --gpus '2xA10'\n" in script
    assert "plan --role frontend --gpus '0'\n" in script


# scaling


def test_prefill_and_decode_scale_apart(tmp_path: Path) -> None:
    """An autoscaler that ignores prefill: llm-d-autoscaling#1213."""
    objects = combination("scaled").of("ScaledObject")
    assert {name: each["spec"]["scaleTargetRef"]["name"] for name, each in objects.items()} == {
        "pdserve-decode": "pdserve-decode",
        "pdserve-prefill": "pdserve-prefill",
    }
    queries = {name: _queries(each) for name, each in objects.items()}
    assert [re.findall(r"pdserve_\w+", query) for (query,) in queries.values()] == [
        ["pdserve_kv_usage_ratio", "pdserve_backlog_seconds"],
        ["pdserve_engine_requests", "pdserve_backlog_seconds"],
    ]
    assert len(_queries(combination("both").of("ScaledObject")["pdserve-both"])) == 2
    for role in ("decode", "prefill"):
        assert "replicas" not in combination("scaled").of("Deployment")[f"pdserve-{role}"]["spec"]


def _queries(scaled: dict[str, Any]) -> list[str]:
    return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]


def test_queries_ask_for_metrics_that_exist() -> None:
    for name in ("scaled", "both"):
        for each in combination(name).of("ScaledObject").values():
            for query in _queries(each):
                for metric, labels in re.findall(r"(pdserve_\w+)\{(.*?)\}", query):
                    _, known, _ = METRICS[metric]
                    assert set(re.findall(r"(\w+)=", labels)) - {"namespace"} <= known


def test_prometheus_answers_the_queries(tmp_path: Path) -> None:
    """With busy workers and work that waits, and with nothing at all: then KEDA must get 0, not nothing."""
    scaled = combination("scaled").of("ScaledObject")
    (decode,), (prefill,) = (_queries(scaled[f"pdserve-{role}"]) for role in ("decode", "prefill"))
    labels = 'model="demo",namespace="llm"'
    series = {
        f'pdserve_kv_usage_ratio{{role="decode",instance="a",{labels}}}': 0.8,
        f'pdserve_kv_usage_ratio{{role="decode",instance="b",{labels}}}': 0.4,
        f'pdserve_kv_usage_ratio{{role="prefill",instance="c",{labels}}}': 0.5,
        f'pdserve_engine_requests{{role="prefill",state="running",instance="c",{labels}}}': 3,
        f'pdserve_engine_requests{{role="prefill",state="running",instance="d",{labels}}}': 1,
        f'pdserve_engine_requests{{role="prefill",state="waiting",instance="d",{labels}}}': 7,
        f'pdserve_backlog_seconds{{role="prefill",instance="a",{labels}}}': 1,
        f'pdserve_backlog_seconds{{role="prefill",instance="b",{labels}}}': 2,
        f'pdserve_backlog_seconds{{role="decode",instance="e",{labels}}}': 20,
    }
    inputs = [{"series": name, "values": f"{value}x10"} for name, value in series.items()]
    tests = [
        {"interval": "1m", "input_series": given, "promql_expr_test": expected}
        for given, expected in (
            (inputs, [_expects(decode, 1.5 + 2), _expects(prefill, 2 + 1.5)]),
            ([], [_expects(decode, 0), _expects(prefill, 0)]),
        )
    ]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"tests": tests}))
    tested = promtool("test", "rules", str(tmp_path / "tests.yml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def _expects(query: str, value: float) -> dict[str, Any]:
    return {"expr": query, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": value}]}


# other complaints


def test_a_revision_keeps_its_own_yaml() -> None:
    """Rollouts that mix revisions: llm-d-modelservice#252. All roles roll with the YAML, and the pods of before go on
    with what they started with: its ConfigMap has another name and cannot change."""
    before, after = (render({"config": FILES["local"] + OPEN + end}) for end in ("", "# changed\n"))
    names = []
    for rendering in (before, after):
        (graph,) = [each for each in rendering.of("ConfigMap").values() if "graph.yaml" in each["data"]]
        assert graph["immutable"]
        for each in rendering.roles().values():
            (volume,) = [volume for volume in each.pod["spec"]["volumes"] if volume["name"] == "graph"]
            assert volume["configMap"]["name"] == graph["metadata"]["name"]
        names.append(graph["metadata"]["name"])
    assert names[0] != names[1]
