"""Renders the chart of deploy/helm with the real helm, for several sets of values."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pdserve_bench.hosts.pods import Object, template

from tests.deploy.compose import FOLDER, installed

CHART = FOLDER / "helm/pdserve"
TOOLS = Path(sys.prefix) / "tools/kubernetes"
CONFIGS = FOLDER.parent / "configs"
SECRETS = {"credentials": {"existingSecret": "graph-certificates"}, "apiKeys": {"existingSecret": "keys"}}
"""Values of every rendering that does not set its own."""
HTTP = "\nSecurity: {allow: [plain-http]}\n"
TLS = "\nSecurity: {tls-certificate: /etc/pdserve/tls/tls.crt, tls-key: /etc/pdserve/tls/tls.key}\n"
PEM = dict.fromkeys(("ca.pem", "node.pem", "node-key.pem"), "PEM")
FILES = {name: (CONFIGS / f"{name}.yaml").read_text() for name in ("disagg", "both", "agg", "local")}
SEVERAL_HOSTS = """
Frontend: {port: 8000}
VllmWorker: {model: big, remote-prefill: true, tensor-parallel-size: 4, nnodes: 2, ServiceArgs: {workers: 3}}
PrefillWorker: {model: big, tensor-parallel-size: 2}
"""
OPTIONS: Object = {
    "imagePullSecrets": [{"name": "registry"}],
    "models": {"persistentVolumeClaim": {"claimName": "models"}},
    "home": {"hostPath": {"path": "/var/cache/pdserve"}},
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    "pod": {
        "metadata": {"annotations": {"example.org/team": "llm"}},
        "spec": {
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "priorityClassName": "serving",
        },
    },
    "gpu": {"kind": "A10"},
    "rdma": {"resource": "rdma/ib"},
    "frontend": {"replicas": 3, "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
    "decode": {"pod": {"spec": {"nodeSelector": {"gpu": "a10"}, "tolerations": [{"operator": "Exists"}]}}},
    "prefill": {"replicas": 4, "rollout": {"maxSurge": "25%", "maxUnavailable": 0}},
    "networkPolicy": {
        "clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
}
SCALED = {"enabled": True, "prometheus": "http://prometheus:9090", "labels": 'namespace="llm"'}
_OF_ROLES = ("Deployment", "LeaderWorkerSet")
COMBINATIONS: dict[str, Object] = {
    "demo": {},
    "gpus": {"config": FILES["disagg"] + HTTP} | OPTIONS,
    "both": {"config": yaml.safe_load(FILES["both"] + HTTP), "autoscaling": SCALED},
    "alone": {
        "config": FILES["agg"] + HTTP,
        "networkPolicy": {"enabled": False},
        "check": {"enabled": False},
    },
    "scaled": {"config": FILES["local"] + HTTP + "Graph: {drain-timeout: 120}", "autoscaling": SCALED},
    "clusters": {"nats": {"replicas": 3}, "etcd": {"replicas": 3}},
    "servers": {"nats": {"servers": "nats://n:4222"}, "etcd": {"servers": "e-0:2379,e-1:2379"}},
    "files": {
        "config": FILES["local"] + TLS,
        "credentials": {"existingSecret": "", "files": PEM},
        "tls": {"existingSecret": "tls"},
    },
    "certificates": {"credentials": {"existingSecret": "", "certManager": True}},
    "joined": {"join": "first"},
    "hosts": {"config": SEVERAL_HOSTS + HTTP},
    "cluster": {
        "fullnameOverride": "llm",
        "commonLabels": {"example.org/cost": "serving"},
        "image": {"digest": f"sha256:{64 * '0'}"},
        "openshift": True,
        "modelsClaim": {"size": "100Gi", "storageClassName": "nfs"},
        "download": ["org/model", "org/other"],
        "kvOffloadFolder": {"emptyDir": {"sizeLimit": "500Gi"}},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": ["llm.example.com"],
            "tls": [{"secretName": "t"}],
        },
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example.com"]},
        "frontend": {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"]}},
        "monitoring": {
            "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        },
    },
}
"""Sets of values beside `SECRETS`; together they set most values of the chart."""


@dataclass(frozen=True)
class Container:
    owner: Object
    """the Deployment, LeaderWorkerSet, StatefulSet or Job"""
    pod: Object
    """the owner's pod template: metadata and spec"""
    spec: Object

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["labels"]["app.kubernetes.io/component"])

    @property
    def env(self) -> dict[str, Object]:
        return {each["name"]: each for each in self.spec.get("env", [])}

    @property
    def ports(self) -> dict[str, int]:
        return {each["name"]: each["containerPort"] for each in self.spec.get("ports", [])}


class Rendering(list[Object]):
    def of(self, kind: str) -> dict[str, Object]:
        return {each["metadata"]["name"]: each for each in self if each["kind"] == kind}

    def owners(self) -> list[Object]:
        return [each for each in self if each["kind"] in (*_OF_ROLES, "StatefulSet", "Job")]

    def containers(self) -> Iterator[Container]:
        for owner in self.owners():
            pod = template(owner)
            for spec in (*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]):
                yield Container(owner, pod, spec)

    def roles(self) -> dict[str, Container]:
        """Return the containers of pdserve, by role."""
        return {each.name: each for each in self.containers() if each.owner["kind"] in _OF_ROLES}


def helm(command: str, values: Mapping[str, Any], *flags: str) -> "subprocess.CompletedProcess[str]":
    release = ["pdserve"] if command == "template" else []
    words = [installed(TOOLS / "helm"), command, *release, str(CHART), "--values", "-", *flags]
    return subprocess.run(words, input=json.dumps(values), capture_output=True, text=True, check=False)


def render(values: Mapping[str, Any]) -> Rendering:
    return Rendering(yaml.load_all(_rendered(json.dumps({**SECRETS, **values})), yaml.CSafeLoader))


def refusal(values: Mapping[str, Any]) -> str:
    """Return helm's error for values that it must refuse."""
    refused = helm("template", values)
    assert refused.returncode != 0, "helm accepted the values"
    return re.sub(r"\s+", " ", refused.stderr)


def combination(name: str) -> Rendering:
    return render(COMBINATIONS[name])


def graph_yaml(rendering: Rendering) -> str:
    (text,) = [each["data"]["graph.yaml"] for each in rendering if "graph.yaml" in each.get("data", {})]
    return str(text)


@cache
def _rendered(values: str) -> str:
    rendered = helm("template", json.loads(values))
    assert rendered.returncode == 0, rendered.stderr
    return rendered.stdout
