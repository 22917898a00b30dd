"""A prefill worker is lost in each phase of a remote prefill. The test acts as the victim, with a
simulated engine, to control the phase."""

import time
from contextlib import AsyncExitStack
from enum import Enum, IntEnum

import pytest

from pdserve.contract.messages import PrefillDone
from pdserve.contract.records import Role
from pdserve.engine.sim.engine import SimEngine
from tests.conditions import until
from tests.decode.graph import LONG, WorkerGraph
from tests.engine.sims import body, collect, spec

pytestmark = pytest.mark.usefixtures("impatient", "brief_transfers")

VICTIM, SPARE = "prefill-victim", "prefill-spare"
END_WITHIN = 7.0
"""seconds; longer than the timeout of a prompt before any speed is measured"""


class Phase(IntEnum):
    QUEUED = 0
    PULLED = 1
    COMPUTING = 2
    ANSWERED = 3
    TRANSFERRING = 4


class Fault(Enum):
    KILL = "its connections break, and its supervisor deletes its registry keys"
    HANG = "it stays registered and sends nothing more"
    CUT = "packets vanish, and its lease in the registry ends"


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
async def test_the_request_does_not_fail_and_ends_in_time(phase: Phase, fault: Fault) -> None:
    async with WorkerGraph() as graph, AsyncExitStack() as process:
        victim, frontend = await graph.act_prefill(VICTIM), await graph.frontend()
        engine = await process.enter_async_context(SimEngine(spec(Role.PREFILL, VICTIM)))

        async def answer() -> None:
            (output,) = await collect(engine, request_id)
            assert output.handle is not None
            await victim.answer(PrefillDone(request_id, output.handle, 0.1))
            await delivery.ack()

        asked = time.monotonic()
        request_id = await frontend.submit(LONG, 8)
        await until(lambda: graph.depth == 1)
        if phase >= Phase.PULLED:
            (delivery,) = await victim.pull()
        if phase >= Phase.COMPUTING:
            await engine.prefill(request_id, LONG, body())
            await victim.start(request_id)
        engine.faults.drop_transfers = phase is Phase.TRANSFERRING or fault is not Fault.KILL
        if phase is Phase.TRANSFERRING:
            await answer()
            await until(lambda: bool(graph.decode_engine._pulling))
        spare = await graph.prefill(SPARE)
        if phase is Phase.ANSWERED:
            await answer()
        if fault is Fault.KILL:
            await process.aclose()
        if fault is not Fault.HANG:
            await victim.leave()
        assert not (await frontend.end_of(request_id)).failed
        assert time.monotonic() - asked < END_WITHIN
        await until(lambda: graph.depth == 0)
        await graph.frees_all()
        await spare.frees_all()
        again = await frontend.ask([7, *LONG], 4)
        assert again.way[0] == "remote", "the other worker is asked, and no request waits for the lost one"
