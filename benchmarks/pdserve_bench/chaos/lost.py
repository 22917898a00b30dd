"""What the graph had written once is gone: all of its state directory, or the supervisor together with its guardian."""

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from pdserve_bench.chaos.faults import Harm, Target, find, injected
from pdserve_bench.chaos.restarts import AFTER_DRAIN, described, hold_load, survivors
from pdserve_bench.chaos.scene import Fault, Scene

NEED = ("lock", "graph.json", "credentials", "logs", "sockets", "nats", "etcd")
"""what restarts and other commands need of the state directory, as far as it was there"""
BACK_WITHIN = 10.0


async def remove_state(scene: Scene) -> float | None:
    """Of each kind a process is killed meanwhile: what is started again needs what was removed."""
    running, folder = scene.running, scene.running.state_dir
    instances = await scene.watch.instances()
    victims = [
        victim
        for target in (Target.PREFILL, Target.DECODE, Target.NATS, Target.ETCD)
        for victim in find(target, scene.turn, instances, running.graph.pid)[0]
    ]
    there = {path.name for path in folder.iterdir()} & set(NEED)
    for path in folder.iterdir():
        _remove(path)
    scene.say(f"{', '.join(sorted(there))} removed; killing {', '.join(each.name for each in victims)}")
    scene.victims += [victim.name for victim in victims]
    async with injected(Harm.KILL, victims, running.graph.pid, folder):
        scene.gone |= {victim.name for victim in victims}
    recovered = await scene.recovery()
    with suppress(TimeoutError):
        async with asyncio.timeout(BACK_WITHIN):
            while not all((folder / name).exists() for name in there):  # noqa: ASYNC110 (files)
                await asyncio.sleep(0.1)
    if missing := sorted(name for name in there if not (folder / name).exists()):
        scene.amiss.append(f"not made anew: {', '.join(missing)}")
    return recovered


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


async def kill_with_guardian(scene: Scene) -> float | None:
    running = await hold_load(scene)
    family = running.family()
    guardians = [process for process in family if _is_guardian(process)]
    running.away = True
    for process in (*guardians, family[0]):
        process.suspend()  # so that neither sees the other's end
    for process in (*guardians, family[0]):
        process.kill()
    running.serve.process.wait()
    scene.say(f"killed, {len(scene.load.running)} requests in flight; {len(family) - 2} processes go on")
    await scene.load.idle()
    await running.start()
    if left := await survivors(family, scene.config.drain_timeout + AFTER_DRAIN):
        scene.amiss.append(f"{len(left)} processes outlived serve: {', '.join(map(described, left))}")
    await scene.watch.move(running.graph)
    scene.load.resume()
    return await scene.recovery()


def _is_guardian(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(word.endswith("guardian.py") for word in process.cmdline())
    return False


STATE_LOST = Fault(
    "state-lost",
    "all files and folders of the state directory are removed, and a process of each kind is killed",
    remove_state,
    kills_decode=True,
)
SERVE_AND_GUARDIAN_KILL = Fault(
    "serve-guardian-kill",
    "SIGKILL of `serve` and its guardian together: running requests end well; then `serve` again, beside nothing old",
    kill_with_guardian,
)
