"""Faults of NATS and etcd clusters (`pdserve chaos --clusters`): each leader is killed, hung or cut, the majority is
lost for a while, all six members are restarted in turn. Afterwards prompts must be prefilled remotely again."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from nats.js.api import ClusterInfo

from pdserve.queue.jetstream.client import PASSING, short_connection
from pdserve.supervisor.servers.embedded import EmbeddedServer
from pdserve_bench.chaos.processes.faults import Harm, Victim, injected
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.scene import Fault, Scene
from pdserve_bench.graphs.clusters import Clusters, EtcdMember, NatsMember, addresses, cluster
from pdserve_bench.graphs.launch import StartedGraph, started

MAJORITY_HOLDS = 2.5
"""Outage of the majority in units of --hold: 30 s by default."""
CHECKED_REQUESTS = 24
"""Requests after the recovery that are checked for remote prefill."""
MIN_REMOTE_SHARE = 0.4
"""Minimal remotely prefilled share of these requests; two of three prompts are long enough."""
WHOLE_WITHIN = 60.0
POLL_INTERVAL = 0.25


@asynccontextmanager
async def on_clusters(
    file: Path, folder: Path, say: Callable[[str], None], **options: Any
) -> AsyncIterator[StartedGraph]:
    async with cluster(NatsMember, folder) as nats_members, cluster(EtcdMember, folder) as etcd_members:
        servers = {"nats": addresses(nats_members), "etcd": addresses(etcd_members)}
        async with started(file, folder, say, servers=servers, **options) as running:
            running.clusters = Clusters(nats_members, etcd_members)
            yield running


def _clusters(scene: Scene) -> Clusters:
    if scene.running.clusters is None:
        raise Cannot("only with --clusters")
    return scene.running.clusters


# leaders


async def _led(clusters: Clusters) -> list[ClusterInfo]:
    """Return what a member reports: leader and replicas of the prefill queue's stream, then of its consumer. Empty if
    no member reports them."""
    for member in clusters.nats:
        with suppress(*PASSING, ValueError):
            async with short_connection(member.url) as client:
                js = client.jetstream(timeout=1)
                (stream,) = await js.streams_info()
                (consumer,) = await js.consumers_info(stream.config.name or "")
                return [each for each in (stream.cluster, consumer.cluster) if each is not None]
    return []


async def _named(
    members: Sequence[EmbeddedServer], name: Callable[[], Awaitable[str | None]]
) -> EmbeddedServer:
    """Wait until `name` returns a member's name, and return that member."""
    async with asyncio.timeout(WHOLE_WITHIN):
        while True:
            leader = await name()
            for member in members:
                if member.name == leader:
                    return member
            await asyncio.sleep(POLL_INTERVAL)


async def _leader_of(what: int, clusters: Clusters) -> EmbeddedServer:
    """`what`: 0 for the stream, 1 for its consumer."""

    async def name() -> str | None:
        led = await _led(clusters)
        return led[what].leader if len(led) > what else None

    return await _named(clusters.nats, name)


async def _meta_leader(clusters: Clusters) -> EmbeddedServer:
    async def name() -> str | None:
        page = await _page(clusters.nats[0].page("jsz"))
        leader: str | None = page.get("meta_cluster", {}).get("leader")
        return leader

    return await _named(clusters.nats, name)


async def _page(url: str, body: bytes | None = None) -> dict[str, Any]:
    """Return a server's response; empty if it does not respond."""
    with suppress(httpx.HTTPError):
        async with httpx.AsyncClient(trust_env=False, timeout=2) as http:
            answer = await (http.get(url) if body is None else http.post(url, content=body))
            found: dict[str, Any] = answer.json()
            return found
    return {}


async def _etcd_leader(clusters: Clusters) -> EmbeddedServer:
    async def name() -> str | None:
        for member in clusters.etcd:
            status = await _page(f"http://{member.url}/v3/maintenance/status", b"{}")
            if status and status.get("leader") == status["header"]["member_id"]:
                return member.name
        return None

    return await _named(clusters.etcd, name)


# faults


async def harm_leader(
    scene: Scene, leader: Callable[[Clusters], Awaitable[EmbeddedServer]], how: Harm
) -> float | None:
    """Kill, hang or cut the leader. A killed member restarts at once; a hang or cut lasts --hold seconds."""
    clusters, running = _clusters(scene), scene.running
    member = await leader(clusters)
    beside = [each.child.pid for each in clusters.members if each.child and each is not member]
    async with injected(how, [_victim(scene, member)], running.graph.pid, running.state_dir, beside):
        if how.lasts:
            await asyncio.sleep(scene.options.hold)
    if not how.lasts:
        await _restart(member)
    return await _recovery(scene)


