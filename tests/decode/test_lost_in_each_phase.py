"""A prefill worker is lost in each phase of a remote prefill. The victim is a real simulated engine behind hands of
this test, so that the phase is the one that is meant; another worker stands by from the moment of the fault on."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum

import pytest

from pdserve.engine.sim.engine import SimEngine
from pdserve.messages import PrefillDone, PrefillStarted
from pdserve.queue.base import Delivery
from pdserve.records import Instance, Role, encode_record
from tests.conditions import until
from tests.decode.graph import WorkerGraph, shared_queue
from tests.engine.sims import LOADED, body, collect, spec
from tests.memory.queue import MemoryQueue

pytestmark = pytest.mark.usefixtures("impatient", "brief_transfers")

PROMPT = list(range(103, 603))
VICTIM, SPARE = "prefill-victim", "prefill-spare"
BOUND = 7.0
"""seconds: what a prompt of this length may wait for a worker that was never seen to work"""


class Phase(StrEnum):
    QUEUED = "queued"
    PULLED = "pulled"
    COMPUTING = "computing"
    ANSWERED = "answered"
    TRANSFERRING = "transferring"


class Fault(StrEnum):
    KILL = "kill"
    """its connections break, and its supervisor strikes it off the registry"""
    HANG = "hang"
    """it is registered and says nothing more"""
    CUT = "cut"
    """as a hang, until its lease in the registry is over; packets vanish"""


class Victim:
    """A prefill worker up to the phase that was asked for."""

    def __init__(
        self, graph: WorkerGraph, engine: SimEngine, queue: MemoryQueue, stack: AsyncExitStack
    ) -> None:
        self._graph = graph
        self._engine = engine
        self._queue = queue
        self._stack = stack
        self._delivery: Delivery

    async def get_to(self, phase: Phase, request_id: str) -> None:
        if phase is Phase.QUEUED:
            await until(lambda: self._graph.depth == 1)
            return
        (self._delivery,) = await self._queue.pull(1, 5.0)
        if phase is Phase.PULLED:
            return
        await self._engine.prefill(request_id, PROMPT, body())
        await self._queue.answer("decode-0", PrefillStarted(request_id, VICTIM))
        if phase is Phase.TRANSFERRING:
            self._engine.faults.drop_transfers = True
            await self.answer(request_id)
            await until(lambda: bool(self._graph.decode_engine._pulling))

    async def answer(self, request_id: str) -> None:
        (output,) = await collect(self._engine, request_id)
        assert output.handle is not None
        await self._queue.answer("decode-0", PrefillDone(request_id, output.handle, 0.1))
        await self._delivery.ack()

    async def suffer(self, fault: Fault, phase: Phase, request_id: str) -> None:
        match fault:
            case Fault.HANG | Fault.CUT:
                self._engine.faults.drop_transfers = True
                if phase is Phase.ANSWERED:
                    await self.answer(request_id)
            case Fault.KILL:
                if phase is Phase.ANSWERED:
                    await self.answer(request_id)
                await self._stack.aclose()
        if fault is not Fault.HANG:
            registry = await self._graph.registry_of_another()
            await registry.delete(f"instances/prefill/{VICTIM}")


@asynccontextmanager
async def victim(graph: WorkerGraph) -> AsyncIterator[Victim]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(SimEngine(spec(Role.PREFILL, VICTIM)))
        queue = await stack.enter_async_context(shared_queue(graph.broker))
        registry = await graph.registry_of_another()
        record = encode_record(Instance(VICTIM, Role.PREFILL, "demo", fingerprint=LOADED))
        await registry.put(f"instances/prefill/{VICTIM}", record)
        await until(lambda: bool(graph.decode.view.instances(role=Role.PREFILL)))
        yield Victim(graph, engine, queue, stack)


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("phase", Phase)
async def test_the_client_sees_nothing_but_a_pause(phase: Phase, fault: Fault) -> None:
    async with WorkerGraph() as graph, victim(graph) as lost:
        frontend = await graph.frontend()
        asked = time.monotonic()
        request_id = await frontend.submit(PROMPT, 8)
        await lost.get_to(phase, request_id)
        spare = await graph.prefill(SPARE)
        await lost.suffer(fault, phase, request_id)
        assert not (await frontend.end_of(request_id)).failed
        assert time.monotonic() - asked < BOUND
        await until(lambda: graph.depth == 0)
        await until(graph.decode_engine.all_blocks_free)
        await until(spare.engine.all_blocks_free)
        again = await frontend.ask([7, *PROMPT], 4)
        assert again.way[0] == "remote", "the other worker is asked, and no request waits for the lost one"
