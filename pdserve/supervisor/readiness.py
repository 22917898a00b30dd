"""Who of our processes has registered itself: that, and nothing else, makes one ready."""

import asyncio
import logging
from abc import ABC, abstractmethod

import msgspec

from pdserve.errors import RegistryUnavailable
from pdserve.messages import Instance, SlotState, encode_record
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import View

log = logging.getLogger(__name__)

MISSING = 60.0
"""seconds that a live process may be missing from the registry before it counts as hung: a lease's ten, an outage's
hangover, a machine that stalls, and much more. Beyond it nobody would ever use the process again."""
TICK = 1.0


class Roll(ABC):
    """What the supervisor asks and tells the registry."""

    @abstractmethod
    async def until(self, instance_id: str, pid: int) -> Instance:
        """Wait until the process that was started under this id, and is `pid` here, is registered."""

    @abstractmethod
    async def vanished(self, instance: Instance) -> float:
        """Wait until the registry has not had this instance for long although its lease is renewed by anybody who
        works at all; for how many seconds."""

    @abstractmethod
    async def strike_off(self, instance: Instance) -> None:
        """Its process is dead for certain, though its lease may live for some seconds more."""

    @abstractmethod
    async def report(self, state: SlotState) -> None:
        """Let everybody see what has become of a process."""


class RollCall(Roll):
    def __init__(self, registry: Registry, view: View, host: str, leaving: float = 0.0) -> None:
        """`host` is this machine, for what is reported. `leaving` are the seconds that a process may go on after it
        took itself off the roll (a frontend that drains)."""
        self._registry = registry
        self._view = view
        self._host = host
        self._patience = MISSING + leaving

    async def until(self, instance_id: str, pid: int) -> Instance:
        async for _ in self._view.changes():
            for instance in self._view.instances():
                if instance.id == instance_id and instance.pid == pid:
                    return instance
        raise AssertionError("the registry's changes never end")

    async def vanished(self, instance: Instance) -> float:
        """Ticks are counted, not measured, and none during an outage: where this process was stopped itself, or has
        no registry, it knows nothing."""
        missing = 0.0
        while missing < self._patience:
            await asyncio.sleep(TICK)
            there = any(one.id == instance.id for one in self._view.instances())
            missing = 0.0 if there or not self._registry.connected else missing + TICK
        return missing

    async def strike_off(self, instance: Instance) -> None:
        """Others then see at once what they would see when the lease runs out."""
        try:
            await self._registry.delete(keys.instance(instance))
            if instance.model:
                await self._registry.delete(keys.card(instance.model, instance.id))
        except RegistryUnavailable:
            log.debug("%s stays listed until its lease runs out: etcd is away", instance.id)

    async def report(self, state: SlotState) -> None:
        state = msgspec.structs.replace(state, host=self._host)
        await self._registry.put(keys.slot(state), encode_record(state))
