"""Checks of ports before anything is started."""

from collections.abc import Iterable

from pdserve.config.schema import Config
from pdserve.plan.slots import Slot
from pdserve.ports import port_holder


def busy_ports(config: Config, slots: Iterable[Slot]) -> list[str]:
    """A sentence for each port that the graph needs and another process holds. Raises ConfigError where this user
    cannot listen on one."""
    problems = []
    if config.frontend and (holder := port_holder(config.frontend.host, config.frontend.port)):
        problems.append(
            f"Port {config.frontend.port} on {config.frontend.host} is held by {holder}: stop that, or set "
            "another port in Frontend."
        )
    for slot in slots:
        if problem := busy_kv_port(config, slot):
            problems.append(problem)
    return problems


def busy_kv_port(config: Config, slot: Slot) -> str | None:
    """A sentence where the port of the slot's side channel is taken, most likely by an orphan: the engine would hang at
    start for ever."""
    if slot.kv_port and (holder := port_holder(config.host, slot.kv_port)):
        return (
            f"Port {slot.kv_port} on {config.host}, where {slot.name} hands out its KV, is held by {holder}: "
            "stop that, or set another kv-port in Graph."
        )
    return None
