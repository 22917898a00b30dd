"""Every fault that `pdserve chaos` knows."""

from pdserve.errors import ConfigError
from pdserve_bench.chaos import abuse, clocks, disk, faults, garbage, restarts, weights
from pdserve_bench.chaos.faults import Fault, Kind
from pdserve_bench.chaos.scene import Scenario

SCENARIOS = (
    *clocks.SCENARIOS,
    abuse.UNREAD_STREAMS,
    abuse.POISON,
    garbage.GARBAGE,
    disk.DISK_FULL,
    weights.MIXED_WEIGHTS,
    restarts.START_KILL,
    restarts.SERVE_KILL,
)
FAULTS: tuple[Fault | Scenario, ...] = (*faults.FAULTS, *SCENARIOS)


def choose(names: str, ours: bool = True) -> tuple[Fault | Scenario, ...]:
    """`decode-kill,nats,clock`: faults by name, or all of a target or kind; empty for every one, but for the loss of
    data that is not `ours`. Raises ConfigError."""
    if not names:
        return tuple(each for each in FAULTS if ours or not _loses_data(each))
    chosen: list[Fault | Scenario] = []
    for name in (each.strip() for each in names.split(",")):
        found = [each for each in FAULTS if name in _names(each)]
        if not found:
            known = ", ".join(each.name for each in FAULTS)
            raise ConfigError([f"--only: there is no fault {name}; there are: {known}."])
        chosen += [each for each in found if each not in chosen]
    return tuple(chosen)


def _loses_data(fault: Fault | Scenario) -> bool:
    return isinstance(fault, Fault) and fault.kind is Kind.LOSE


def _names(fault: Fault | Scenario) -> tuple[str, ...]:
    if isinstance(fault, Fault):
        return fault.name, fault.target, fault.kind
    return fault.name, fault.name.partition("-")[0]
