"""The faults of one kind done to one target: {prefill, decode, nats, etcd, frontend} x {kill, hang, cut} and their kin.
Which process of this machine each one hits, what is done to it, and how that is undone."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import psutil

from pdserve.contract.records import Instance, Role
from pdserve.supervisor.processes.exits import process_tree
from pdserve_bench.chaos.processes.network_cut import Cannot, cut_off
from pdserve_bench.chaos.scene import Fault, Scene


class Target(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    NATS = "nats"
    ETCD = "etcd"
    FRONTEND = "frontend"
    ALL_PREFILL = "all-prefill"
    ALL_DECODE = "all-decode"
    """these two: all of them at once"""
    WORKERS = "workers"
    """prefill and decode, one after the other, each back before the next"""


class Harm(StrEnum):
    KILL = "kill"
    CORE_KILL = "core-kill"
    """SIGKILL of the engine core below it alone, as the kernel does for lack of memory; of several, one by one"""
    HANG = "hang"
    CUT = "cut"
    """no packet reaches it and none of it arrives, for some seconds"""
    DAMAGE = "damage"
    """SIGKILL, and its files are as a power cut leaves them"""
    DRAIN = "drain"
    """SIGTERM, as for an upgrade: it finishes what it has and ends"""

    @property
    def lasts(self) -> bool:
        """The victim lives on, and is whole again some seconds later."""
        return self in (Harm.HANG, Harm.CUT)


CORE = "VLLM::EngineCor"
"""how Linux cuts the name of its process"""
IN_A_ROW = 0.5
"""seconds in which requests move to the next victim"""
_WHOM = {
    Target.PREFILL: "one prefill worker",
    Target.DECODE: "one decode worker",
    Target.FRONTEND: "one frontend",
    Target.NATS: "nats",
    Target.ETCD: "etcd",
    Target.ALL_PREFILL: "all prefill workers at once",
    Target.ALL_DECODE: "all decode workers at once",
    Target.WORKERS: "every worker, one after the other",
}
_WHAT = {
    Harm.KILL: "SIGKILL",
    Harm.CORE_KILL: f"SIGKILL of the engine core, {IN_A_ROW:g} s apart",
    Harm.HANG: "SIGSTOP, and SIGCONT after --hold seconds",
    Harm.CUT: "no packet in or out for --hold seconds",
    Harm.DAMAGE: "SIGKILL, and before it is back half of each of its files is lost, the rest zeros",
    Harm.DRAIN: "SIGTERM, and back",
}
_ROLES = {
    Target.ALL_PREFILL: ("prefill",),
    Target.ALL_DECODE: ("decode",),
    Target.WORKERS: ("prefill", "decode"),
}
_SERVERS = (Target.NATS, Target.ETCD)


@dataclass(frozen=True)
class Victim:
    name: str
    group: int
    """its process group, whose leader it is; of an engine core its process"""


def find(target: Target, turn: int, instances: Sequence[Instance], supervisor: int) -> list[list[Victim]]:
    """The victims in rounds: all of a round at once, and each round when the graph is whole again after the one
    before. Raises Cannot where nothing of this graph on this machine is such a target, and LookupError where etcd is
    silent. `turn` picks another one of several each time."""
    if target in _SERVERS:
        return [[_server(target, supervisor)]]
    roles = _ROLES.get(target, (target.value,))
    victims = [
        Victim(instance.id, group)
        for role in roles
        for instance in sorted(instances, key=lambda instance: instance.id)
        if instance.role.includes(Role(role)) and (group := _group(instance.pid, supervisor))
    ]
    ours = list(dict.fromkeys(victims))  # a worker that does both is named twice
    if not instances:
        raise LookupError("no process is registered")
    if not ours:
        raise Cannot(f"no {' or '.join(roles)} process of this graph on this machine")
    match target:
        case Target.WORKERS:
            return [[victim] for victim in ours]
        case Target.ALL_PREFILL | Target.ALL_DECODE:
            return [ours]
        case _:
            return [[ours[turn % len(ours)]]]


def _server(target: Target, supervisor: int) -> Victim:
    with suppress(psutil.Error):
        for child in psutil.Process(supervisor).children():
            if child.name().partition("-")[0] == target.value and _group(child.pid, supervisor) == child.pid:
                return Victim(target.value, child.pid)
    raise Cannot(f"{target.value} is not a server of this graph's own")


def _group(pid: int, supervisor: int) -> int:
    """The process group of a process; 0 unless the graph's supervisor started the group's leader, since only that is
    ever harmed. A role alone is the child of its leader."""
    try:
        group = os.getpgid(pid) if pid > 0 else 0
        return group if group and psutil.Process(group).ppid() == supervisor else 0
    except (psutil.Error, ProcessLookupError):
        return 0


async def harm(scene: Scene, target: Target, how: Harm, victim: Victim | None = None) -> float | None:
    """Seconds from the fault's end to the recovery, the longest of all rounds. `victim`: this one of the target."""
    running, slowest = scene.running, 0.0
    instances = await scene.watch.instances()
    rounds = [[victim]] if victim else find(target, scene.turn, instances, running.graph.pid)
    for victims in rounds:
        hit = ", ".join(f"{victim.name} (group {victim.group})" for victim in victims)
        scene.say(f"{hit}, {len(scene.load.running)} requests in flight")
        scene.victims += [victim.name for victim in victims]
        if (target, how) == (Target.FRONTEND, Harm.KILL):
            scene.load.frontend_dies(await _ports_of_others(scene, victims))
        async with injected(how, victims, running.graph.pid, running.state_dir):
            if how.lasts:
                await asyncio.sleep(scene.options.hold)
            else:
                scene.gone |= {victim.name for victim in victims}
        seconds = await scene.recovery()
        if seconds is None:
            return None
        slowest = max(slowest, seconds)
    return slowest


