"""The rendered pods run with simulated engines. Each pod is a host made of Linux namespaces, with the rendering's
mounts, user and read-only root. It gets ready by its probes and ends by preStop and SIGTERM within its grace period.
Names are in /etc/hosts. Kubernetes' admission, scheduling and devices are left out. (Processes replaced under load:
`tests/wire/test_rolling.py`; lost hosts: chaos.)"""

import asyncio
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any

import httpx
import pytest
from pdserve_bench.hosts.network import Host, HostProcess, Network

from pdserve.demo import MODEL_DIR
from pdserve.security.credentials import Credentials
from pdserve.supervisor.servers.embedded import etcd_binary, nats_binary
from tests.conditions import until
from tests.deploy.helm import Object, Rendering, render, template
from tests.deploy.prometheus import scraping
from tests.deploy.test_outages import DECODE, ETCD, NATS, PREFILL, Watched
from tests.network import hosts

KEY = "sk-of-the-tests-of-the-chart"
YAML = """
Common: {model: demo, block-size: 32, max-model-len: 4096}
Frontend: {served_model_name: demo, port: 8000}
VllmWorker:
  engine: sim
  remote-prefill: true
  max-local-prefill-length: 100
  common-configs: [model, block-size, max-model-len]
PrefillWorker: {engine: sim, common-configs: [model, block-size, max-model-len]}
Security: {allow: [plain-http]}
Graph: {drain-timeout: 20}
"""
PROGRAMS = {
    "/usr/local/bin/etcd": [str(etcd_binary())],
    "/usr/local/bin/etcdctl": [str(etcd_binary().with_name("etcdctl"))],
    "pdserve": [sys.executable, "-m", "pdserve"],
    "nats": [str(nats_binary())],
}
"""programs of images, by command or name of the image"""
CLAIMS = {"models": MODEL_DIR.parent}
"""persistent volume claim -> folder of this machine"""
CLUSTER: Object = {
    "config": YAML.replace("model: demo,", "model: /models/model,"),
    "fullnameOverride": "pdserve",
    "commonLabels": {"example.org/cost": "serving"},
    "models": {"persistentVolumeClaim": {"claimName": "models"}},
    "kvOffloadFolder": {"emptyDir": {}},
    "pod": {
        "metadata": {"annotations": {"example.org/team": "llm"}},
        "spec": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
    },
    "frontend": {
        "pod": {"spec": {"containers": [{"name": "frontend", "env": [{"name": "TZ", "value": "UTC"}]}]}}
    },
}
"""Values that users set for their own cluster."""
_ELSEWHERE = {"/data": "/srv"}
"""folder of an image -> folder of this machine"""
ROLES = ("frontend", "decode", "prefill")
OUTAGES = (
    ("nats", "NATS does not answer", (NATS,)),
    ("etcd", "etcd does not answer", (ETCD,)),
    ("prefill", "no prefill worker is available", (PREFILL, "PdserveWorkerDown: prefill-0 on")),
    (
        "decode",
        "no decode worker is available: prefill-0 stands in",
        (DECODE, "PdserveWorkerDown: decode-0 on"),
    ),
)
"""pod that is cut off, problem in `/health`, alerts"""
_MACHINE = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
_MOUNTS = """
set -e
for folder in /etc /var/lib /root; do
    mkdir -p /tmp/.pod$folder/up /tmp/.pod$folder/work
    mount -t overlay -o lowerdir=$folder,upperdir=/tmp/.pod$folder/up,workdir=/tmp/.pod$folder/work overlay $folder
done
chmod 755 /root
chmod 1777 /tmp
mount --bind {names} /etc/hosts
mount --bind /dev/null /etc/resolv.conf  # the name server cannot be reached, and look-ups would wait
{volumes}
mount -o remount,ro,bind /
"""


