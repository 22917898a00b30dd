"""A host's ranks of a simulated engine: none, because the leader simulates all ranks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.engine.base import Ranks
from pdserve.engine.spec import EngineSpec


class SimRanks(Ranks):
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        yield

    async def watch(self) -> None:
        await asyncio.Event().wait()
