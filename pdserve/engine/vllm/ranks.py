"""A host's ranks of a vLLM engine that has its core on another host."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.engine.base import Ranks
from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm.process import VllmProcess
from pdserve.errors import EngineDead

LOOK = 0.5
"""seconds"""
NO_EVENTS = "tcp://127.0.0.1:1"
"""endpoint of KV events, which the core alone sends"""


class VllmRanks(Ranks):
    def __init__(self, spec: EngineSpec) -> None:
        self._process = VllmProcess(spec)

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        try:
            await self._process.start(NO_EVENTS)
            yield
        finally:
            await self._process.stop()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            if self._process.dead:
                break
        raise EngineDead("a rank of this host died")
