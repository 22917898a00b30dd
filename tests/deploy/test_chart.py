"""Renderings of the chart in deploy/helm are valid for Kubernetes, consistent, and as safe as docs/security.md says."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pdserve_bench.hosts.pods import Object, template
from referencing import Registry, Resource

from pdserve.config.env_overrides import VARIABLES
from pdserve.process.nodes import GROUP_VARIABLE
from pdserve.security.credentials import Credentials
from tests.deploy.compose import installed
from tests.deploy.helm import (
    CHART,
    COMBINATIONS,
    HTTP,
    SECRETS,
    TOOLS,
    Rendering,
    combination,
    graph_yaml,
    helm,
    refusal,
    render,
)

EACH = pytest.mark.parametrize("name", COMBINATIONS)
CUSTOM_APIS = {
    "keda.sh/v1alpha1",
    "cert-manager.io/v1",
    "leaderworkerset.x-k8s.io/v1",
    "gateway.networking.k8s.io/v1",
    "monitoring.coreos.com/v1",
}
KNOWN_VARIABLES = {
    *VARIABLES,
    "PDSERVE_API_KEYS",
    "POD_NAME",
    "HF_TOKEN",
    GROUP_VARIABLE,
    "PDSERVE_NODE_RANK",
}


def test_helm_lints_the_chart() -> None:
    """Lints only with `SECRETS`, because other tests render all other values."""
    linted = helm("lint", SECRETS, "--strict")
    assert linted.returncode == 0, linted.stdout + linted.stderr


@cache
def _validator(version: str, kind: str, api: str) -> Draft202012Validator:
    """Kubernetes' own schema of the kind, in which unknown keys are errors."""
    group = api.split("/")[0].split(".")[0] + "-" * ("/" in api) + api.partition("/")[2]
    schema = json.loads((TOOLS / version / f"{kind.lower()}-{group}.json").read_text())
    return Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> "Registry[Any]":
    definitions = json.loads((TOOLS / version / "_definitions.json").read_text())
    return Resource.from_contents(definitions) @ Registry()


@EACH
@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_kubernetes_takes_every_object_of_its_own_kinds(name: str, version: str) -> None:
    for each in combination(name):
        if each["apiVersion"] not in CUSTOM_APIS:
            errors = _validator(version, each["kind"], each["apiVersion"]).iter_errors(each)
            assert [f"{each['kind']}: {error.json_path}: {error.message}" for error in errors] == []


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in _keys(inner)}
    return {key for inner in value for key in _keys(inner)} if isinstance(value, list) else set()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("scaled", "ScaledObject"),
        ("certificates", "Certificate"),
        ("certificates", "Issuer"),
        ("cluster", "HTTPRoute"),
        ("cluster", "PodMonitor"),
        ("cluster", "PrometheusRule"),
    ],
)
def test_custom_resources_have_keys_that_exist(name: str, kind: str) -> None:
    objects = combination(name).of(kind).values()
    assert objects
    for each in objects:
        types = "".join(path.read_text() for path in (TOOLS / "package" / each["apiVersion"]).glob("*.d.ts"))
        for trigger in each["spec"].get("triggers", []):
            trigger.pop("metadata")  # free text
        each["spec"].pop("selector", None)
        for rule in (rule for group in each["spec"].get("groups", []) for rule in group["rules"]):
            del rule["labels"], rule["annotations"]
        if scaler := each["spec"].get("advanced", {}).get("horizontalPodAutoscalerConfig"):
            behavior = scaler.pop("behavior")
            _validator("1.25", "HorizontalPodAutoscalerBehavior", "autoscaling/v2").validate(behavior)
        assert [key for key in _keys(each["spec"]) if f'"{key}"' not in types] == []


