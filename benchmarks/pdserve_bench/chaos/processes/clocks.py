"""Add two processes of a role with wrong clocks (5 s ahead and 40 s behind) for --hold seconds. They must be used, and
remote prefill must work as before."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pdserve.contract.records import Instance, Role
from pdserve.plan.graph import to_environment
from pdserve.plan.machine import Machine
from pdserve.plan.plan import make_plan
from pdserve.plan.slots import Slot
from pdserve.supervisor.processes.exits import end_group, wait_for_exit
from pdserve.util.clock import VARIABLE
from pdserve.util.errors import ConfigError, Unavailable
from pdserve.util.net import free_port
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.scene import Fault, Scene
from pdserve_bench.graphs.launch import CUTTABLE, PDSERVE, ServerRun
from pdserve_bench.graphs.watch import total

OFFSETS = (5.0, -40.0)
"""Seconds; the second offset is longer than etcd and KV leases."""
READY_WITHIN = 180.0
TOLERATED = 0.1
"""Share of remote prefills that may fail. Wrong clocks alone make none fail, but the machine may be slow."""
DEADLINE = {"x-request-timeout": "30"}
"""A deadline shorter than the largest clock error. It would expire if processes compared their times of day."""
WORK = {
    Role.PREFILL: "pdserve_prefill_queue_wait_seconds_count",
    Role.DECODE: "pdserve_prefill_total",
    Role.FRONTEND: "pdserve_requests_total",
}
"""By role, a metric that grows when the process does work."""
_FAILURES, _REMOTE = "pdserve_remote_prefill_failures_total", "pdserve_prefill_total"
ARRIVAL_SECONDS = 0.3
"""Seconds until a request that was sent has reached its frontend."""


async def _play(scene: Scene, role: Role) -> float | None:
    extras = [_extra(scene, *each) for each in zip(_slots(scene, role), OFFSETS, strict=True)]
    for extra in extras:
        extra.start()
    try:
        instances = [await _registered(scene, extra) for extra in extras]
        scene.say(f"{', '.join(instance.id for instance in instances)}: clocks off by {OFFSETS} s")
        await _use(scene, instances)
        pages = await scene.watch.metrics(role)
        scene.amiss += [
            f"{instance.id}, whose clock is off by {offset:g} s, got no work"
            for instance, offset in zip(instances, OFFSETS, strict=True)
            if not total(pages.get(instance.id, {}), WORK[role])
        ]
        scene.gone |= {instance.id for instance in instances}
    finally:
        for extra in extras:
            extra.process.terminate()
        for extra in extras:
            await _end(scene, extra)
    return await scene.recovery()


async def _use(scene: Scene, instances: Sequence[Instance]) -> None:
    ours = scene.load.urls
    scene.load.urls = [*ours, *(instance.address for instance in instances if instance.role is Role.FRONTEND)]
    await failures(scene, TOLERATED)
    scene.load.urls = ours
    await asyncio.sleep(ARRIVAL_SECONDS)


async def failures(scene: Scene, tolerated: float) -> None:
    """Check that at most this share of the remote prefills in the next --hold seconds falls back to local ones."""
    before = await _failed(scene)
    await asyncio.sleep(scene.options.hold)
    failed, remote = (now - then for now, then in zip(await _failed(scene), before, strict=True))
    told = f"{failed:.0f} of {remote:.0f} remote prefills failed"
    scene.say(told)
    if failed > tolerated * remote or (scene.remote and not remote):
        scene.amiss.append(told)


async def _failed(scene: Scene) -> tuple[float, float]:
    """Return two counts of remote prefills so far: those that fell back to local, and all."""
    pages = (await scene.watch.metrics(Role.DECODE)).values()
    remote = (
        value
        for page in pages
        for series, value in page.items()
        if series.startswith(_REMOTE) and 'mode="remote"' in series
    )
    return sum(total(page, _FAILURES) for page in pages), sum(remote)


def _slots(scene: Scene, role: Role) -> Sequence[Slot]:
    """Return free slots for two more processes of the role. Raises Cannot."""
    ours = [slot for slot in make_plan(scene.config, Machine.detect()).slots if slot.role.includes(role)]
    if not ours:
        raise Cannot(f"the graph has no {role.value} processes")
    if ours[0].gpus:
        raise Cannot("no free GPU for two more workers")
    host = scene.config.host
    return [
        replace(ours[0], index=len(ours) + number, kv_port=free_port(host) if ours[0].kv_port else 0)
        for number in range(len(OFFSETS))
    ]


def _extra(scene: Scene, slot: Slot, offset: float) -> ServerRun:
    """A frontend gets its own port, because only children of one parent can share the graph's."""
    running, frontend = scene.running, scene.config.frontend
    graph = running.graph
    config = replace(
        graph.serving(scene.config),
        nats=graph.nats,
        etcd=graph.etcd,
        state_dir=running.state_dir,
        frontend=frontend and replace(frontend, port=free_port(frontend.host)),
    )
    variables = {
        **CUTTABLE,
        "PDSERVE_STATE_DIR": str(running.state_dir),
        **to_environment(config, slot),
        VARIABLE: f"{offset:g}",
    }
    command = [*PDSERVE, slot.role.value, "-f", graph.config, "--index", str(slot.index)]
    return ServerRun(command, running.state_dir / "logs" / f"clock-{slot.name}.log", variables)


async def _registered(scene: Scene, extra: ServerRun) -> Instance:
    async def found() -> Instance | None:
        pid = extra.process.pid
        return next((each for each in await scene.watch.instances() if each.pid == pid), None)

    try:
        async with asyncio.timeout(READY_WITHIN):
            instance = await extra.until(found, scene.say)
    except (TimeoutError, ConfigError, Unavailable):
        raise Unavailable(f"{extra.log.stem} did not become ready") from None
    assert instance is not None
    return instance


async def _end(scene: Scene, extra: ServerRun) -> None:
    try:
        await asyncio.wait_for(wait_for_exit(extra.process), scene.config.drain_timeout + 10)
    except TimeoutError:
        scene.amiss.append(f"{extra.log.stem} did not stop on SIGTERM")
        extra.process.kill()
        await wait_for_exit(extra.process)
    await end_group(extra.process.pid)


def _fault(role: Role) -> Fault:
    told = (
        f"two more {role.value} processes for --hold seconds, clocks {OFFSETS[0]:+g} s and {OFFSETS[1]:+g} s"
    )
    return Fault(f"clock-{role.value}", told, partial(_play, role=role), headers=DEADLINE)


WRONG_CLOCKS = tuple(map(_fault, (Role.PREFILL, Role.DECODE, Role.FRONTEND)))
