"""Who of our processes has registered itself: that, and nothing else, makes one ready."""

import logging
from abc import ABC, abstractmethod

from pdserve.errors import RegistryUnavailable
from pdserve.messages import Instance
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import View

log = logging.getLogger(__name__)


class Roll(ABC):
    """What the supervisor asks and tells the registry."""

    @abstractmethod
    async def until(self, pid: int) -> Instance:
        """Wait until the process `pid` of this machine is registered."""

    @abstractmethod
    async def strike_off(self, instance: Instance) -> None:
        """Its process is dead for certain, though its lease may live for some seconds more."""


class RollCall(Roll):
    def __init__(self, registry: Registry, view: View, host: str) -> None:
        """`host` is this machine, as its instances call it: other machines have the same pids."""
        self._registry = registry
        self._view = view
        self._host = host

    async def until(self, pid: int) -> Instance:
        async for _ in self._view.changes():
            for instance in self._view.instances():
                if instance.pid == pid and instance.host == self._host:
                    return instance
        raise AssertionError("the registry's changes never end")

    async def strike_off(self, instance: Instance) -> None:
        """Others then see at once what they would see when the lease runs out."""
        try:
            await self._registry.delete(keys.instance(instance))
            if instance.model:
                await self._registry.delete(keys.card(instance.model, instance.id))
        except RegistryUnavailable:
            log.debug("%s stays listed until its lease runs out: etcd is away", instance.id)
