"""The graph as data: its roles, how to run a process of each, and the order in which they stop.

All roles start at once when NATS and etcd are up. They stop in waves, one after the other: frontends need workers to
finish their requests.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from pdserve.config.schema import Config
from pdserve.contract.records import Role
from pdserve.plan.slots import Slot

T = TypeVar("T")

CONFIG_VARIABLE = "PDSERVE_CONFIG"
"""Environment variable with the configuration that the supervisor planned. The file may have changed since, and a
restarted role must fit the running ones."""
SLOT_VARIABLE = "PDSERVE_SLOT"
"""Environment variable with the slot that the supervisor planned. A process that planned its own slot might take GPUs
of other processes."""
BOOT_VARIABLE = "PDSERVE_BOOT"
"""Environment variable with the boot id, by which the supervisor recognizes the instance that its child registers.
A pid is unique only inside a container."""


@dataclass(frozen=True)
class RoleSpec:
    service: str
    """Import string of its `process.life.Service`."""
    stops: int
    """Wave in which it stops, lowest first. NATS and etcd stop last."""


GRAPH = {
    Role.FRONTEND: RoleSpec("pdserve.frontend.server:Frontend", stops=0),
    Role.DECODE: RoleSpec("pdserve.decode.worker:DecodeWorker", stops=1),
    Role.BOTH: RoleSpec("pdserve.both.worker:BothWorker", stops=1),
    Role.PREFILL: RoleSpec("pdserve.prefill.worker:PrefillWorker", stops=2),
}


def service_of(slot: Slot, config: Config) -> str:
    """Return the import string of the service that runs a slot."""
    if slot.node:
        return "pdserve.process.follower:FollowerService"
    stands_in = slot.role is Role.PREFILL and config.prefill is not None and config.prefill.stand_in
    return "pdserve.both.stand_in:StandIn" if stands_in else GRAPH[slot.role].service


@dataclass(frozen=True)
class ProcessSpec:
    """A process that the supervisor keeps alive."""

    name: str
    """Such as `decode-0`."""
    role: Role
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Additions to the supervisor's environment."""


def process_spec(slot: Slot, config_file: Path, env: Mapping[str, str]) -> ProcessSpec:
    """Return a process with the command that a user would run on another host: `pdserve decode -f FILE --index 0`."""
    pdserve = (sys.executable, "-m", "pdserve")
    command = (*pdserve, slot.role.value, "-f", str(config_file), "--index", str(slot.index))
    return ProcessSpec(slot.name, slot.role, command, env)


def to_environment(config: Config, slot: Slot) -> dict[str, str]:
    """Return the variables that `from_environment` reads in the process of this slot."""
    return {CONFIG_VARIABLE: _encode(config), SLOT_VARIABLE: _encode(slot)}


def from_environment(env: Mapping[str, str]) -> tuple[Config, Slot] | None:
    """Return the configuration and the slot of a process that the supervisor started; None in any other process."""
    if CONFIG_VARIABLE not in env or SLOT_VARIABLE not in env:
        return None
    return _decode(env[CONFIG_VARIABLE], Config), _decode(env[SLOT_VARIABLE], Slot)


def _encode(value: object) -> str:
    """Encode with `json`, because msgspec has no integers above 64 bits and no infinity."""
    return json.dumps(msgspec.to_builtins(value, enc_hook=str))


def _decode(text: str, kind: type[T]) -> T:
    return msgspec.convert(
        json.loads(text), kind, dec_hook=lambda kind, value: Path(value) if kind is Path else value
    )