@dataclass(eq=False)
class Pod:
    owner: Object
    host: Host
    files: Mapping[str, Mapping[str, str]]
    """ConfigMap or Secret -> file -> text"""
    process: HostProcess | None = None

    @property
    def template(self) -> Object:
        return template(self.owner)

    @property
    def spec(self) -> Object:
        """The spec of its container."""
        (container,) = self.template["spec"]["containers"]
        return dict(container)

    @property
    def log(self) -> Path:
        return self.host.folder / "log"

    def port(self, name: str) -> int:
        return int(next(port["containerPort"] for port in self.spec["ports"] if port["name"] == name))

    async def start(self, names: Path) -> None:
        mounts = self.host.start(["sh", "-c", self._mounts(names)], self.log)
        assert await mounts.ended(30) == 0, self.log.read_text()
        self.process = self.host.start(self._command(), self.log)

    async def well(self, kind: str) -> bool:
        """Whether the probe succeeds. Fail the test if the process has ended."""
        assert self.process
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        probe = self.spec[kind]
        if "exec" in probe:
            return await self._exec(probe["exec"]["command"]) == 0
        with suppress(httpx.HTTPError):
            async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
                url = f"http://{self.host.address}:{self.port(probe['httpGet']['port'])}"
                return (await client.get(url + probe["httpGet"]["path"])).is_success
        return False

    async def end(self) -> int | None:
        """End the pod; return its exit code, or None after the grace period."""
        assert self.process
        if hook := self.spec.get("lifecycle", {}).get("preStop"):
            await self._exec(hook["exec"]["command"])
        self.process.signal(SIGTERM)
        return await self.process.ended(self.template["spec"]["terminationGracePeriodSeconds"])

    async def _exec(self, command: list[str]) -> int | None:
        words = [*PROGRAMS.get(command[0], [command[0]]), *command[1:]]
        return await self.host.start(words, self.log).ended(30)

    def _command(self) -> list[str]:
        spec, user = self.spec, self.template["spec"]["securityContext"]
        words = spec.get("command") or [spec["image"].partition(":")[0]]
        env = {name: os.environ[name] for name in _MACHINE if name in os.environ}
        env["HOME"] = "/var/lib/pdserve"
        for each in spec["env"]:
            of_pod = {"status.podIP": self.host.address, "metadata.name": self.host.name}
            env[each["name"]] = each.get("value") or of_pod[each["valueFrom"]["fieldRef"]["fieldPath"]]
        rights = ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        program = [*PROGRAMS[words[0]], *words[1:], *spec["args"]]
        for image, here in _ELSEWHERE.items():
            program = [word.replace(f"={image}", f"={here}") for word in program]
        return [
            *("setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", *rights),
            *("env", "-i", *(f"{name}={value}" for name, value in env.items())),
            *(word.replace("$(POD_NAME)", self.host.name) for word in program),
        ]

    def _mounts(self, names: Path) -> str:
        """The script that mounts the volumes."""
        volumes = {volume["name"]: volume for volume in self.template["spec"]["volumes"]}
        lines = []
        for mount in self.spec["volumeMounts"]:
            target, volume = mount["mountPath"], volumes[mount["name"]]
            target = _ELSEWHERE.get(target, target)
            if target == "/tmp":
                continue  # the host's own, which contains this machine's folders
            lines.append(f"mkdir -p {target}")
            if "emptyDir" in volume:
                lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {target}")
            else:
                claim = volume.get("persistentVolumeClaim")
                folder = CLAIMS[claim["claimName"]] if claim else self._files(volume)
                source = shlex.quote(str(folder))
                lines.append(f"mount --bind {source} {target}; mount -o remount,ro,bind {target}")
        return _MOUNTS.format(names=shlex.quote(str(names)), volumes="\n".join(lines))

    def _files(self, volume: Object) -> Path:
        """Write files of a ConfigMap or Secret, owned by root and the pod's group."""
        folder: Path = self.host.folder / volume["name"]
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        secret: Any = volume.get("secret")
        for name, text in self.files[secret["secretName"] if secret else volume["configMap"]["name"]].items():
            (file := folder / name).write_text(text)
            file.chmod(secret["defaultMode"] if secret else 0o644)
            os.chown(file, 0, self.template["spec"]["securityContext"]["fsGroup"])
        return folder


