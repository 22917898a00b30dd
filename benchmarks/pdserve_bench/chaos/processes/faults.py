"""Faults by target and kind: {prefill, decode, nats, etcd, frontend} x {kill, hang, cut} and similar. Find the victim's
processes, harm them, and undo it."""

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
    """`all-prefill` and `all-decode`: all workers of the role at once."""
    WORKERS = "workers"
    """Prefill and decode workers, one after the other, each back before the next."""


class Harm(StrEnum):
    KILL = "kill"
    CORE_KILL = "core-kill"
    """SIGKILL of the engine core only, as by the OOM killer; of several cores one after the other."""
    HANG = "hang"
    CUT = "cut"
    DAMAGE = "damage"
    """SIGKILL, with files left as by a power cut."""
    DRAIN = "drain"
    """SIGTERM, as for an upgrade: the victim finishes its requests and exits."""

    @property
    def lasts(self) -> bool:
        """Whether the victim survives and is restored after --hold seconds."""
        return self in (Harm.HANG, Harm.CUT)


CORE = "VLLM::EngineCor"
"""Process name of an engine core, as Linux truncates it."""
IN_A_ROW = 0.5
"""Seconds between kills of engine cores, so that requests move to the next victim."""
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
    Harm.CORE_KILL: f"SIGKILL of the engine core (several: {IN_A_ROW:g} s apart)",
    Harm.HANG: "SIGSTOP, and SIGCONT after --hold seconds",
    Harm.CUT: "no packet in or out for --hold seconds",
    Harm.DAMAGE: "SIGKILL, then a restart with each file cut to half its size, all zeros",
    Harm.DRAIN: "SIGTERM, then a restart",
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
    """The victim's process group; for an engine core, the pid."""


def find(target: Target, turn: int, instances: Sequence[Instance], supervisor: int) -> list[list[Victim]]:
    """Return rounds of victims: all of a round are hit together, the next round after the recovery. `turn` selects one
    of several processes. Raises Cannot if there is no such process here, LookupError if etcd lists no process."""
    if target in _SERVERS:
        return [[_server(target, supervisor)]]
    roles = _ROLES.get(target, (target.value,))
    victims = [
        Victim(instance.id, group)
        for role in roles
        for instance in sorted(instances, key=lambda instance: instance.id)
        if instance.role.includes(Role(role)) and (group := _group(instance.pid, supervisor))
    ]
    ours = list(dict.fromkeys(victims))  # a worker with both roles is listed twice
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
    raise Cannot(f"{target.value} is not one of this graph's servers")


def _group(pid: int, supervisor: int) -> int:
    """Return the process group of a process; 0 if the graph's supervisor did not start the group's leader, so that no
    other process is harmed. Without `serve`, a role is the child of its group's leader."""
    try:
        group = os.getpgid(pid) if pid > 0 else 0
        return group if group and psutil.Process(group).ppid() == supervisor else 0
    except (psutil.Error, ProcessLookupError):
        return 0


async def harm(scene: Scene, target: Target, how: Harm, victim: Victim | None = None) -> float | None:
    """Harm all rounds, or only `victim`; return the longest recovery in seconds, None after a timeout."""
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
    """Return the client ports of connections to the other frontends. These connections must survive."""
    dying = {victim.name for victim in victims}
    frontends = await scene.watch.instances(Role.FRONTEND)
    others = [psutil.Process(instance.pid) for instance in frontends if instance.id not in dying]
    return {end.raddr.port for process in others for end in process.net_connections("tcp") if end.raddr}


@asynccontextmanager
async def injected(
    how: Harm, victims: Sequence[Victim], supervisor: int, state_dir: Path, beside: Sequence[int] = ()
) -> AsyncIterator[None]:
    """A hang or cut lasts until the context exits; other harms happen on entry. A cut separates the victim from the
    supervisor's processes and those in `beside`. Raises Cannot, and LookupError if a victim has ended by itself."""
    match how:
        case Harm.KILL:
            _send(victims, signal.SIGKILL)
            yield
        case Harm.CORE_KILL:
            for core in [core_of(victim) for victim in victims]:
                _send([core], signal.SIGKILL, os.kill)
                await asyncio.sleep(IN_A_ROW)
            yield
        case Harm.DAMAGE:
            _send(victims, signal.SIGSTOP)  # stops them, so that none restarts before the damage
            for victim in victims:
                damage(state_dir / "servers" / victim.name)
            _send(victims, signal.SIGKILL)
            yield
        case Harm.DRAIN:
            _send(victims, signal.SIGTERM, os.kill)  # signals only the role, which stops its children
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
                    raise Cannot(f"{victim.name} has no connection to cut")
                yield


def core_of(victim: Victim) -> Victim:
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
    """Cut each file to half its size, all zeros, as if unsynced. Without files (NATS with its streams in memory), put
    files in place of folders, so that NATS does not start."""
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
