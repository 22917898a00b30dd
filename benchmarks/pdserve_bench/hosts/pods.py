"""A small kubelet: runs the pods of the rendered chart with simulated engines.

Each pod is a host (`hosts/network.py`) with the rendering's mounts, user and read-only root. Its probes tell when it is
ready; preStop and SIGTERM end it within its grace period. Names are in /etc/hosts. Kubernetes' admission, scheduling
and devices are left out.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Any

import httpx
import yaml

from pdserve.demo import MODEL_DIR
from pdserve.supervisor.servers.embedded import etcd_binary, nats_binary
from pdserve.util.errors import Unavailable
from pdserve_bench.hosts.network import Host, HostProcess, Network

Object = dict[str, Any]
CHART = Path("deploy/helm/pdserve")
HELM = Path(sys.prefix) / "tools/kubernetes/helm"
"""Where `make dev` installs helm."""
PROGRAMS = {
    "/usr/local/bin/etcd": [str(etcd_binary())],
    "/usr/local/bin/etcdctl": [str(etcd_binary().with_name("etcdctl"))],
    "pdserve": [sys.executable, "-m", "pdserve"],
    "nats": [str(nats_binary())],
}
"""Programs of this machine that run in place of an image's, by command or name of the image."""
CLAIMS = {"models": MODEL_DIR.parent}
"""Persistent volume claim -> folder of this machine."""
_ELSEWHERE = {"/data": "/srv"}
"""Folder in the chart's pods -> existing folder of this machine to use for it."""
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
    builds: Mapping[str, Path] = field(default_factory=dict)
    """Tag of pdserve's image -> folder with the package; without one the pod runs this checkout."""

    @property
    def is_role(self) -> bool:
        """Whether the pod runs pdserve, not NATS or etcd."""
        return bool(self.owner["kind"] != "StatefulSet")

    @property
    def template(self) -> Object:
        return template(self.owner)

    @property
    def spec(self) -> Object:
        (container,) = self.template["spec"]["containers"]
        return dict(container)

    @property
    def log(self) -> Path:
        return self.host.folder / "log"

    def port(self, name: str) -> int:
        return int(next(port["containerPort"] for port in self.spec["ports"] if port["name"] == name))

    async def start(self, names: Path) -> None:
        """Mount the volumes and run the container. Raises Unavailable."""
        mounts = self.host.start(["sh", "-c", self._mounts(names)], self.log)
        if await mounts.ended(30) != 0:
            raise Unavailable(f"cannot mount the volumes of {self.host.name}:\n{self._log_end()}")
        self.run()

    def run(self) -> None:
        """Run the container, for the first time or again in the same pod with its volumes."""
        self.process = self.host.start(self._command(), self.log)

    async def well(self, kind: str) -> bool:
        """Whether the probe succeeds. Raises Unavailable if the process has ended."""
        assert self.process
        if self.process.poll() is not None:
            raise Unavailable(f"{self.host.name} has ended:\n{self._log_end()}")
        probe = self.spec[kind]
        if "exec" in probe:
            return await self._exec(probe["exec"]["command"]) == 0
        with suppress(httpx.HTTPError):
            # probes use no TLS, so do not load the CAs' certificates each time
            async with httpx.AsyncClient(
                trust_env=False, timeout=probe["timeoutSeconds"], verify=False
            ) as client:
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

    def _log_end(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    async def _exec(self, command: list[str]) -> int | None:
        words = [*PROGRAMS.get(command[0], [command[0]]), *command[1:]]
        return await self.host.start(words, self.log).ended(30)

    def _command(self) -> list[str]:
        spec, user = self.spec, self.template["spec"]["securityContext"]
        image, _, tag = spec["image"].partition(":")
        words = spec.get("command") or [image]
        env = {name: os.environ[name] for name in _MACHINE if name in os.environ}
        if build := self.builds.get(tag):  # do not import from the working directory: it may be a checkout
            env |= {"PYTHONPATH": str(build), "PYTHONSAFEPATH": "1"}
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
        volumes = {volume["name"]: volume for volume in self.template["spec"]["volumes"]}
        lines = []
        for mount in self.spec["volumeMounts"]:
            target, volume = mount["mountPath"], volumes[mount["name"]]
            target = _ELSEWHERE.get(target, target)
            if target == "/tmp":
                continue  # `network.py` gives each host its own /tmp, with the folders that all hosts share
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


def template(owner: Object) -> Object:
    """Return the pod template of a Deployment, LeaderWorkerSet, StatefulSet or Job."""
    spec: Object = owner["spec"]
    found: Object = spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["workerTemplate"]
    return found


def rendered(values: Mapping[str, object], chart: Path = CHART) -> list[Object]:
    """Render the chart, by default this checkout's. Raises Unavailable."""
    words = [str(HELM), "template", "pdserve", str(chart), "--values", "-"]
    try:
        found = subprocess.run(words, input=json.dumps(values), capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise Unavailable(f"{HELM} is missing: `make dev` installs it") from None
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"helm cannot render {chart}: {error.stderr}") from None
    return list(yaml.load_all(found.stdout, yaml.CSafeLoader))


def pods_of(
    objects: Sequence[Object], net: Network, secrets: Mapping[str, Mapping[str, str]], replicas: int = 1
) -> list[Pod]:
    """Return `replicas` pods of each Deployment and one of each StatefulSet."""
    configs = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    counts = {"Deployment": replicas, "StatefulSet": 1}
    return [
        Pod(each, net.host(f"{each['metadata']['name']}-{number}"), {**secrets, **configs})
        for each in objects
        for number in range(counts.get(each["kind"], 0))
    ]


def write_names(folder: Path, pods: Sequence[Pod]) -> Path:
    """Write /etc/hosts of all pods: names of the StatefulSets' pods, as Kubernetes' DNS has them."""
    named = [pod for pod in pods if pod.owner["kind"] == "StatefulSet"]
    lines = [f"{pod.host.address} {pod.host.name}.{pod.owner['spec']['serviceName']}\n" for pod in named]
    (found := folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
    return found
