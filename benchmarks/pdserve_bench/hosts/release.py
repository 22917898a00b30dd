"""A release of the chart in the small kubelet (`hosts/pods.py`), and its rolling updates, as after `helm upgrade`.

All Deployments and StatefulSets roll at the same time: a Deployment within its maxSurge and maxUnavailable, a
StatefulSet one pod after another, from the last. Left out: disruption budgets, and scaling the old pods when template
and replicas change together.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from signal import SIGTERM

from pdserve.runtime.tasks import Lifetime
from pdserve.util.errors import Unavailable
from pdserve_bench.hosts.network import Network
from pdserve_bench.hosts.pods import Object, Pod, template, write_names

PROBE_INTERVAL = 0.5
FAILURES = 3
"""Failed probes in a row until a pod is not ready, Kubernetes' default."""
SERVICE_DELAY = 1.0
"""Seconds in which new connections still reach a deleted frontend, because nodes learn late of its deletion."""
ROLLED_WITHIN = 300.0


@dataclass(eq=False)
class RunningPod:
    pod: Pod
    ready: bool = False
    deleted: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.pod.host.name

    @property
    def url(self) -> str:
        """Of a frontend; else empty."""
        ports = {port["name"]: port["containerPort"] for port in self.pod.spec["ports"]}
        return f"http://{self.pod.host.address}:{ports['http']}" if "http" in ports else ""


class Release(Lifetime):
    """Leaving the context ends the probes; the pods end with their network. The context raises an exception group with
    Unavailable if a container ends by itself, or if a deleted pod ends with an error or leaves processes or memory."""

    def __init__(
        self,
        net: Network,
        folder: Path,
        secrets: Mapping[str, Mapping[str, str]],
        builds: Mapping[str, Path],
    ) -> None:
        """`builds`: tag of pdserve's image -> folder with the package."""
        self.running: list[RunningPod] = []
        """Without deleted pods."""
        self.urls: list[str] = []
        """URLs of the frontends that new connections reach. The list object stays the same."""
        self._net, self._folder = net, folder
        self._secrets, self._builds = secrets, builds
        self._serials = count()

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as self._group:
            lives: list[asyncio.Task[None]] = []
            self._lives = lives
            yield
            for life in lives:
                life.cancel()

    async def upgrade(self, objects: Sequence[Object]) -> None:
        """Install a rendering, or bring the pods to it. Returns when its pods are ready and all that it replaced have
        ended. Raises TimeoutError."""
        files = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
        self._files = {**self._secrets, **files}
        rolls = {"Deployment": self._roll_deployment, "StatefulSet": self._roll_stateful_set}
        async with asyncio.timeout(ROLLED_WITHIN), asyncio.TaskGroup() as group:
            for owner in objects:
                if owner["kind"] in rolls:
                    group.create_task(rolls[owner["kind"]](owner))

    async def uninstall(self) -> None:
        await asyncio.gather(*(self._delete(each).wait() for each in list(self.running)))

    async def _roll_deployment(self, owner: Object) -> None:
        wanted, limits = owner["spec"]["replicas"], owner["spec"]["strategy"]["rollingUpdate"]
        most, least = wanted + limits["maxSurge"], wanted - limits["maxUnavailable"]
        ends: list[asyncio.Event] = []
        while True:
            running = self._of(owner)
            new = [each for each in running if each.pod.template == template(owner)]
            old = sorted(set(running) - set(new), key=lambda each: each.ready)
            if not old and len(new) == wanted and all(each.ready for each in new):
                break
            spare = len(running) - least - sum(not each.ready for each in new)
            ends += [self._delete(each) for each in (*old[: max(0, spare)], *new[wanted:])]
            for _ in range(min(most - len(self._of(owner)), wanted - len(new))):
                self._start(f"{owner['metadata']['name']}-{next(self._serials)}", owner)
            await asyncio.sleep(PROBE_INTERVAL)
        for end in ends:
            await end.wait()

    async def _roll_stateful_set(self, owner: Object) -> None:
        running = {each.name: each for each in self._of(owner)}
        for number in reversed(range(owner["spec"]["replicas"])):
            name = f"{owner['metadata']['name']}-{number}"
            found = running.get(name)
            if found and found.pod.template != template(owner):
                await self._delete(found).wait()
                found = None
            found = found or self._start(name, owner)
            while not found.ready:  # noqa: ASYNC110
                await asyncio.sleep(PROBE_INTERVAL)

    def _of(self, owner: Object) -> list[RunningPod]:
        name = owner["metadata"]["name"]
        return [each for each in self.running if each.pod.owner["metadata"]["name"] == name]

    def _start(self, name: str, owner: Object) -> RunningPod:
        new = RunningPod(Pod(owner, self._net.host(name), self._files, builds=self._builds))
        self.running.append(new)
        self._lives.append(self._group.create_task(self._live(new)))
        return new

    def _delete(self, old: RunningPod) -> asyncio.Event:
        """Return the event of its end."""
        self.running.remove(old)
        old.deleted.set()
        asyncio.get_running_loop().call_later(SERVICE_DELAY, self._route, old, False)
        return old.gone

    def _route(self, to: RunningPod, ready: bool) -> None:
        """Add the pod to its Service, or remove it."""
        to.ready = ready
        if ready and to.url:
            self.urls.append(to.url)
        elif to.url in self.urls:
            self.urls.remove(to.url)

    async def _live(self, running: RunningPod) -> None:
        pod = running.pod
        await pod.start(write_names(self._folder, [each.pod for each in self.running]))
        failures = 0
        while not running.deleted.is_set():
            failures = 0 if await pod.well("readinessProbe") else failures + 1
            if (ready := not failures or (running.ready and failures < FAILURES)) != running.ready:
                self._route(running, ready)
            with suppress(TimeoutError):
                await asyncio.wait_for(running.deleted.wait(), PROBE_INTERVAL)
        was_ready = running.ready
        code = await pod.end()
        left = pod.host.processes() + (pod.host.shared_memory() if pod.is_role else [])
        expected = {0} if pod.is_role and was_ready else {0, -SIGTERM}  # etcd ends by the signal
        if code not in expected or left:
            raise Unavailable(f"{running.name} ended with {code} on SIGTERM, and left {left or 'nothing'}")
        self._net.remove(running.name)
        running.gone.set()
