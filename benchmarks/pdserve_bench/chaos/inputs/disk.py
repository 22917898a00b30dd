"""Faults of the state directory: no space left, or all files removed."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from pdserve_bench.chaos.processes.faults import Harm, Target, find, injected
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.scene import Fault, Scene
from pdserve_bench.graphs.launch import StartedGraph

LOGS_WITHIN = 30.0
_CHUNK = bytes(1 << 20)
RECREATED = ("lock", "graph.json", "credentials", "logs", "settings.json", "servers")
"""Files and folders that restarts and other commands need; those that existed must be recreated."""
BACK_WITHIN = 10.0


async def fill(scene: Scene) -> float | None:
    if not isinstance(scene.running, StartedGraph) or not scene.running.disk:
        raise Cannot("mounting a file system for the state directory needs root")
    told = len(scene.running.serve.text)
    async with full(scene.running.state_dir):
        scene.say("the disk is full: no space for logs, the queue and etcd")
        await asyncio.sleep(scene.options.hold)
    scene.say("the disk has space again")
    recovered = await scene.recovery()
    if silent := await _silent(scene.running.state_dir / "logs"):
        scene.amiss.append(f"no log lines within {LOGS_WITHIN:g} s from {', '.join(silent)}")
    if "Traceback" in scene.running.serve.text[told:]:
        scene.amiss.append("serve printed a traceback")
    return recovered


@asynccontextmanager
async def full(folder: Path) -> AsyncIterator[None]:
    """Fill the file system and keep it full until the context exits."""
    filler = folder / "filler"

    async def keep(write: Callable[[bytes], object]) -> None:
        while True:
            await asyncio.to_thread(_fill, write)
            await asyncio.sleep(0.05)

    with filler.open("ab", buffering=0) as file:
        keeper = asyncio.create_task(keep(file.write), name="full disk")
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            filler.unlink(missing_ok=True)


def _fill(write: Callable[[bytes], object]) -> None:
    size = len(_CHUNK)
    while size:
        try:
            write(_CHUNK[:size])
        except OSError:
            size //= 16


async def _silent(folder: Path) -> list[str]:
    """Return the decode workers whose log does not grow, although each request under load writes a line."""
    before = _sizes(folder)
    silent = set(before)
    deadline = time.monotonic() + LOGS_WITHIN
    while silent and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        now = _sizes(folder)
        silent = {name for name in silent if now.get(name) == before[name]}
    return sorted(silent)


def _sizes(folder: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_size for path in folder.glob("decode-*.log")}


async def remove_state(scene: Scene) -> float | None:
    """Remove the state, then kill a worker of each role, NATS and etcd, whose restarts need the removed files."""
    running, folder = scene.running, scene.running.state_dir
    instances = await scene.watch.instances()
    victims = [
        victim
        for target in (Target.PREFILL, Target.DECODE, Target.NATS, Target.ETCD)
        for victim in find(target, scene.turn, instances, running.graph.pid)[0]
    ]
    there = {path.name for path in folder.iterdir()} & set(RECREATED)
    for path in folder.iterdir():
        _remove(path)
    scene.say(f"{', '.join(sorted(there))} removed; killing {', '.join(each.name for each in victims)}")
    scene.victims += [victim.name for victim in victims]
    async with injected(Harm.KILL, victims, running.graph.pid, folder):
        scene.gone |= {victim.name for victim in victims}
    recovered = await scene.recovery()
    with suppress(TimeoutError):
        async with asyncio.timeout(BACK_WITHIN):
            while not all((folder / name).exists() for name in there):  # noqa: ASYNC110 (polls files)
                await asyncio.sleep(0.1)
    if missing := sorted(name for name in there if not (folder / name).exists()):
        scene.amiss.append(f"not recreated: {', '.join(missing)}")
    return recovered


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


DISK_FULL = Fault("disk-full", "no space on the state directory's file system for --hold seconds", fill)
STATE_LOST = Fault(
    "state-lost",
    "all files and folders of the state directory are removed; a worker of each role, NATS and etcd are killed",
    remove_state,
    kills_decode=True,
)
