"""Stall the engine of one of several workers, too briefly for a kill: requests go to the other workers within seconds,
and to this one again when its engine continues."""

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from pdserve.config.schema import DecodeConfig, PrefillConfig
from pdserve.contract.records import Role
from pdserve.engine.sim.model import sim_model
from pdserve.process.engine_checks import HANGS_AFTER, STALLS_AFTER
from pdserve_bench.chaos.judge import too_long
from pdserve_bench.chaos.processes.faults import Target, Victim, core_of, find
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.questions import Attempt
from pdserve_bench.chaos.scene import Fault, Scene

POLL_INTERVAL = 0.1
AGAIN_WITHIN = 30.0
"""Seconds until the worker gets a request after its engine continues."""


async def stop_engine(scene: Scene, target: Target) -> float | None:
    ((victim,),) = find(target, scene.turn, await scene.watch.instances(), scene.running.graph.pid)
    workers = [each for each in await scene.watch.instances() if each.role.includes(Role(target.value))]
    if len(workers) < 2:
        raise Cannot(f"there is no other {target.value} worker")
    section = scene.config.decode if target is Target.DECODE else scene.config.prefill
    pid, stop, go_on = _engine_of(victim, section)
    scene.victims.append(victim.name)
    calm = _longest(scene.load.done, 0.0)
    scene.say(f"the engine of {victim.name} (process {pid}), {len(scene.load.running)} requests in flight")
    os.kill(pid, stop)
    stopped = time.monotonic()
    try:
        said = await _says(scene, victim, STALLS_AFTER + 3.0)
        await asyncio.sleep(min(scene.options.hold, HANGS_AFTER - 5.0) - (time.monotonic() - stopped))
        waited = _longest([*scene.load.done, *scene.load.running], stopped)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, go_on)
    scene.say(f"the longest wait for a first token was {waited:.1f} s, {calm:.1f} s before")
    if not said:
        scene.amiss.append(f"{victim.name} does not report its stalled engine")
    if late := too_long(waited, calm):
        scene.amiss.append(f"beside another worker that was free: {late}")
    recovered, since = await scene.recovery(), time.monotonic()
    if target is Target.DECODE:
        try:
            async with asyncio.timeout(AGAIN_WITHIN):
                await scene.load.until(lambda each: each.started > since and victim.name in each.instance)
        except TimeoutError:
            scene.amiss.append(f"{victim.name} gets no requests although its engine continues")
    return recovered


def _engine_of(victim: Victim, section: DecodeConfig | PrefillConfig | None) -> tuple[int, int, int]:
    """Return a pid and the signals that stop and continue its engine. Raises Cannot."""
    with suppress(Cannot):
        return core_of(victim).group, signal.SIGSTOP, signal.SIGCONT
    number = sim_model(section.engine_args).stop_signal if section and section.engine == "sim" else 0
    if not number:
        raise Cannot(f"{victim.name} has no engine core below it (a simulated engine needs `stop-signal`)")
    return victim.group, number, number


async def _says(scene: Scene, victim: Victim, within: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            while not any(  # noqa: ASYNC110 (polls etcd)
                each.id == victim.name and each.stalled for each in await scene.watch.instances()
            ):
                await asyncio.sleep(POLL_INTERVAL)
            return True
    return False


def _longest(attempts: Iterable[Attempt], since: float) -> float:
    """Return the longest wait of a streamed request for its first token from `since` on, in seconds."""
    now = time.monotonic()
    firsts = ((each, (each.arrivals or [each.ended or now])[0]) for each in attempts if each.case.stream)
    return max((first - max(each.started, since) for each, first in firsts), default=0.0)


STALLS: tuple[Fault, ...] = tuple(
    Fault(
        f"{target.value}-core-hang",
        f"SIGSTOP of one {target.value} worker's engine, SIGCONT after --hold seconds",
        partial(stop_engine, target=target),
        (target.value, "core-hang"),
    )
    for target in (Target.DECODE, Target.PREFILL)
)
