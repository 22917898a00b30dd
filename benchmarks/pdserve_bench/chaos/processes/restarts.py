"""Kills at bad moments: of a worker that is still starting, several times in a row, and of `serve` itself."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import psutil

from pdserve.contract.records import Role
from pdserve.util import clock
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.scene import Fault, Scene
from pdserve_bench.graphs.launch import StartedGraph

KILLING_HOLDS = 3.3
KILL_INTERVAL = (3.0, 6.0)
KILLS_WHILE_STARTING = (1, 2, 3, 4)
"""How many times in a row the restarted worker is killed while it starts."""
STARTING_AGE = (0.2, 1.5)
TICK = 0.2
QUIET_SECONDS = 0.2
"""Seconds from the last new request to the kill of `serve`, so that no connection is half open."""
AFTER_DRAIN = 20.0
"""Seconds beyond the drain timeout until the processes of a dead `serve` must have ended."""


async def kill_workers(scene: Scene) -> float | None:
    """Kill a serving worker every 3 to 6 s, and its successor while that starts. Faster kills would fail requests,
    because a request tolerates the loss of only a few workers (`MAX_LOSSES`)."""
    dice = random.Random(scene.options.seed)
    end = time.monotonic() + KILLING_HOLDS * scene.options.hold
    due, killed, young = 0.0, 0, 0
    doomed: dict[str, int] = {}
    while (now := time.monotonic()) < end:
        ids = {instance.pid: instance.id for instance in await scene.watch.instances()}
        workers = _workers(scene)
        for name, worker in workers.items():
            if worker.pid not in ids and doomed.get(name) and _age(worker) > dice.uniform(*STARTING_AGE):
                _kill(worker)
                doomed[name], young = doomed[name] - 1, young + 1
        serving = {name: worker for name, worker in workers.items() if worker.pid in ids}
        if serving and now >= due:
            name = dice.choice(sorted(serving))
            _kill(serving[name])
            scene.gone.add(ids[serving[name].pid])
            doomed[name], killed, due = (
                dice.choice(KILLS_WHILE_STARTING),
                killed + 1,
                now + dice.uniform(*KILL_INTERVAL),
            )
        await asyncio.sleep(TICK)
    told = f"killed {killed} workers, and {young} while they started"
    scene.say(told)
    if not killed or not young:
        scene.amiss.append(told)
    return await scene.recovery()


def _workers(scene: Scene) -> dict[str, psutil.Process]:
    """Return all worker processes by name (`decode-0`), ready or not."""
    found = {}
    for child in scene.running.family()[1:]:
        with suppress(psutil.Error, ProcessLookupError, ValueError):
            if child.ppid() == scene.running.graph.pid and os.getpgid(child.pid) == child.pid:
                words = child.cmdline()
                for role in {Role.DECODE.value, Role.PREFILL.value, Role.BOTH.value} & set(words):
                    found[f"{role}-{words[words.index('--index') + 1]}"] = child
    return found


def _age(process: psutil.Process) -> float:
    return float(clock.unix() - process.create_time())


def _kill(process: psutil.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def hold_load(scene: Scene) -> StartedGraph:
    """Stop new requests while some are in flight, and return the graph. Raises Cannot."""
    running = scene.running
    if not isinstance(running, StartedGraph):
        raise Cannot("this command did not start the graph, so it cannot restart it")
    scene.gone |= {instance.id for instance in await scene.watch.instances()}
    scene.load.pause()
    await asyncio.sleep(QUIET_SECONDS)
    return running


async def kill_serve(scene: Scene, guardian: bool = False) -> float | None:
    """Kill `serve`. With `guardian`, kill its guardian too: the graph's processes continue, and the next `serve` ends
    them."""
    running = await hold_load(scene)
    family = running.family()
    victims = [family[0], *(each for each in family if guardian and _is_guardian(each))]
    running.away = True
    for process in victims:
        process.suspend()  # suspends all first, so that neither reacts to the other's end
    for process in victims:
        process.kill()
    running.serve.process.wait()
    killed = time.monotonic()
    scene.say(f"SIGKILL of serve (process {family[0].pid}), {len(scene.load.running)} requests in flight")
    await scene.load.idle()
    scene.say(f"the last request in flight ended after {time.monotonic() - killed:.1f} s")
    if guardian:
        await running.start()
    if left := await survivors(family, scene.config.drain_timeout + AFTER_DRAIN):
        scene.amiss.append(f"{len(left)} processes outlived serve: {', '.join(map(described, left))}")
        for process in left:
            with suppress(psutil.Error):
                process.kill()
    scene.say(f"all processes had ended after {time.monotonic() - killed:.1f} s")
    if not guardian:
        await running.start()
    await scene.watch.move(running.graph)
    scene.load.resume()
    return await scene.recovery()


def _is_guardian(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(word.endswith("guardian.py") for word in process.cmdline())
    return False


async def survivors(family: Sequence[psutil.Process], within: float) -> list[psutil.Process]:
    left, end = [process for process in family if _lives(process)], time.monotonic() + within
    while left and time.monotonic() < end:
        await asyncio.sleep(0.1)
        left = [process for process in left if _lives(process)]
    return left


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({' '.join(process.cmdline()[:4])})"
    except psutil.Error:
        return str(process.pid)


START_KILL = Fault(
    "start-kill",
    f"SIGKILL of a worker every {KILL_INTERVAL[0]:g} to {KILL_INTERVAL[1]:g} s, and again while it restarts, for "
    f"{KILLING_HOLDS} x --hold",
    kill_workers,
    patient=True,
    kills_decode=True,
)
SERVE_KILL = Fault(
    "serve-kill",
    "SIGKILL of `serve`: running requests finish, no process is left; then `serve` again",
    kill_serve,
)
SERVE_AND_GUARDIAN_KILL = Fault(
    "serve-guardian-kill",
    "SIGKILL of `serve` and its guardian: running requests finish; the next `serve` ends the old processes",
    partial(kill_serve, guardian=True),
)
