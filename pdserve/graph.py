"""The graph as data: the roles, what each needs, and in which order they start and stop.

Roles start together, once the servers are up: the frontend answers 503 on its port until a model's card
appears, and engines spend their half minute of loading side by side. They stop in waves, each when the one
before is gone, so that whoever still finishes a request keeps everything that it needs for it.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdserve.config.schema import Config
from pdserve.messages import Role
from pdserve.plan.slots import Slot


@dataclass(frozen=True)
class RoleSpec:
    """A kind of process."""

    role: Role
    service: str
    """import string of its `process.life.Service`, whose `connect(config, slot, metrics_url)` makes one"""
    stops: int
    """wave in which it is stopped, lowest first; the servers come after all of them"""
    engine: bool = False
    """true: it loads a model"""


GRAPH = {
    node.role: node
    for node in (
        RoleSpec(Role.FRONTEND, "pdserve.frontend.server:Frontend", stops=0),
        RoleSpec(Role.DECODE, "pdserve.decode.worker:DecodeWorker", stops=1, engine=True),
        RoleSpec(Role.PREFILL, "pdserve.prefill.worker:PrefillWorker", stops=2, engine=True),
    )
}


SLOT_VARIABLE = "PDSERVE_SLOT"
"""environment variable by which the supervisor hands a process its slot: planned alone, it would get other
GPUs"""


CONFIG_VARIABLE = "PDSERVE_CONFIG"
"""environment variable with the configuration that the supervisor started with: the file may have been edited since,
and a role that is started again must fit those that run"""


BOOT_VARIABLE = "PDSERVE_BOOT"
"""environment variable by which the supervisor knows the instance that a process registers from all others: its pid is
only unique inside a container, and until a restart of that"""


def encode_config(config: Config) -> str:
    return json.dumps(msgspec.to_builtins(config, enc_hook=str))


def decode_config(text: str) -> Config:
    return msgspec.convert(
        json.loads(text), Config, dec_hook=lambda kind, value: Path(value) if kind is Path else value
    )


def encode_slot(slot: Slot) -> str:
    return msgspec.json.encode(slot).decode()


def decode_slot(text: str) -> Slot:
    return msgspec.json.decode(text, type=Slot)


@dataclass(frozen=True)
class ProcessSpec:
    """One process that the supervisor keeps alive."""

    name: str
    """`decode-0`"""
    role: Role
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """beside the supervisor's own environment"""

    @property
    def node(self) -> RoleSpec:
        return GRAPH[self.role]


def process_spec(slot: Slot, config_file: Path, env: Mapping[str, str]) -> ProcessSpec:
    """How `serve` runs a slot: exactly as a user would on another host, `pdserve decode -f FILE --index
    0`."""
    command = (
        sys.executable,
        "-m",
        "pdserve",
        slot.role.value,
        "-f",
        str(config_file),
        "--index",
        str(slot.index),
    )
    return ProcessSpec(slot.name, slot.role, command, env)
