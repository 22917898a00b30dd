"""The graph as data: the roles, how a process of each is run, and in which order they stop.

Roles start together, once the servers are up: the frontend answers 503 on its port until a model's card appears, and
engines spend their half minute of loading side by side. They stop in waves, each when the wave before is gone, so that
a process that still finishes a request keeps everything that it needs for it.
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
"""environment variable with the configuration as the supervisor read it: the file may have been edited since, and a
restarted role must fit those that run"""
SLOT_VARIABLE = "PDSERVE_SLOT"
"""environment variable with the slot of a process as the supervisor planned it: alone it would plan other GPUs"""
BOOT_VARIABLE = "PDSERVE_BOOT"
"""environment variable with the boot id, by which the supervisor recognizes the instance that a process registers: a
pid is only unique inside a container, and until that is restarted"""


@dataclass(frozen=True)
class RoleSpec:
    service: str
    """import string of its `process.life.Service`, which `connect(config, slot, metrics_url)` makes"""
    stops: int
    """wave in which it is stopped, lowest first; the servers come after all of them"""


GRAPH = {
    Role.FRONTEND: RoleSpec("pdserve.frontend.server:Frontend", stops=0),
    Role.DECODE: RoleSpec("pdserve.decode.worker:DecodeWorker", stops=1),
    Role.BOTH: RoleSpec("pdserve.both.worker:BothWorker", stops=1),
    Role.PREFILL: RoleSpec("pdserve.prefill.worker:PrefillWorker", stops=2),
}


def service_of(slot: Slot, config: Config) -> str:
    """Import string of the service that runs a slot."""
    if slot.node:
        return "pdserve.process.follower:FollowerService"
    stands_in = slot.role is Role.PREFILL and config.prefill is not None and config.prefill.stand_in
    return "pdserve.both.stand_in:StandIn" if stands_in else GRAPH[slot.role].service


@dataclass(frozen=True)
class ProcessSpec:
    """A process that the supervisor keeps alive."""

    name: str
    """as in `decode-0`"""
    role: Role
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """additions to the supervisor's own environment"""


def process_spec(slot: Slot, config_file: Path, env: Mapping[str, str]) -> ProcessSpec:
    """Run a slot as a user would on another host: `pdserve decode -f FILE --index 0`."""
    pdserve = (sys.executable, "-m", "pdserve")
    command = (*pdserve, slot.role.value, "-f", str(config_file), "--index", str(slot.index))
    return ProcessSpec(slot.name, slot.role, command, env)


def to_environment(config: Config, slot: Slot) -> dict[str, str]:
    """The variables that `from_environment` reads in the process of this slot."""
    return {CONFIG_VARIABLE: _encode(config), SLOT_VARIABLE: _encode(slot)}


def from_environment(env: Mapping[str, str]) -> tuple[Config, Slot] | None:
    """The configuration and the slot of a process that the supervisor started; None in any other."""
    if CONFIG_VARIABLE not in env or SLOT_VARIABLE not in env:
        return None
    return _decode(env[CONFIG_VARIABLE], Config), _decode(env[SLOT_VARIABLE], Slot)


def _encode(value: object) -> str:
    """Encode by `json` and not by msgspec, which has no integers above 64 bits and no infinity."""
    return json.dumps(msgspec.to_builtins(value, enc_hook=str))


def _decode(text: str, kind: type[T]) -> T:
    return msgspec.convert(
        json.loads(text), kind, dec_hook=lambda kind, value: Path(value) if kind is Path else value
    )