async def lose_majority(
    scene: Scene, leader: Callable[[Clusters], Awaitable[EmbeddedServer]]
) -> float | None:
    clusters = _clusters(scene)
    first = await leader(clusters)
    peers: Sequence[EmbeddedServer] = clusters.nats if isinstance(first, NatsMember) else clusters.etcd
    second = next(member for member in peers if member is not first)
    victims = [_victim(scene, member) for member in (first, second)]
    async with injected(Harm.KILL, victims, scene.running.graph.pid, scene.running.state_dir):
        await asyncio.sleep(MAJORITY_HOLDS * scene.options.hold)
    await asyncio.gather(_restart(first), _restart(second))
    return await _recovery(scene)


async def restart_all(scene: Scene) -> float | None:
    """Restart the members in turn, each when the one before has all data again."""
    clusters = _clusters(scene)
    for member in (*clusters.nats, *clusters.etcd):
        scene.victims.append(member.name)
        await member.stop()
        await member.start()
        await _until_whole(clusters)
    return await _recovery(scene)


async def _restart(member: EmbeddedServer) -> None:
    assert member.child is not None
    await member.child.wait()
    await member.start()


def _victim(scene: Scene, member: EmbeddedServer) -> Victim:
    assert member.child is not None
    scene.victims.append(member.name)
    scene.say(f"{member.name} (process {member.child.pid}), {len(scene.load.running)} requests in flight")
    return Victim(member.name, member.child.pid)


# recovery


async def _until_whole(clusters: Clusters) -> None:
    """Wait until etcd's members are healthy and NATS's replicas are current."""
    async with asyncio.timeout(WHOLE_WITHIN):
        while not await _whole(clusters):  # noqa: ASYNC110 (polls servers)
            await asyncio.sleep(POLL_INTERVAL)


async def _whole(clusters: Clusters) -> bool:
    health = [await _page(f"http://{member.url}/health") for member in clusters.etcd]
    led = await _led(clusters)
    current = [peer.current for each in led for peer in each.replicas or []]
    return all(page.get("health") == "true" for page in health) and len(current) == 4 and all(current)


async def _recovery(scene: Scene) -> float | None:
    seconds = await scene.recovery()
    try:
        await _until_whole(_clusters(scene))
    except TimeoutError:
        scene.amiss.append(f"a cluster has not recovered after {WHOLE_WITHIN:g} s")
    since = time.monotonic()
    await scene.load.until(lambda answer: answer.started > since, CHECKED_REQUESTS)
    answers = [answer for answer in scene.load.done if answer.started > since]
    share = sum(answer.prefill == "remote" for answer in answers) / len(answers)
    scene.say(f"{share:.0%} of {len(answers)} requests were prefilled remotely after the recovery")
    if share < MIN_REMOTE_SHARE:
        scene.amiss.append(f"only {share:.0%} of the requests were prefilled remotely after the recovery")
    return seconds


_LEADERS: tuple[tuple[str, str, Callable[[Clusters], Awaitable[EmbeddedServer]]], ...] = (
    ("nats-stream", "the leader of the prefill queue's stream", partial(_leader_of, 0)),
    ("nats-consumer", "the leader of the prefill queue's consumer", partial(_leader_of, 1)),
    ("nats-meta", "JetStream's meta leader", _meta_leader),
    ("etcd-leader", "etcd's leader", _etcd_leader),
)
_DONE = {
    Harm.KILL: "SIGKILL, then a restart",
    Harm.HANG: "SIGSTOP, and SIGCONT after --hold seconds",
    Harm.CUT: "no packet in or out for --hold seconds",
}
CLUSTER_FAULTS: tuple[Fault, ...] = (
    *(
        Fault(
            f"{name}-{how.value}",
            f"{whom}: {_DONE[how]}",
            partial(harm_leader, leader=leader, how=how),
            (name.partition("-")[0], name, how.value),
        )
        for how in _DONE
        for name, whom, leader in _LEADERS
    ),
    *(
        Fault(
            f"{name.partition('-')[0]}-majority",
            f"two of three, {whom} among them: SIGKILL, and back after {MAJORITY_HOLDS} x --hold",
            partial(lose_majority, leader=leader),
            (name.partition("-")[0], "majority"),
        )
        for name, whom, leader in (_LEADERS[0], _LEADERS[3])
    ),
    Fault(
        "members-rolling",
        "SIGTERM of all six servers, one after the other",
        restart_all,
        ("rolling", "nats", "etcd"),
    ),
)
