"""Which faults there are, as data, and which process of this machine each one hits."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from pdserve.errors import ConfigError
from pdserve.messages import Instance


class Target(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    NATS = "nats"
    ETCD = "etcd"
    FRONTEND = "frontend"


class Kind(StrEnum):
    KILL = "kill"
    """SIGKILL of the process group"""
    HANG = "hang"
    """SIGSTOP of the process group, for some seconds"""
    CUT = "cut"
    """no packet reaches it and none of it arrives, for some seconds"""


@dataclass(frozen=True)
class Fault:
    target: Target
    kind: Kind

    @property
    def name(self) -> str:
        return f"{self.target.value}-{self.kind.value}"


FAULTS = tuple(Fault(target, kind) for kind in Kind for target in Target)
SERVERS = (Target.NATS, Target.ETCD)


@dataclass(frozen=True)
class Victim:
    name: str
    group: int
    """its process group, whose leader it is"""


def choose(names: str) -> tuple[Fault, ...]:
    """`decode-kill,nats`: faults by name, or all of a target or kind; empty for every one. Raises
    ConfigError."""
    if not names:
        return FAULTS
    chosen: list[Fault] = []
    for name in (one.strip() for one in names.split(",")):
        found = [each for each in FAULTS if name in (each.name, each.target, each.kind)]
        if not found:
            known = ", ".join(each.name for each in FAULTS)
            raise ConfigError([f"--only: there is no fault {name}; there are: {known}."])
        chosen += [each for each in found if each not in chosen]
    return tuple(chosen)


def find(
    target: Target, turn: int, instances: Sequence[Instance], supervisor: int, state_dir: Path
) -> Victim:
    """Raises LookupError, with the reason, where nothing of this graph on this machine is such a target.
    `turn` picks another one of several each time."""
    if target in SERVERS:
        return _server(target, supervisor, state_dir)
    ours = sorted(
        (one for one in instances if one.role.value == target.value and _belongs(one.pid, supervisor)),
        key=lambda one: one.id,
    )
    if not ours:
        raise LookupError(f"no {target.value} process of this graph on this machine")
    one = ours[turn % len(ours)]
    return Victim(one.id, one.pid)


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


def send(victim: Victim, number: signal.Signals) -> None:
    os.killpg(victim.group, number)