def pods_of(rendering: Rendering, net: Network, secrets: Mapping[str, Mapping[str, str]]) -> list[Pod]:
    """Return one pod of each owner."""
    files = {**secrets, **{name: each["data"] for name, each in rendering.of("ConfigMap").items()}}
    owners = [each for each in rendering.owners() if each["kind"] != "Job"]
    return [Pod(each, net.host(f"{each['metadata']['name']}-0"), files) for each in owners]


def written_names(folder: Path, pods: list[Pod]) -> Path:
    named = [pod for pod in pods if pod.owner["kind"] == "StatefulSet"]
    lines = [f"{pod.host.address} {pod.host.name}.{pod.owner['spec']['serviceName']}\n" for pod in named]
    (found := folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("values", [{"config": YAML}, CLUSTER], ids=["defaults", "cluster"])
def test_the_pods_get_ready_answer_and_end_well(
    tmp_path: Path, credentials: Credentials, values: Object
) -> None:
    with hosts(tmp_path) as net:
        pods = pods_of(render(values), net, _secrets(credentials))
        names = written_names(tmp_path, pods)

        async def ready(kind: str) -> bool:
            return all(await asyncio.gather(*(pod.well(kind) for pod in pods)))

        async def story() -> None:
            await asyncio.gather(*(pod.start(names) for pod in pods))
            await until(lambda: ready("startupProbe"), 300)
            await until(lambda: ready("readinessProbe"), 60)
            assert await ready("livenessProbe")
            (frontend,) = (pod for pod in pods if pod.host.name == "pdserve-frontend-0")
            await answers(f"http://{frontend.host.address}:{frontend.port('http')}")
            roles = [pod for pod in pods if pod.owner["kind"] == "Deployment"]
            ended = {pod.host.name: await pod.end() for pod in (frontend, *(set(roles) - {frontend}))}
            assert set(ended.values()) == {0}, ended

        asyncio.run(story())


@pytest.mark.timeout(600)
def test_outages_have_their_alerts(tmp_path: Path, credentials: Credentials) -> None:
    """Prometheus scrapes each pod at its annotated port. Like `test_outages.py`, but with cut links."""
    with hosts(tmp_path) as net:
        pods = pods_of(render({"config": YAML}), net, _secrets(credentials))
        names = written_names(tmp_path, pods)
        by_role = {pod.host.name.split("-")[1]: pod for pod in pods}

        async def story(graph: Watched) -> None:
            await asyncio.gather(*(pod.start(names) for pod in pods))
            await until(graph.well, 300)
            await graph.fires()
            for role, problem, alerts in OUTAGES:
                link = by_role[role].host.link
                await net.aside(link.cut)
                await graph.is_degraded(problem)
                await graph.fires(*alerts)
                await net.aside(link.mend)
                await until(graph.well, 60)
                await graph.fires()

        pages = [f"{by_role[role].host.address}:{_page_port(by_role[role])}" for role in ROLES]
        url = f"http://{by_role['frontend'].host.address}:{by_role['frontend'].port('http')}"
        with scraping(tmp_path, *pages) as prometheus:
            asyncio.run(story(Watched(url, prometheus, KEY)))


def _page_port(pod: Pod) -> str:
    return str(pod.template["metadata"]["annotations"]["prometheus.io/port"])


def _secrets(credentials: Credentials) -> dict[str, dict[str, str]]:
    files = {path.name: path.read_text() for path in credentials.folder.iterdir()}
    return {"graph-certificates": files, "keys": {"api-keys": KEY}}


async def answers(url: str) -> None:
    asked = {"model": "demo", "prompt": "one " * 200, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300) as client:
        assert (await client.get("/v1/models")).status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"

        async def remote() -> bool:
            """Send an uncached prompt. The prefill worker may be available later than the frontend."""
            answer = await client.post("/v1/completions", json=asked | {"cache_salt": os.urandom(8).hex()})
            return answer.raise_for_status().headers["x-pdserve-prefill"] == "remote"

        await until(remote, 60)
