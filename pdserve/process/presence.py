"""A worker's records in the registry: its instance with the current load, and its model card."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from pdserve import clock
from pdserve.messages import Instance, Load, ModelCard, encode_record
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""seconds that a worker waits for others before it announces itself"""
INTERVAL = 1.0
"""seconds between two looks at the load; nothing is written while it stays the same"""


class Presence:
    """Both records are under the process's lease, so that leaving the registry removes them."""

    def __init__(
        self,
        registry: Registry,
        instance: Instance,
        card: ModelCard | None,
        load: Callable[[], Load],
        skew: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`skew` is how wrong this process's clock is, as far as that is known now."""
        self.instance = instance
        self._skew = skew
        self._announced = asyncio.Event()
        self._registry = registry
        self._card = card
        self._load = load

    async def warm_up(self, view: RegistryView, warm: Callable[[], Awaitable[None]]) -> None:
        """Introduce the worker to those of the other role alone, and wait until it is warm with them: for some seconds
        at most, since one of them may hang.

        Of two that start at the same time at least one sees the other, because each looks after it has seen itself."""
        await self._registry.put(keys.newcomer(self.instance), encode_record(self.instance))
        try:
            async with asyncio.timeout(PATIENCE):
                await self._seen(view)
                await warm()
        except TimeoutError:
            log.warning("not warm with every worker of the other role after %g s; going on", PATIENCE)

    async def _seen(self, view: RegistryView) -> None:
        async for _ in view.changes():
            if self.instance.id in {
                one.id for one in view.newcomers(self.instance.role, self.instance.model)
            }:
                return

    async def announce(self) -> None:
        """The card first: whoever sees the instance can read what it serves."""
        if self._card is not None:
            key = keys.card(self._card.name, self.instance.id)
            await self._registry.put(key, encode_record(self._card))
        self._look()
        await self._write()
        await self._registry.delete(keys.newcomer(self.instance))
        self._announced.set()

    async def drain(self) -> None:
        """From here on nobody should send anything new."""
        self.instance = msgspec.structs.replace(self.instance, draining=True)
        await self._write()

    async def keep_current(self) -> None:
        """Write what changed since the announcement, for ever."""
        await self._announced.wait()
        while True:
            await asyncio.sleep(INTERVAL)
            before = self.instance
            self._look()
            if self.instance != before:
                await self._write()

    def _look(self) -> None:
        skew = described(self._skew(), self.instance.clock_skew)
        self.instance = msgspec.structs.replace(self.instance, load=self._load(), clock_skew=skew)

    async def _write(self) -> None:
        await self._registry.put(keys.instance(self.instance), encode_record(self.instance))


def described(skew: float | None, before: float | None) -> float | None:
    """The skew as it is registered, to a tenth of a second; logged where it becomes large."""
    if skew is None:
        return before
    now = round(skew, 1)
    if abs(now) > clock.LARGE_SKEW and now != before:
        direction = "ahead of" if now > 0 else "behind"
        log.warning(
            "clock: this host's is %.1f s %s the NATS server's; nothing breaks, but logs cannot be compared: set it "
            "by NTP",
            abs(now),
            direction,
        )
    return now
