"""The list of all faults of `pdserve chaos`."""

from collections.abc import Sequence

from pdserve.util.errors import ConfigError
from pdserve_bench.chaos.inputs import abuse, adapters, disk, features, garbage, weights
from pdserve_bench.chaos.processes import (
    clocks,
    faults,
    hosts,
    members,
    pause,
    restarts,
    stalls,
    unregistered,
)
from pdserve_bench.chaos.scene import Fault

FAULTS: tuple[Fault, ...] = (
    *faults.FAULTS,
    *stalls.STALLS,
    *clocks.WRONG_CLOCKS,
    pause.HOST_PAUSE,
    abuse.UNREAD_STREAMS,
    abuse.POISON,
    garbage.GARBAGE,
    disk.DISK_FULL,
    weights.MIXED_WEIGHTS,
    adapters.ADAPTER_UNLOAD,
    *features.FEATURES,
    restarts.START_KILL,
    restarts.SERVE_KILL,
    unregistered.KEYS_DELETED,
    unregistered.PREFILL_WITHOUT_NATS,
    disk.STATE_LOST,
    restarts.SERVE_AND_GUARDIAN_KILL,
)
ALONE_FAULTS: tuple[Fault, ...] = (
    *faults.FAULTS,
    abuse.UNREAD_STREAMS,
    abuse.POISON,
    garbage.GARBAGE,
    unregistered.KEYS_DELETED,
    unregistered.PREFILL_WITHOUT_NATS,
)
"""Faults that need no `serve`."""
HOST_FAULTS = hosts.HOST_FAULTS
CLUSTER_FAULTS = members.CLUSTER_FAULTS


def choose(names: str, faults: Sequence[Fault] = FAULTS) -> tuple[Fault, ...]:
    """Select faults by name, target or kind, as `decode-kill,nats,clock`; empty selects all. Raises ConfigError."""
    if not names:
        return tuple(faults)
    chosen: list[Fault] = []
    for name in (word.strip() for word in names.split(",")):
        found = [fault for fault in faults if name in _names(fault)]
        if not found:
            known = ", ".join(fault.name for fault in faults)
            raise ConfigError([f"--only: there is no fault {name}; there are: {known}."])
        chosen += [fault for fault in found if fault not in chosen]
    return tuple(chosen)


def _names(fault: Fault) -> tuple[str, ...]:
    return fault.name, *(fault.tags or [fault.name.partition("-")[0]])
