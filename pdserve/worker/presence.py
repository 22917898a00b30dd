"""A worker's records in the registry: its instance with the current load, and its model card."""

import asyncio
from collections.abc import Callable

import msgspec

from pdserve.messages import Instance, Load, ModelCard, encode_record
from pdserve.registry import keys
from pdserve.registry.base import Registry

INTERVAL = 1.0
"""seconds between two looks at the load; nothing is written while it stays the same"""


class Presence:
    """Both records are under the process's lease, so that leaving the registry removes them."""

    def __init__(
        self, registry: Registry, instance: Instance, card: ModelCard | None, load: Callable[[], Load]
    ) -> None:
        self.instance = instance
        self._registry = registry
        self._card = card
        self._load = load

    async def announce(self) -> None:
        """The card first: whoever sees the instance can read what it serves."""
        if self._card is not None:
            key = keys.card(self._card.name, self.instance.id)
            await self._registry.put(key, encode_record(self._card))
        await self._write()

    async def drain(self) -> None:
        """From here on nobody should send anything new."""
        self.instance = msgspec.structs.replace(self.instance, draining=True)
        await self._write()

    async def keep_current(self) -> None:
        """Write the load whenever it changed, for ever."""
        while True:
            await asyncio.sleep(INTERVAL)
            load = self._load()
            if load != self.instance.load:
                self.instance = msgspec.structs.replace(self.instance, load=load)
                await self._write()

    async def _write(self) -> None:
        await self._registry.put(keys.instance(self.instance), encode_record(self.instance))