async def _ports_of_others(scene: Scene, victims: Sequence[Victim]) -> set[int]:
    """Clients' ports of the connections that the other frontends hold: those of the killed one cannot be saved."""
    dying = {victim.name for victim in victims}
    frontends = await scene.watch.instances(Role.FRONTEND)
    others = [psutil.Process(instance.pid) for instance in frontends if instance.id not in dying]
    return {end.raddr.port for process in others for end in process.net_connections("tcp") if end.raddr}


@asynccontextmanager
async def injected(
    how: Harm, victims: Sequence[Victim], supervisor: int, state_dir: Path, beside: Sequence[int] = ()
) -> AsyncIterator[None]:
    """What hangs or is cut off does so while this is entered; the others have been told to end by then. `beside` are
    processes that the supervisor did not start, and that are cut from the victim too. Raises LookupError where a victim
    has ended by itself, and Cannot."""
    match how:
        case Harm.KILL:
            _send(victims, signal.SIGKILL)
            yield
        case Harm.CORE_KILL:
            for core in [_core_of(victim) for victim in victims]:
                _send([core], signal.SIGKILL, os.kill)
                await asyncio.sleep(IN_A_ROW)
            yield
        case Harm.DAMAGE:
            _send(victims, signal.SIGSTOP)  # so that it is not started again before
            for victim in victims:
                damage(state_dir / "servers" / victim.name)
            _send(victims, signal.SIGKILL)
            yield
        case Harm.DRAIN:
            _send(victims, signal.SIGTERM, os.kill)  # the role alone: it stops those below it itself
            yield
        case Harm.HANG:
            _send(victims, signal.SIGSTOP)
            try:
                yield
            finally:
                with suppress(LookupError):
                    _send(victims, signal.SIGCONT)
        case Harm.CUT:
            (victim,) = victims
            async with cut_off(victim.group, [*process_tree(supervisor), *beside]) as cut:
                if not cut.connections:
                    raise Cannot(f"no connection of {victim.name} was found to cut")
                yield


def _core_of(victim: Victim) -> Victim:
    for pid in process_tree(victim.group):
        with suppress(psutil.Error):
            if psutil.Process(pid).name().startswith(CORE):
                return Victim(victim.name, pid)
    raise Cannot(f"{victim.name} has no engine core below it (a simulated engine)")


def _send(
    victims: Sequence[Victim], number: signal.Signals, how: Callable[[int, int], None] = os.killpg
) -> None:
    for victim in victims:
        try:
            how(victim.group, number)
        except ProcessLookupError:
            raise LookupError(f"{victim.name} has ended by itself") from None


def damage(data: Path) -> None:
    """Of each file as much as was not synced. In the place of the folder of a server without files, a file: NATS keeps
    its streams in memory, and does not start on that."""
    files = [path for path in data.rglob("*") if path.is_file()]
    for path in files:
        half = path.stat().st_size // 2
        os.truncate(path, 0)
        os.truncate(path, half)
    for folder in [] if files else list(data.iterdir()):
        shutil.rmtree(folder)
        folder.touch()


def _fault(target: Target, how: Harm) -> Fault:
    return Fault(
        "rolling" if target is Target.WORKERS else f"{target.value}-{how.value}",
        f"{_WHOM[target]}: {_WHAT[how]}",
        partial(harm, target=target, how=how),
        (target.value, how.value),
        patient=target is Target.ALL_DECODE,
        kills_decode=how in (Harm.KILL, Harm.CORE_KILL) and target in (Target.DECODE, Target.ALL_DECODE),
    )


_EACH = (Target.PREFILL, Target.DECODE, Target.NATS, Target.ETCD, Target.FRONTEND)
FAULTS: tuple[Fault, ...] = (
    *(_fault(target, how) for how in (Harm.KILL, Harm.HANG, Harm.CUT) for target in _EACH),
    _fault(Target.NATS, Harm.DAMAGE),
    _fault(Target.ETCD, Harm.DAMAGE),
    _fault(Target.ALL_PREFILL, Harm.KILL),
    _fault(Target.ALL_PREFILL, Harm.HANG),
    _fault(Target.ALL_DECODE, Harm.KILL),
    *(_fault(target, Harm.CORE_KILL) for target in (Target.PREFILL, Target.DECODE, Target.ALL_DECODE)),
    _fault(Target.WORKERS, Harm.DRAIN),
    _fault(Target.FRONTEND, Harm.DRAIN),
)
