"""What Kubernetes does with the objects of a rendering, as far as pdserve has a part in it: each pod is a host of
namespaces with the rendering's mounts, user and read-only root, is probed, gets its preStop and its grace, and is
replaced as its Deployment says. Names are in /etc/hosts. There is no admission, no scheduling, no device."""

import asyncio
import json
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import httpx
from pdserve_bench.hosts.network import Host, HostProcess, Network

from pdserve.supervisor.embedded import etcd_binary, nats_binary
from tests.deploy.helm import Object, Rendering

FASTER = 5.0
"""than real are the periods of probes"""
PROBED_WITHIN = 2.0
"""seconds"""
PROGRAMS = {
    "/usr/local/bin/etcd": [str(etcd_binary())],
    "/usr/local/bin/etcdctl": [str(etcd_binary().with_name("etcdctl"))],
    "pdserve": [sys.executable, "-m", "pdserve"],
    "nats": [str(nats_binary())],
}
"""of images, by the command or the image's name"""
_ELSEWHERE = {"/data": "/srv"}
"""folders of images that this machine has not"""
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
mount --bind /dev/null /etc/resolv.conf  # this machine's server is not there, and would be waited for
{volumes}
mount -o remount,ro,bind /
"""


@dataclass(eq=False)
class Pod:
    name: str
    owner: Object
    template: Object
    host: Host
    process: HostProcess | None = None
    ready: bool = False
    ending: bool = False
    restarts: int = 0
    task: "asyncio.Task[None] | None" = None

    @property
    def spec(self) -> Object:
        """Of its container."""
        (container,) = self.template["spec"]["containers"]
        return dict(container)

    @property
    def log(self) -> Path:
        return self.host.folder / "log"

    def has(self, selector: Mapping[str, str]) -> bool:
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return selector.items() <= labels.items()

    def port(self, name: str) -> int:
        return int(next(port["containerPort"] for port in self.spec["ports"] if port["name"] == name))


@dataclass
class Cluster:
    net: Network
    folder: Path
    secrets: Mapping[str, Mapping[str, str]]
    pods: list[Pod] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """what did not go as it should: containers that were killed after their grace, or ended badly"""
    _rendering: Rendering = field(default_factory=Rendering)
    _maps: dict[str, Object] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1000)))

    def apply(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._maps |= rendering.of("ConfigMap")

    def scale(self, deployment: str, replicas: int) -> None:
        self._rendering.of("Deployment")[deployment]["spec"]["replicas"] = replicas

    def of(self, owner: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.owner["metadata"]["name"] == owner]

    def endpoints(self, service: str) -> list[str]:
        spec = self._rendering.of("Service")[service]["spec"]
        (port,) = spec["ports"]
        ready = [pod for pod in self.pods if pod.has(spec["selector"]) and pod.ready and not pod.ending]
        return [f"{pod.host.address}:{pod.port(port['targetPort'])}" for pod in ready]

    @property
    def settled(self) -> bool:
        """Whether all is as the rendering says: so many pods, of this revision, ready."""
        owners = [each for each in self._rendering.owners() if each["kind"] != "Job"]
        return all(
            [pod.ready and not pod.ending and pod.template == owner["spec"]["template"] for pod in pods]
            == [True] * owner["spec"]["replicas"]
            for owner in owners
            for pods in [self.of(owner["metadata"]["name"])]
        )

    def lose(self, pod: Pod) -> None:
        """Its node is gone."""
        self.pods.remove(pod)
        assert pod.task
        pod.task.cancel()
        pod.host.vanish()

    async def control(self) -> None:
        """What the controllers do, for ever."""
        while True:
            for owner in self._rendering.owners():
                if owner["kind"] == "Deployment":
                    self._control(owner)
                elif owner["kind"] == "StatefulSet" and not self.of(owner["metadata"]["name"]):
                    self._create(owner, f"{owner['metadata']['name']}-0")
            await asyncio.sleep(0.1)

    def _control(self, owner: Object) -> None:
        name, spec = owner["metadata"]["name"], owner["spec"]
        pods = [pod for pod in self.of(name) if not pod.ending]
        new = [pod for pod in pods if pod.template == spec["template"]]
        rollout, wanted = spec["strategy"]["rollingUpdate"], spec["replicas"]
        for pod in [pod for pod in pods if pod not in new] or new[wanted:]:
            ready = sum(each.ready for each in pods)
            if not pod.ready or pod in new or ready - 1 >= wanted - rollout["maxUnavailable"]:
                self._delete(pod)
                pods.remove(pod)
        if len(new) < wanted and len(pods) < wanted + rollout["maxSurge"]:
            self._create(owner, f"{name}-{next(self._numbers)}")

    def _create(self, owner: Object, name: str) -> None:
        template = json.loads(json.dumps(owner["spec"]["template"]))
        pod = Pod(name, owner, template, self.net.host(name))
        self.pods.append(pod)
        self._write_names()
        pod.task = asyncio.create_task(self._run(pod))

    def _write_names(self) -> None:
        """In place: it is mounted in each pod."""
        named = [pod for pod in self.pods if pod.owner["kind"] == "StatefulSet"]
        lines = [f"{pod.host.address} {pod.name}.{pod.owner['spec']['serviceName']}\n" for pod in named]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def _delete(self, pod: Pod) -> None:
        pod.ending = True
        assert pod.task
        pod.task.cancel()
        pod.task = asyncio.create_task(self._end(pod))

    async def _end(self, pod: Pod) -> None:
        if hook := pod.spec.get("lifecycle", {}).get("preStop"):
            await self._exec(pod, hook["exec"]["command"])
        await self._stop(pod)
        self.pods.remove(pod)
        pod.host.vanish()

    async def _stop(self, pod: Pod) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        assert pod.process
        pod.process.signal(SIGTERM)
        code = await pod.process.ended(pod.template["spec"]["terminationGracePeriodSeconds"])
        if code is None:
            pod.process.signal(SIGKILL)
        if code != 0 and pod.owner["kind"] == "Deployment":
            self.faults.append(f"{pod.name} ended with {code} on SIGTERM:\n{pod.log.read_text()[-2000:]}")

    # the kubelet

    async def _run(self, pod: Pod) -> None:
        mounts = pod.host.start(["sh", "-c", self._mounts(pod)], pod.log)
        assert await mounts.ended(30) == 0, pod.log.read_text()
        while True:
            pod.process = pod.host.start(self._command(pod), pod.log)
            await self._probe(pod)
            pod.ready = False
            if pod.process.poll() is None:
                await self._stop(pod)
            pod.restarts += 1

    async def _probe(self, pod: Pod) -> None:
        """Return when the container has ended or is to be restarted."""
        assert pod.process
        failures, unready, started, next_live = 0, 0, False, 0.0
        while pod.process.poll() is None:
            probe = pod.spec["readinessProbe" if started else "startupProbe"]
            unready = 0 if await self._well(pod, probe) else unready + 1
            started = started or not unready
            pod.ready = started and unready < probe.get("failureThreshold", 3)
            if started and time.monotonic() >= next_live and (live := pod.spec.get("livenessProbe")):
                next_live = time.monotonic() + live.get("periodSeconds", 10) / FASTER
                failures = 0 if await self._well(pod, live) else failures + 1
                if failures == live.get("failureThreshold", 3):
                    return
            await asyncio.sleep(probe.get("periodSeconds", 10) / FASTER)

    async def _well(self, pod: Pod, probe: Object) -> bool:
        if "exec" in probe:
            return await self._exec(pod, probe["exec"]["command"]) == 0
        asked = probe["httpGet"]
        with suppress(httpx.HTTPError):
            async with httpx.AsyncClient(trust_env=False, timeout=PROBED_WITHIN) as client:
                url = f"http://{pod.host.address}:{pod.port(asked['port'])}{asked['path']}"
                return (await client.get(url)).is_success
        return False

    async def _exec(self, pod: Pod, command: list[str]) -> int | None:
        words = [*PROGRAMS.get(command[0], [command[0]]), *command[1:]]
        return await pod.host.start(words, pod.log).ended(30)

    def _command(self, pod: Pod) -> list[str]:
        spec, user = pod.spec, pod.template["spec"]["securityContext"]
        words = spec.get("command") or [spec["image"].partition(":")[0]]
        env = {name: os.environ[name] for name in _MACHINE if name in os.environ} | {
            "HOME": "/var/lib/pdserve"
        }
        for each in spec["env"]:
            of_pod = {"status.podIP": pod.host.address, "metadata.name": pod.name}
            env[each["name"]] = each.get("value") or of_pod[each["valueFrom"]["fieldRef"]["fieldPath"]]
        rights = ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        program = [*PROGRAMS[words[0]], *words[1:], *spec["args"]]
        for image, here in _ELSEWHERE.items():
            program = [word.replace(f"={image}", f"={here}") for word in program]
        return [
            *("setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", *rights),
            *("env", "-i", *(f"{name}={value}" for name, value in env.items())),
            *(word.replace("$(POD_NAME)", pod.name) for word in program),
        ]

    def _mounts(self, pod: Pod) -> str:
        """The script that mounts the volumes."""
        volumes = {volume["name"]: volume for volume in pod.template["spec"]["volumes"]}
        lines = []
        for mount in pod.spec["volumeMounts"]:
            target = _ELSEWHERE.get(mount["mountPath"], mount["mountPath"])
            volume = volumes[mount["name"]]
            if target == "/tmp":
                continue  # the host's own, which has this machine's folders in it
            lines.append(f"mkdir -p {target}")
            if "emptyDir" in volume:
                lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {target}")
            elif "hostPath" in volume:
                lines.append(f"mount --bind {shlex.quote(volume['hostPath']['path'])} {target}")
            else:
                source = shlex.quote(str(self._files(pod, volume)))
                lines.append(f"mount --bind {source} {target}; mount -o remount,ro,bind {target}")
        return _MOUNTS.format(names=shlex.quote(str(self.folder / "hosts")), volumes="\n".join(lines))

    def _files(self, pod: Pod, volume: Object) -> Path:
        """A ConfigMap's, or a Secret's: of root and the pod's group."""
        folder: Path = pod.host.folder / volume["name"]
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        secret: Any = volume.get("secret")
        data = (
            self.secrets[secret["secretName"]] if secret else self._maps[volume["configMap"]["name"]]["data"]
        )
        for name, text in data.items():
            (file := folder / name).write_text(text)
            file.chmod(secret["defaultMode"] if secret else 0o644)
            os.chown(file, 0, pod.template["spec"]["securityContext"]["fsGroup"])
        return folder


def shown(pod: Pod) -> str:
    log = pod.log.read_text(errors="replace")[-2000:] if pod.log.exists() else ""
    return f"{pod.name} ready={pod.ready} ending={pod.ending} restarts={pod.restarts}\n{log}"


@asynccontextmanager
async def cluster(
    net: Network, folder: Path, secrets: Mapping[str, Mapping[str, str]]
) -> AsyncIterator[Cluster]:
    found = Cluster(net, folder, secrets)
    control = asyncio.create_task(found.control())
    try:
        yield found
    except BaseException:
        print(*map(shown, found.pods), sep="\n")
        raise
    finally:
        tasks = [control, *(pod.task for pod in found.pods if pod.task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
