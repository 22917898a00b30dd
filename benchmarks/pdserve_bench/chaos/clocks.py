"""Wrong clocks: for --hold seconds the graph has two more processes of a role, whose clocks are 5 s ahead and 40 s
behind, and takes no harm. Whether they are used is looked up, and whether remote prefill goes on as without them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.clock import VARIABLE
from pdserve.graph import CONFIG_VARIABLE, SLOT_VARIABLE, encode_config, encode_slot
from pdserve.messages import Instance, Role
from pdserve.plan.machine import Machine
from pdserve.plan.plan import make_plan
from pdserve.plan.slots import Slot
from pdserve.ports import free_port
from pdserve.supervisor.exits import dies_with_parent, end_group, exit_of
from pdserve_bench.chaos.launch import environment
from pdserve_bench.chaos.scene import Scenario, Scene, total

OFFSETS = (5.0, -40.0)
"""seconds; the second one is longer than a lease"""
READY_WITHIN = 180.0
TOLERATED = 0.1
"""share of remote prefills that may fail: not one would for a clock alone, but the machine may be slow"""
DEADLINE = {"x-request-timeout": "30"}
"""shorter than the clocks are wrong: a process that compares times of day finds it over"""
_WORK = {
    Role.PREFILL: "pdserve_prefill_queue_wait_seconds_count",
    Role.DECODE: "pdserve_prefill_total",
    Role.FRONTEND: "pdserve_requests_total",
}
"""by role: the metric that says that it did something"""
_FAILURES, _REMOTE = "pdserve_remote_prefill_failures_total", "pdserve_prefill_total"


_FAILURES, _REMOTE = "pdserve_remote_prefill_failures_total", "pdserve_prefill_total"
ON_THEIR_WAY = 0.3
"""seconds in which a request that has begun is at its frontend"""


@dataclass
class Extra:
    """A process of the graph that no supervisor knows."""

    name: str
    process: "subprocess.Popen[bytes]"
    offset: float


async def _play(scene: Scene, role: Role) -> float | None:
    slots = _slots(scene, role)
    extras = [_start(scene, slot, offset) for slot, offset in zip(slots, OFFSETS, strict=True)]
    try:
        instances = [await _registered(scene, each) for each in extras]
        scene.say(f"{', '.join(each.id for each in instances)}: clocks off by {OFFSETS} s")
        await _use(scene, instances)
        pages = await scene.metrics(role)
        scene.amiss += [
            f"{each.name}, whose clock is off by {each.offset:g} s, was given nothing to do"
            for each, instance in zip(extras, instances, strict=True)
            if not total(pages.get(instance.id, {}), _WORK[role])
        ]
        scene.gone |= {each.id for each in instances}
    finally:
        for each in extras:
            each.process.terminate()
        for each in extras:
            await _end(scene, each)
    return await scene.recovery()


async def _use(scene: Scene, instances: Sequence[Instance]) -> None:
    before = await _failed(scene)
    ours = scene.load.urls
    scene.load.urls = [*ours, *(each.address for each in instances if each.role is Role.FRONTEND)]
    await asyncio.sleep(scene.options.hold)
    scene.load.urls = ours
    await asyncio.sleep(ON_THEIR_WAY)
    failed, remote = (now - then for now, then in zip(await _failed(scene), before, strict=True))
    scene.say(f"{failed:.0f} of {remote:.0f} remote prefills failed")
    if failed > TOLERATED * remote or not remote:
        scene.amiss.append(f"{failed:.0f} of {remote:.0f} remote prefills failed")


async def _failed(scene: Scene) -> tuple[float, float]:
    """Remote prefills so far: those that were done again locally, and all."""
    pages = (await scene.metrics(Role.DECODE)).values()
    remote = (
        value
        for page in pages
        for series, value in page.items()
        if series.startswith(_REMOTE) and 'mode="remote"' in series
    )
    return sum(total(page, _FAILURES) for page in pages), sum(remote)


def _slots(scene: Scene, role: Role) -> Sequence[Slot]:
    """As the graph's own, beside them. Raises LookupError."""
    ours = [slot for slot in make_plan(scene.config, Machine.detect()).slots if slot.role is role]
    if not ours:
        raise LookupError(f"the graph has no {role.value} processes")
    if ours[0].gpus:
        raise LookupError("there is no GPU left for two more workers")
    host = scene.config.host
    return [
        replace(ours[0], index=len(ours) + number, kv_port=free_port(host) if ours[0].kv_port else 0)
        for number in range(len(OFFSETS))
    ]


def _start(scene: Scene, slot: Slot, offset: float) -> Extra:
    """A frontend gets a port of its own: it would share the graph's only with children of one parent."""
    running, name = scene.running, f"clock-{slot.name}"
    graph, frontend = running.graph, scene.config.frontend
    config = replace(
        scene.config,
        nats=graph.nats,
        etcd=graph.etcd,
        state_dir=running.state_dir,
        frontend=frontend and replace(frontend, port=free_port(frontend.host)),
    )
    variables = {
        CONFIG_VARIABLE: encode_config(config),
        SLOT_VARIABLE: encode_slot(slot),
        VARIABLE: f"{offset:g}",
    }
    with (running.state_dir / "logs" / f"{name}.log").open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pdserve",
                slot.role.value,
                "-f",
                graph.config,
                "--index",
                str(slot.index),
            ],
            env={**environment(os.environ, running.state_dir), **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )
    return Extra(name, process, offset)


async def _registered(scene: Scene, extra: Extra) -> Instance:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline and extra.process.poll() is None:
        for each in await scene.instances():
            if each.pid == extra.process.pid:
                return each
        await asyncio.sleep(0.25)
    raise LookupError(f"{extra.name} did not come to be ready")


async def _end(scene: Scene, extra: Extra) -> None:
    try:
        await asyncio.wait_for(exit_of(extra.process), scene.config.drain_timeout + 10)
    except TimeoutError:
        scene.amiss.append(f"{extra.name} did not stop on SIGTERM")
        extra.process.kill()
        await exit_of(extra.process)
    await end_group(extra.process.pid)


def _scenario(role: Role) -> Scenario:
    async def play(scene: Scene) -> float | None:
        return await _play(scene, role)

    told = (
        f"two more {role.value} processes for --hold seconds, clocks {OFFSETS[0]:+g} s and {OFFSETS[1]:+g} s"
    )
    return Scenario(f"clock-{role.value}", told, play, headers=DEADLINE)


SCENARIOS = tuple(map(_scenario, (Role.PREFILL, Role.DECODE, Role.FRONTEND)))