@EACH
def test_pods_may_do_no_more_than_they_need(name: str) -> None:
    for each in combination(name).containers():
        pod = each.pod["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "variables of a Service would be taken for pdserve's own"
        assert each.env.keys() <= KNOWN_VARIABLES
        user = pod["securityContext"]
        assert user["runAsNonRoot"]
        if name == "cluster":  # OpenShift chooses the ids
            assert not user.keys() & {"runAsUser", "runAsGroup", "fsGroup"}
        else:
            assert user["runAsUser"] == user["fsGroup"] == _user_of_the_image()
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        adds = {"add": ["IPC_LOCK"]} if "rdma/ib" in each.spec.get("resources", {}).get("limits", {}) else {}
        assert each.spec["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], **adds},
        }


def _user_of_the_image() -> int:
    (line,) = [line for line in (CHART / "../../Dockerfile").read_text().splitlines() if "useradd" in line]
    return int(line.split("--uid ")[1].split()[0])


@EACH
def test_files_are_mounted_from_volumes_that_are_there(name: str) -> None:
    """`test_chart_pods.py` shows that pods write to volumes only."""
    rendering = combination(name)
    maps, secrets = rendering.of("ConfigMap"), rendering.of("Secret") | rendering.of("Certificate")
    given = {"graph-certificates", "keys", "tls", "first-credentials"}
    for each in rendering.containers():
        volumes = {volume["name"]: volume for volume in each.pod["spec"]["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in each.spec["volumeMounts"]}
        if each.spec["name"] in ("decode", "prefill", "both"):
            assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
                assert volume["secret"]["secretName"] in {*secrets, *given}


@EACH
def test_selectors_find_their_pods_and_no_others(name: str) -> None:
    rendering = combination(name)
    pods = {owner["metadata"]["name"]: template(owner) for owner in rendering.owners()}

    def found(selector: Object) -> list[str]:
        return [name for name, pod in pods.items() if selector.items() <= pod["metadata"]["labels"].items()]

    for owner in rendering.of("Deployment") | rendering.of("StatefulSet"):
        labels = {**rendering.of("Deployment"), **rendering.of("StatefulSet")}[owner]["spec"]["selector"]
        assert found(labels["matchLabels"]) == [owner]
    for service in rendering.of("Service").values():
        (pod,) = (pods[each] for each in found(service["spec"]["selector"]))
        named = {port["name"] for each in pod["spec"]["containers"] for port in each["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for name, each in rendering.of(kind).items():
            assert found(each["spec"][key]["matchLabels"]) == [name]


def test_the_values_of_a_pod_are_merged_as_kubernetes_would() -> None:
    """The result is compared with that of `kubectl patch --type strategic`."""
    patch: Object = {
        "metadata": {"labels": {"team": "llm"}, "annotations": {"prometheus.io/scrape": "false"}},
        "spec": {
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "securityContext": {"fsGroup": 7},
            "topologySpreadConstraints": [
                {"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "volumes": [{"name": "cache", "emptyDir": {}}],
            "initContainers": [{"name": "wait", "image": "busybox"}],
            "containers": [
                {
                    "name": "decode",
                    "env": [
                        {"name": "PDSERVE_STREAM_PORT", "value": "1"},
                        {"name": "NCCL_DEBUG", "value": "INFO"},
                    ],
                    "envFrom": [{"configMapRef": {"name": "nccl"}}],
                    "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                    "resources": {"limits": {"memory": "9Gi"}},
                },
                {"name": "sidecar", "image": "busybox"},
            ],
        },
    }
    plain = template(render({}).of("Deployment")["pdserve-decode"])
    merged = template(render({"decode": {"pod": patch}}).of("Deployment")["pdserve-decode"])
    pod = {"apiVersion": "v1", "kind": "Pod"}
    command = [installed(TOOLS / "kubectl"), "patch", "--local", "--type=strategic", "-f", "-", "-o", "json"]
    patched = subprocess.run(
        [*command, "-p", json.dumps(patch)],
        input=json.dumps({**pod, **plain, "metadata": {"name": "p", **plain["metadata"]}}),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(patched.stdout)
    assert _in_any_order(merged["spec"]) == _in_any_order(expected["spec"])
    assert merged["metadata"] == {key: expected["metadata"][key] for key in ("labels", "annotations")}


def _in_any_order(value: Any) -> Any:
    """Sort lists, because Kubernetes puts new items first."""
    if isinstance(value, dict):
        return {key: _in_any_order(inner) for key, inner in value.items()}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return sorted((_in_any_order(item) for item in value), key=json.dumps)
    return value


def test_pod_values_of_one_component_override_those_of_all() -> None:
    own = {"spec": {"priorityClassName": "high"}}
    every = {"spec": {"priorityClassName": "low", "runtimeClassName": "nvidia"}}
    rendering = render({"pod": every, "etcd": {"pod": own}, "decode": {"pod": own}})
    found = {each.name: each.pod["spec"]["priorityClassName"] for each in rendering.containers()}
    assert found.pop("etcd") == found.pop("decode") == "high"
    assert set(found.values()) == {"low"}
    assert {each.pod["spec"]["runtimeClassName"] for each in rendering.containers()} == {"nvidia"}


def test_models_are_downloaded_into_the_claim_of_the_release() -> None:
    rendering = combination("cluster")
    assert rendering.of("PersistentVolumeClaim")["llm-models"]["spec"]["storageClassName"] == "nfs"
    for role in ("frontend", "decode", "prefill"):
        pod = template(rendering.of("Deployment")[f"llm-{role}"])["spec"]
        claim = {"name": "models", "persistentVolumeClaim": {"claimName": "llm-models"}}
        assert claim in pod["volumes"]
        (download,) = pod["initContainers"]
        assert {"name": "models", "mountPath": "/models"} in download["volumeMounts"]
        words = [*download["command"], *download["args"]]
        words[2] = words[2].replace("hf download", "echo")
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert said == "org/model --local-dir /models/org/model\norg/other --local-dir /models/org/other\n"
    assert rendering.of("Job")["llm-check"]["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    assert "download: there is no folder" in refusal({**SECRETS, "download": ["org/model"]})


def test_only_the_api_is_exposed() -> None:
    rendering = combination("cluster")
    (rule,) = rendering.of("Ingress")["llm"]["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]
    (route,) = rendering.of("HTTPRoute")["llm"]["spec"]["rules"]
    assert [match["path"]["value"] for match in route["matches"]] == ["/v1"]
    (port,) = rendering.of("Service")["llm"]["spec"]["ports"]
    (backend,) = route["backendRefs"]
    assert (backend["name"], backend["port"]) == ("llm", port["port"])


def test_the_prometheus_operator_gets_all_roles_and_alerts() -> None:
    rendering = combination("cluster")
    spec = rendering.of("PodMonitor")["llm"]["spec"]
    (components,) = spec["selector"]["matchExpressions"]
    for each in rendering.roles().values():
        labels = each.pod["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert labels[components["key"]] in components["values"]
        assert labels[spec["jobLabel"]] == "pdserve", "as the alerts expect"
        assert [end["port"] for end in spec["podMetricsEndpoints"]] == ["pages"]
        assert "pages" in each.ports
    alerts = yaml.safe_load((CHART / "../../alerts.yml").read_text())
    assert rendering.of("PrometheusRule")["llm"]["spec"] == alerts


def test_images_are_pinned() -> None:
    images = {each.spec["image"] for each in combination("clusters").containers()}
    compose = yaml.safe_load((CHART / "../../docker-compose.yml").read_text())["services"]
    assert images == {"pdserve:0.1.0", compose["nats"]["image"], compose["etcd"]["image"]}


CPU_OFFLOAD = "kv-offload: 32GiB, ServiceArgs: {resources: {gpu: 0}}"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"decode": {"pod": {"tolerations": []}}},
            "'/decode/pod': additional properties 'tolerations' not allowed",
        ),
        ({"ingress": {"enabled": True}}, "'/ingress/hosts': minItems"),
        ({"decode": {"replica": 3}}, "'/decode': additional properties 'replica' not allowed"),
        ({"nats": {"replicas": 2}}, "'/nats/replicas': value must be one of 1, 3"),
        ({"credentials": {"files": {"ca.pem": "x"}}}, "properties 'node.pem', 'node-key.pem' required"),
        ({"autoscaling": {"enabled": True}}, "'/autoscaling/prometheus': '' does not match pattern"),
        ({"config": "Frontend"}, "config is not a YAML mapping (--set-file config=graph.yaml)"),
        ({"config": "Slo: {}"}, "it has neither Frontend, VllmWorker nor PrefillWorker"),
        ({"credentials": {"existingSecret": ""}}, "kubectl create secret generic graph-credentials"),
        ({"apiKeys": {"existingSecret": ""}}, "kubectl create secret generic graph-keys"),
        (
            {"config": "PrefillWorker: {kv-offload: 1.5TiB}", "shm": "1535Gi"},
            "for kv-offload: 1.5TiB of prefill",
        ),
        (
            {"config": f"VllmWorker: {{{CPU_OFFLOAD}, kv-offload-disk: 1TiB}}"},
            "shm: 4Gi of /dev/shm have no room for kv-offload: 32GiB",
        ),
        ({"config": "Frontend: {port: 80}"}, "Security.allow: [plain-http]"),
    ],
)
def test_values_that_cannot_work_are_refused_with_advice(values: Object, says: str) -> None:
    assert says in refusal({**SECRETS, **values})


@pytest.mark.parametrize("keys", ["kv-offload: 0", "kv-offload: 4000MiB", CPU_OFFLOAD])
def test_host_memory_that_fits_into_shm_is_accepted(keys: str) -> None:
    render({"config": f"VllmWorker: {{{keys}}}"})


@pytest.mark.parametrize("section", ["Frontend:", "Frontend: {}", "Frontend:\nProcessor:"])
def test_an_empty_frontend_section_makes_a_frontend(section: str) -> None:
    assert "frontend" in render({"config": f"{section}\nVllmWorker: {{model: demo}}\n{HTTP}"}).roles()


def test_the_yaml_is_rendered_unchanged() -> None:
    text = '# mine: "quoted"\nFrontend: {port: 8000, max-waiting-tokens: 1000000}\n\n  \n# end' + HTTP
    assert graph_yaml(render({"config": text})) == text
    assert yaml.safe_load(graph_yaml(render({"config": yaml.safe_load(text)}))) == yaml.safe_load(text)
    for name, values in COMBINATIONS.items():
        if isinstance(given := values.get("config"), str):
            assert graph_yaml(combination(name)) == given


def test_only_frontends_have_the_api_keys() -> None:
    """An attacker who controls a worker must not get them (docs/security.md)."""
    for name in ("demo", "files"):
        for role, each in combination(name).roles().items():
            mounted = {mount["mountPath"] for mount in each.spec["volumeMounts"]}
            assert ("/etc/pdserve/keys" in mounted) is (role == "frontend")
            assert ("PDSERVE_API_KEYS" in each.env) is (role == "frontend")


# deploy/kubernetes


def test_the_committed_rendering_is_that_of_the_chart() -> None:
    folder = CHART / "../../kubernetes"
    rendered = helm("template", yaml.safe_load((folder / "values.yaml").read_text()), "--no-hooks")
    (command,) = re.findall(r"(helm template .*) --set-file", (folder / "kustomization.yaml").read_text())
    assert (folder / "pdserve.yaml").read_text() == rendered.stdout, (
        f"run: {command} > deploy/kubernetes/pdserve.yaml"
    )


def test_kustomize_makes_the_secrets(tmp_path: Path, credentials: Credentials) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(CHART / "../../kubernetes", folder)
    shutil.copytree(credentials.folder, folder / "credentials")
    (folder / "api-keys").write_text("a-long-enough-key")
    made = subprocess.run(
        [installed(TOOLS / "kubectl"), "kustomize", folder], capture_output=True, text=True, check=True
    )
    rendering = Rendering(yaml.safe_load_all(made.stdout))
    secrets = rendering.of("Secret")
    assert sorted(key for each in secrets.values() for key in each["data"]) == [
        *("api-keys", "ca.pem", "node-key.pem", "node.pem")
    ]
    frontend = rendering.roles()["frontend"].pod["spec"]["volumes"]
    assert {each["secret"]["secretName"] for each in frontend if "secret" in each} == secrets.keys()
    ignored = (CHART.parents[2] / ".gitignore").read_text().split()
    assert {"deploy/kubernetes/credentials/", "deploy/kubernetes/api-keys"} <= set(ignored)
