"""Faults between hosts: links cut, lossy, slow or with limited rate; hosts that vanish, return at another address, or
have wrong clocks. For `pdserve chaos --hosts`."""

import asyncio
import math
from functools import partial

from pdserve.contract.records import Role
from pdserve_bench.chaos.processes.clocks import DEADLINE, TOLERATED, WORK, failures
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.scene import Fault, Scene
from pdserve_bench.graphs.watch import total
from pdserve_bench.hosts.graph import SERVERS, WRONG_CLOCKS, HostsGraph

SHORT_CUT, LONG_CUT = 10.0, 60.0
"""Seconds of a cut: about one etcd lease, and several."""
AWAY_SECONDS = 30.0
LINK_DELAY = 0.025
"""Seconds per link: 50 ms between two hosts."""


async def _cut(scene: Scene, role: str, seconds: float) -> float | None:
    graph, name = _graph(scene), _victim(scene, role)
    link = graph.net.hosts[name].link
    try:
        await graph.net.aside(link.cut)
        await asyncio.sleep(seconds)
    finally:
        await graph.net.aside(link.mend)
    return await _recovery(scene)


async def _limit(scene: Scene, rate: str = "", loss: float = 0.0, delay: float = 0.0) -> float | None:
    net = _graph(scene).net
    scene.victims.append("all")
    try:
        for host in net.hosts.values():
            await net.aside(partial(host.link.limit, rate, loss, delay))
        await failures(scene, math.inf)  # remote prefills may time out
    finally:
        for host in net.hosts.values():
            await net.aside(host.link.limit)
    return await _recovery(scene)


async def _vanish(scene: Scene, role: str, seconds: float) -> float | None:
    """The servers' host returns at its address with its disk; other hosts get a new address."""
    graph, name = _graph(scene), _victim(scene, role)
    host = graph.net.hosts[name]
    scene.gone |= {found.id for found in await scene.watch.instances() if found.host == host.address}
    await graph.net.aside(host.vanish)
    await asyncio.sleep(seconds)
    await graph.net.aside(partial(graph.restart, name))
    return await _recovery(scene)


async def _use(scene: Scene) -> float | None:
    """Check that hosts whose clocks are wrong from the start are used."""
    scene.victims += WRONG_CLOCKS
    before = await _worked(scene)
    await failures(scene, TOLERATED)
    after = await _worked(scene)
    for name, place in _graph(scene).places.items():
        if name in WRONG_CLOCKS and after.get(place.host.address, 0) <= before.get(place.host.address, 0):
            scene.amiss.append(f"{name}, whose clock is off by {WRONG_CLOCKS[name]:g} s, got no work")
    return await _recovery(scene)


async def _worked(scene: Scene) -> dict[str, float]:
    """Return the work done so far by host address."""
    pages = await scene.watch.metrics()
    return {
        found.host: total(pages.get(found.id, {}), WORK[found.role])
        for found in await scene.watch.instances()
        if found.role in WORK
    }


async def _recovery(scene: Scene) -> float | None:
    """Restart processes that ended by themselves, as systemd would, and record each as a failure."""
    graph = _graph(scene)
    for place in graph.ended():
        scene.amiss.append(f"{place.name} ended by itself with {place.process.poll()}")
        await graph.net.aside(partial(graph.restart, place.name))
    return await scene.recovery()


def _graph(scene: Scene) -> HostsGraph:
    """Raises Cannot."""
    if not isinstance(scene.running, HostsGraph):
        raise Cannot("only with --hosts")
    return scene.running


def _victim(scene: Scene, role: str) -> str:
    """Select another host of the role each time."""
    if role != SERVERS:
        places = _graph(scene).of(Role(role))
        role = places[scene.turn % len(places)].name
    scene.victims.append(role)
    scene.say(f"{role}, {len(scene.load.running)} requests in flight")
    return role


def _faults() -> tuple[Fault, ...]:
    hit = (Role.DECODE.value, Role.PREFILL.value, SERVERS)
    cuts = (
        Fault(
            f"{role}-link-cut-{seconds:g}s",
            f"the link of a {role} host is cut for {seconds:g} s",
            partial(_cut, role=role, seconds=seconds),
            (role, "link-cut", f"{seconds:g}s"),
        )
        for seconds in (SHORT_CUT, LONG_CUT)
        for role in hit
    )
    ends = (
        Fault(
            f"{role}-host-{name}",
            f"a {role} host vanishes without a packet, {back}",
            partial(_vanish, role=role, seconds=seconds),
            (role, name),
            kills_decode=role == Role.DECODE,
            silent=True,
        )
        for name, seconds, back in (
            (
                "vanish",
                AWAY_SECONDS,
                f"and is back {AWAY_SECONDS:g} s later, at another address (servers: at the same)",
            ),
            ("restart", 0.0, "and is back at once, at another address"),
        )
        for role in hit
        if seconds or role != SERVERS
    )
    return *cuts, *_LIMITS, *ends, _CLOCK


_LIMITS = (
    Fault("loss-1%", "all links lose 1 % of the packets, each way", partial(_limit, loss=0.01), ("limit",)),
    Fault(
        "delay-50ms", "50 ms between any two hosts, each way", partial(_limit, delay=LINK_DELAY), ("limit",)
    ),
    Fault("rate-1gbit", "all links carry 1 Gbit/s, each way", partial(_limit, rate="1gbit"), ("limit",)),
)
_CLOCK = Fault(
    "clock",
    "the second host of each role has a wrong clock: "
    + ", ".join(f"{name} {seconds:+g} s" for name, seconds in WRONG_CLOCKS.items()),
    _use,
    headers=DEADLINE,
)
HOST_FAULTS = _faults()
