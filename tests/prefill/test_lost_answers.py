"""An answer that is lost with a real NATS server."""

import asyncio

from pdserve.engine.sim.engine import SimEngine
from pdserve.messages import PrefillDone, PrefillRequest
from pdserve.prefill.worker import PrefillWorker
from pdserve.queue.base import PrefillQueue
from pdserve.records import Role
from tests.conditions import until
from tests.decode.graph import Seams, config
from tests.engine.sims import LOADED, body, sim
from tests.queue.conftest import NatsOutage

PROMPT = list(range(3, 203))


async def test_kv_of_a_lost_answer_is_free_long_before_its_lease_ends(nats_outage: NatsOutage) -> None:
    decode_side, queue = await nats_outage.queues(loaded=LOADED), await nats_outage.queues(loaded=LOADED)
    seams = Seams(config())
    seams.new_queue = lambda: queue  # type: ignore[method-assign]
    async with seams, sim(Role.DECODE, "decode-0") as decode:
        engine = (await seams.start(seams.make(PrefillWorker, "prefill-0"))).engine
        engine.faults.going.clear()
        await decode_side.publish(PrefillRequest("r", "decode-0", PROMPT, 30.0, 16, body()))
        await until(lambda: engine.usage.running == 1)
        await nats_outage.down()
        engine.faults.going.set()
        await until(lambda: not engine.usage.running)
        await nats_outage.up(lose_data=False)
        rejecting = asyncio.create_task(reject_all(decode_side, decode))
        await until(engine.all_blocks_free, 10)
        rejecting.cancel()
        await asyncio.gather(rejecting, return_exceptions=True)


async def reject_all(queue: PrefillQueue, decode: SimEngine) -> None:
    """As a decode worker does that has gone on without."""
    async for answer in queue.answers("decode-0"):
        if isinstance(answer, PrefillDone):
            await decode.reject(answer.handle)
