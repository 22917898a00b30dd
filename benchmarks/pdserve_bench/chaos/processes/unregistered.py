"""Take a process's registration or connection away: delete its keys in etcd, cut it off from NATS."""

import asyncio
import time
from collections.abc import Collection
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from pdserve.contract.records import Role
from pdserve.registry import keys
from pdserve_bench.chaos.processes.faults import Target, find
from pdserve_bench.chaos.processes.network_cut import Cannot, cut_off
from pdserve_bench.chaos.scene import Fault, Scene

OWN = (keys.INSTANCES, keys.CARDS, keys.SLOTS)
BACK_WITHIN = 30.0
"""Seconds until a key must be back; milliseconds are usual."""
POLL_INTERVAL = 0.1
MAX_WAIT = 10.0
"""Seconds that a token may take once the prefill workers have reported the loss of NATS."""


async def delete_keys(scene: Scene) -> float | None:
    """Delete every process's keys, then overwrite them, twice each, and wait each time until they are back."""
    before = {instance.id: instance.pid for instance in await scene.watch.instances()}
    for number in range(4):
        there = await _own_keys(scene)
        for key in there:
            if number % 2:
                await scene.watch.registry.put(key, b"overwritten", leased=False)
            else:
                await scene.watch.registry.delete(key)
        if missing := await _not_back(scene, there):
            scene.amiss.append(f"keys not recreated within {BACK_WITHIN:g} s: {', '.join(missing)}")
        await asyncio.sleep(scene.options.hold / 3)
    scene.say(f"{len(there)} keys deleted and overwritten, twice each")
    recovered = await scene.recovery()
    if gone := before.items() - {(each.id, each.pid) for each in await scene.watch.instances()}:
        scene.amiss.append(f"healthy processes ended: {', '.join(sorted(name for name, _ in gone))}")
    return recovered


async def _own_keys(scene: Scene) -> dict[str, bytes]:
    found = await scene.watch.registry.read("")
    return {key: value for key, value in found.items() if key.startswith(OWN)}


async def _not_back(scene: Scene, there: Collection[str]) -> list[str]:
    deadline = time.monotonic() + BACK_WITHIN
    while True:
        found = await _own_keys(scene)
        missing = [key for key in there if found.get(key, b"overwritten") == b"overwritten"]
        if not missing or time.monotonic() > deadline:
            return missing
        await asyncio.sleep(POLL_INTERVAL)


async def take_nats(scene: Scene) -> float | None:
    """Cut all prefill workers off from NATS but not from etcd."""
    running = scene.running
    instances = await scene.watch.instances()
    (victims,) = find(Target.ALL_PREFILL, scene.turn, instances, running.graph.pid)
    scene.victims += [victim.name for victim in victims]
    others = [process.pid for process in running.family()]
    port = urlsplit(running.graph.nats).port or 4222
    async with AsyncExitStack() as stack:
        for victim in victims:
            cut_from = await stack.enter_async_context(cut_off(victim.group, others, port))
            if not cut_from.connections:
                raise Cannot(f"{victim.name} has no connection to NATS to cut")
        cut = time.monotonic()
        said = await _until_said(scene, cut)
        await asyncio.sleep(max(0.0, cut + scene.options.hold - time.monotonic()))
        healed = time.monotonic()
    if said is None:
        scene.amiss.append("not every prefill worker reported the loss of NATS")
        return await scene.recovery()
    asked = [each for each in scene.load.done if each.started > said and each.ended < healed]
    pauses = [each.longest_wait for each in asked]
    scene.say(
        f"loss reported after {said - cut:.1f} s; longest pause of {len(pauses)} requests since then: "
        f"{max(pauses, default=0.0):.1f} s"
    )
    if max(pauses, default=0.0) > MAX_WAIT:
        scene.amiss.append(f"requests waited {max(pauses):.1f} s for prefill workers without NATS")
    return await scene.recovery()


async def _until_said(scene: Scene, since: float) -> float | None:
    """Return the time by which all prefill workers had reported the loss; None after --hold seconds."""
    while (now := time.monotonic()) < since + scene.options.hold:
        if all(worker.queue_lost for worker in await scene.watch.instances(Role.PREFILL)):
            return now
        await asyncio.sleep(POLL_INTERVAL)
    return None


KEYS_DELETED = Fault(
    "keys-deleted",
    "every process's keys in etcd (instances, model cards, slots) are deleted, and overwritten",
    delete_keys,
)
PREFILL_WITHOUT_NATS = Fault(
    "prefill-without-nats", "no packet between the prefill workers and NATS for --hold seconds", take_nats
)
