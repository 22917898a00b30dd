"""Workers that decode and prefill, on simulated engines and in-memory seams, for tests."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdserve.both.worker import BothWorker
from pdserve.config.schema import DecodeConfig
from pdserve.engine.sim.engine import SimEngine
from pdserve.plan.slots import Slot
from pdserve.prefill.worker import PrefillWorker
from pdserve.records import Role
from pdserve.stream.tcp import TcpStreamServer
from tests.conditions import until
from tests.decode.graph import FrontendStream, Prefill, config, living, shared_queue
from tests.engine.sims import spec
from tests.memory.queue import MemoryBroker, MemoryQueue
from tests.memory.registry import MemoryRegistry, MemoryServer


@dataclass
class Both:
    worker: BothWorker
    engine: SimEngine
    frontend: FrontendStream
    life: "asyncio.Task[None]"


class BothWorkers:
    """`async with BothWorkers() as pair`: two workers of role `both`, each with a frontend of its own."""

    def __init__(self, drain_timeout: float = 5.0) -> None:
        self.registry = MemoryServer()
        self.broker = MemoryBroker(ack_wait=0.5)
        decode = DecodeConfig(
            role="both", remote_prefill=True, max_local_prefill_length=32, max_prefill_queue_size=4
        )
        self.config = config(decode, drain_timeout)

    @property
    def depth(self) -> int:
        return shared_queue(self.broker).depth

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        self.a, self.b = await asyncio.gather(self.start("both-0"), self.start("both-1"))
        for one, other in ((self.a, self.b), (self.b, self.a)):
            await until(lambda one=one, other=other: _sees(one, other))  # type: ignore[misc]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def start(self, name: str) -> Both:
        engine, stream = SimEngine(spec(Role.BOTH, name)), TcpStreamServer("127.0.0.1")
        worker = BothWorker(
            self.config,
            Slot(Role.BOTH, 0),
            name,
            engine,
            MemoryRegistry(self.registry, "t"),
            MemoryQueue(self.broker),
            stream,
        )
        life = await self._stack.enter_async_context(living(worker))
        frontend = await self._stack.enter_async_context(FrontendStream(stream.address, f"frontend-{name}"))
        return Both(worker, engine, frontend, life)

    async def prefill(self, name: str) -> Prefill:
        """A worker that only prefills, which both know of when this returns."""
        engine = SimEngine(spec(Role.PREFILL, name))
        registry, queue = MemoryRegistry(self.registry, "t"), MemoryQueue(self.broker)
        worker = PrefillWorker(self.config, Slot(Role.PREFILL, 0), name, engine, registry, queue)
        life = await self._stack.enter_async_context(living(worker))
        for one in (self.a, self.b):
            await until(lambda one=one: name in {w.id for w in one.worker.view.instances(Role.PREFILL)})  # type: ignore[misc]
        return Prefill(worker, engine, life)


def _sees(worker: Both, other: Both) -> bool:
    return other.worker.id in {found.id for found in worker.worker.view.instances(Role.PREFILL)}
