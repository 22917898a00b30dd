"""A watch, followed in the background."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pdserve.registry.base import Change, Registry, apply
from tests.conditions import until


class Following:
    def __init__(self) -> None:
        self.state: dict[str, bytes] | None = None
        self.changes: list[Change] = []

    async def follow(self, registry: Registry, prefix: str) -> None:
        async for changes in registry.watch(prefix):
            self.state = self.state or {}
            apply(changes, self.state)
            self.changes += changes

    async def until(self, state: dict[str, bytes], within: float = 30.0) -> None:
        await until(lambda: self.state == state, within)


@asynccontextmanager
async def following(registry: Registry, prefix: str = "") -> AsyncIterator[Following]:
    """Entered when the present state has been read."""
    followed = Following()
    task = asyncio.create_task(followed.follow(registry, prefix))
    try:
        await until(lambda: followed.state is not None or task.done())
        yield followed
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
