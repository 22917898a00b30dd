"""Which faults there are, as data, and which process of this machine each one hits."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from pdserve.messages import Instance


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


class Kind(StrEnum):
    KILL = "kill"
    """SIGKILL of the process group"""
    HANG = "hang"
    """SIGSTOP of the process group, for some seconds"""
    CUT = "cut"
    """no packet reaches it and none of it arrives, for some seconds"""
    LOSE = "lose"
    """SIGKILL, and it starts again without its data"""
    DRAIN = "drain"
    """SIGTERM, as for an upgrade: it finishes what it has and ends"""

    @property
    def lasts(self) -> bool:
        """The victim lives on, and is whole again some seconds later."""
        return self in (Kind.HANG, Kind.CUT)


@dataclass(frozen=True)
class Fault:
    target: Target
    kind: Kind

    @property
    def name(self) -> str:
        return "rolling" if self.target is Target.WORKERS else f"{self.target.value}-{self.kind.value}"

    @property
    def kills_decode(self) -> bool:
        """What a dead decode worker had not read yet is kept by prefill workers until its lease ends
        (docs/decisions/0007-lost-answers.md)."""
        return self.kind is Kind.KILL and self.target in (Target.DECODE, Target.ALL_DECODE)

    @property
    def told(self) -> str:
        return f"{_WHOM[self.target]}: {_WHAT[self.kind]}"


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
    Kind.KILL: "SIGKILL",
    Kind.HANG: "SIGSTOP, and SIGCONT after --hold seconds",
    Kind.CUT: "no packet in or out for --hold seconds",
    Kind.LOSE: "SIGKILL, and back without its data",
    Kind.DRAIN: "SIGTERM, and back",
}
_EACH = (Target.PREFILL, Target.DECODE, Target.NATS, Target.ETCD, Target.FRONTEND)
FAULTS: tuple[Fault, ...] = (
    *(Fault(target, kind) for kind in (Kind.KILL, Kind.HANG, Kind.CUT) for target in _EACH),
    Fault(Target.NATS, Kind.LOSE),
    Fault(Target.ETCD, Kind.LOSE),
    Fault(Target.ALL_PREFILL, Kind.KILL),
    Fault(Target.ALL_PREFILL, Kind.HANG),
    Fault(Target.ALL_DECODE, Kind.KILL),
    Fault(Target.WORKERS, Kind.DRAIN),
    Fault(Target.FRONTEND, Kind.DRAIN),
)
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
    """its process group, whose leader it is"""


def find(
    target: Target, turn: int, instances: Sequence[Instance], supervisor: int, state_dir: Path
) -> list[list[Victim]]:
    """Who is hit, in rounds: all of a round at once, and each round when the graph is whole again after the one
    before. Raises LookupError, with the reason, where nothing of this graph on this machine is such a target.
    `turn` picks another one of several each time."""
    if target in _SERVERS:
        return [[_server(target, supervisor, state_dir)]]
    roles = _ROLES.get(target, (target.value,))
    ours = [
        Victim(one.id, one.pid)
        for role in roles
        for one in sorted(instances, key=lambda one: one.id)
        if one.role.value == role and _belongs(one.pid, supervisor)
    ]
    if not ours:
        raise LookupError(f"no {' or '.join(roles)} process of this graph on this machine")
    match target:
        case Target.WORKERS:
            return [[one] for one in ours]
        case Target.ALL_PREFILL | Target.ALL_DECODE:
            return [ours]
        case _:
            return [[ours[turn % len(ours)]]]


def _server(target: Target, supervisor: int, state_dir: Path) -> Victim:
    try:
        pid = int((state_dir / target.value / "lock").read_text())
    except (OSError, ValueError):
        pid = 0
    if not _belongs(pid, supervisor):
        raise LookupError(f"{target.value} is not a server of this graph's own")
    return Victim(target.value, pid)


def _belongs(pid: int, supervisor: int) -> bool:
    """Only what the graph's supervisor started, and what leads a group of its own, is ever harmed."""
    try:
        return pid > 0 and psutil.Process(pid).ppid() == supervisor and os.getpgid(pid) == pid
    except (psutil.Error, ProcessLookupError):
        return False
