"""pdserve's command line, loader and plan accept the pods' arguments, environment and YAML. Faults that
users of other charts report do not happen here; "Complaint" names these reports."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cli import build_group
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.contract.records import Role
from pdserve.plan.machine import Machine, what_if
from pdserve.plan.plan import Plan, make_plan
from pdserve.process.life import LAST_RESORT
from pdserve.process.nodes import GROUP_VARIABLE
from pdserve.security.credentials import Credentials
from tests.deploy.helm import COMBINATIONS, FILES, HTTP, Container, Rendering, combination, graph_yaml, render
from tests.deploy.prometheus import promtool
from tests.observe.test_metrics_page import METRICS

EACH = ("demo", "gpus", "both", "alone", "scaled", "clusters", "servers", "joined")
POD_IP = "10.1.2.3"
FIELDS = {"status.podIP": POD_IP}
"""Values of pod fields. Other fields, which are labels of a LeaderWorkerSet, get 0."""
RANK = "PDSERVE_NODE_RANK"
ENGINE = Path(__file__).parents[2] / "pdserve/engine/vllm/process.py"
LEASE = int(re.findall(r"^LEASE = (\d+)$", ENGINE.read_text(), re.M)[0])
"""seconds of a KV lease, read from the source because the module imports vLLM"""


class Pods:
    """The pods of a rendering as pdserve sees them."""

    def __init__(self, name: str, folder: Path, credentials: Credentials) -> None:
        self.name = name
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


def _parsed(arguments: Sequence[str]) -> dict[str, Any]:
    command, *words = (word.replace(f"$({RANK})", "1") for word in arguments)
    return build_group().commands[command].make_context(command, words).params


def test_arguments_are_those_of_the_command_line() -> None:
    renderings = [combination(name).roles() for name in COMBINATIONS]
    given = {(role, *each.spec["args"]) for roles in renderings for role, each in roles.items()}
    assert {role for role, *_ in given} == {"frontend", "decode", "prefill", "both"}
    for role, *arguments in given:
        assert arguments[0] == role
        assert str(_parsed(arguments)["file"]) == "/etc/pdserve/graph/graph.yaml"


@pytest.fixture(params=EACH)
def pods(request: pytest.FixtureRequest, tmp_path: Path, credentials: Credentials) -> Pods:
    return Pods(request.param, tmp_path, credentials)


def test_each_role_is_a_deployment_with_its_planned_gpus(pods: Pods) -> None:
    """Complaint (kserve#5987, modelplane#175, llm-d#1189): no disaggregation, and no error."""
    config = pods.config(next(iter(pods.rendering.roles())))
    sections = [config.decode and config.decode.role, config.prefill and "prefill"]
    sections += ["frontend"] if config.frontend and pods.name != "joined" else []
    assert set(pods.rendering.roles()) == set(filter(None, sections))
    counts = {
        "frontend": config.frontend and config.frontend.processes,
        "prefill": config.prefill and config.prefill.count,
    }
    for role, each in pods.rendering.roles().items():
        if pods.name != "gpus" and "replicas" in each.owner["spec"]:
            assert each.owner["spec"]["replicas"] == counts.get(role, config.decode and config.decode.count)
        planned = [worker.gpus for worker in pods.plan(role).workers] or [0]
        assert [each.spec["resources"].get("limits", {}).get("nvidia.com/gpu", 0)] == planned


def test_roles_of_a_graph_listen_on_the_addresses_of_their_pods(pods: Pods) -> None:
    """Complaint (kthena#1781, llm-d#650): a side channel at 0.0.0.0, or none."""
    roles, services = pods.rendering.roles(), pods.rendering.of("Service")
    configs = {role: pods.config(role) for role in roles}
    for role, each in roles.items():
        config, (slot,) = configs[role], pods.plan(role).slots
        assert (config.host, slot.pages_port) == (POD_IP, each.ports["pages"])
        if role == "frontend":
            assert config.frontend
            assert (config.frontend.host, config.frontend.port) == ("0.0.0.0", each.ports["http"])
        else:
            assert slot.stream_port == each.ports["stream"]
            assert slot.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == slot.env["VLLM_HOST_IP"] == POD_IP
            assert "eth0" in slot.env["UCX_NET_DEVICES"]
    shared = {(each.nats, each.etcd, each.namespace, each.security.credentials) for each in configs.values()}
    ((nats, etcd, *_),) = shared
    for server, ports in re.findall(r"pdserve-\w+-\d\.([\w-]+):(\d+)", f"{nats},{etcd}"):
        assert [str(port["port"]) for port in services[server]["spec"]["ports"]] == [ports]


def test_grace_periods_of_pods_cover_drain_and_kv_lease(pods: Pods) -> None:
    for role, each in pods.rendering.roles().items():
        slept = each.spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        needs = pods.config(role).drain_timeout + LEASE + LAST_RESORT + int(slept[1])
        assert each.pod["spec"]["terminationGracePeriodSeconds"] == needs


def test_a_worker_that_spans_hosts_is_a_leaderworkerset(tmp_path: Path, credentials: Credentials) -> None:
    """Each pod learns from its labels which host of which worker it is, and has the GPUs of its own ranks."""
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
    assert _parsed(pod.spec["args"])["node_rank"] == 1
    planned = pods.plan("decode").workers
    assert [(worker.slot.node, worker.gpus) for worker in planned] == [(0, 2), (1, 2)]
    assert pod.spec["resources"]["limits"]["nvidia.com/gpu"] == 2


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


WORKERS = {"decode", "prefill"}
ROLES = {"frontend", *WORKERS}
ALL = {*ROLES, "nats", "etcd", "stranger"}
REACHED = {
    "frontend": {"http": ALL, "pages": {"frontend"}},
    "decode": {"stream": {"frontend"}, "pages": {"frontend"}, "*": WORKERS},
    "prefill": {"stream": {"frontend"}, "pages": {"frontend"}, "*": WORKERS},
    "nats": {"nats": ROLES},
    "etcd": {"client": ROLES},
}
"""target -> port -> components that may reach it"""


@pytest.mark.parametrize("target", REACHED)
def test_only_the_listed_components_reach_a_port(target: str) -> None:
    found: dict[str, set[str]] = {}
    for source in ALL:
        for port in _reaches(combination("demo"), source, target):
            found.setdefault(port, set()).add(source)
    assert found == REACHED[target]


def test_members_of_clusters_and_joined_graphs_are_reached() -> None:
    clusters, joined = combination("clusters"), combination("joined")
    assert _reaches(clusters, "nats", "nats") == {"routes"}
    assert _reaches(clusters, "etcd", "etcd") == {"client", "peers"}
    assert _reaches(joined, "frontend", "decode", graph="first") == {"stream", "pages"}
    assert _reaches(joined, "frontend", "decode") == set()


def test_monitoring_reaches_only_pages() -> None:
    policies = combination("gpus").of("NetworkPolicy").values()
    rules = [rule for policy in policies for rule in policy["spec"]["ingress"]]
    found = [rule["ports"] for rule in rules if any("namespaceSelector" in peer for peer in rule["from"])]
    assert found == [[{"port": "pages"}]] * len(combination("gpus").roles())


# the check before an install


def _check(yaml: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the hook's command with the YAML of its annotation."""
    (job,) = render({"config": yaml}).of("Job").values()
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    pod = job["spec"]["template"]
    (folder / "graph.yaml").write_text(pod["metadata"]["annotations"]["pdserve/graph"])
    assert (folder / "graph.yaml").read_text() == yaml
    (folder / "api-keys").write_text("a-long-enough-key")
    (shim := folder / "pdserve").write_text(f'#!/bin/sh\nexec {sys.executable} -m pdserve "$@"\n')
    shim.chmod(0o755)
    (container,) = pod["spec"]["containers"]
    env = {each["name"]: each["value"].replace("/etc/pdserve/keys", str(folder)) for each in container["env"]}
    command = [word.replace("/etc/pdserve/graph", str(folder)) for word in container["command"]]
    env = os.environ | env | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("yaml", "code", "says"),
    [
        (FILES["both"], 0, "both-0"),
        (FILES["local"].replace("max-num-seqs", "max-num-seq"), 1, "did you mean max-num-seqs"),
    ],
    ids=["valid", "invalid"],
)
def test_the_check_accepts_valid_and_refuses_invalid_files(
    tmp_path: Path, yaml: str, code: int, says: str
) -> None:
    checked = _check(yaml + HTTP, tmp_path)
    assert checked.returncode == code, checked.stdout + checked.stderr
    assert says in checked.stdout + checked.stderr


def test_the_check_plans_with_the_gpus_of_a_pod() -> None:
    (job,) = combination("gpus").of("Job").values()
    script = job["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    planned = re.findall(r"plan --role (\w+) --gpus '(.*)'\n", script)
    assert dict(planned) == {"decode": "2xA10", "prefill": "2xA10", "frontend": "0"}


# scaling


def _queries(scaled: dict[str, Any]) -> list[str]:
    return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]


def test_prefill_and_decode_scale_apart() -> None:
    """Complaint (llm-d-autoscaling#1213): an autoscaler that ignores prefill."""
    objects = combination("scaled").of("ScaledObject")
    assert {name: each["spec"]["scaleTargetRef"]["name"] for name, each in objects.items()} == {
        "pdserve-decode": "pdserve-decode",
        "pdserve-prefill": "pdserve-prefill",
    }
    for role in ("decode", "prefill"):
        assert "replicas" not in combination("scaled").of("Deployment")[f"pdserve-{role}"]["spec"]


def test_queries_ask_for_metrics_that_exist() -> None:
    scaled = [each for name in ("scaled", "both") for each in combination(name).of("ScaledObject").values()]
    queries = [_queries(each) for each in scaled]
    assert [len(asked) for asked in queries] == [1, 1, 2]
    for metric, labels in re.findall(r"(pdserve_\w+)\{(.*?)\}", str(queries)):
        assert set(re.findall(r"(\w+)=", labels)) - {"namespace"} <= METRICS[metric][1]


def test_prometheus_answers_the_queries(tmp_path: Path) -> None:
    """Prometheus is asked with busy workers and a backlog, and without any series. In the second case, KEDA must get 0,
    not an empty result."""
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
    """Complaint (llm-d-modelservice#252): rollouts that mix revisions. A new YAML has a new ConfigMap, so that all
    roles roll out; old pods keep their ConfigMap, which cannot change."""
    before, after = (render({"config": FILES["local"] + HTTP + end}) for end in ("", "# changed\n"))
    names = []
    for rendering in (before, after):
        (graph,) = [each for each in rendering.of("ConfigMap").values() if "graph.yaml" in each["data"]]
        assert graph["immutable"]
        for each in rendering.roles().values():
            (volume,) = [volume for volume in each.pod["spec"]["volumes"] if volume["name"] == "graph"]
            assert volume["configMap"]["name"] == graph["metadata"]["name"]
        names.append(graph["metadata"]["name"])
    assert names[0] != names[1]


def test_members_of_etcd_are_named_by_their_pods() -> None:
    rendering = render({"fullnameOverride": "llm", "etcd": {"replicas": 3}})
    (name,) = (name for name in rendering.of("StatefulSet") if name.endswith("-etcd"))
    script = rendering.of("ConfigMap")[name]["data"]["member.sh"]
    assert set(re.findall(r"https://([\w-]+-\d\.[\w-]+):", script)) == {
        f"{name}-{n}.{name}" for n in range(3)
    }


def test_a_changed_configuration_of_nats_restarts_its_pods() -> None:
    one, three = (combination(name).of("StatefulSet")["pdserve-nats"] for name in ("demo", "clusters"))
    annotations = [each["spec"]["template"]["metadata"]["annotations"] for each in (one, three)]
    assert annotations[0]["pdserve/config"] != annotations[1]["pdserve/config"]
