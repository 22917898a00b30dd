"""Workers on hosts whose clocks differ, on a real NATS: remote prefill goes on as if they did not."""

import pytest

from pdserve import clock
from pdserve.queue.base import PrefillQueue
from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.records import Role
from tests.decode.graph import LONG, WorkerGraph, failures

REASONS = ("timeout", "expired", "queue-down", "engine", "prefill-worker-gone", "no-prefill-worker")


@pytest.mark.parametrize("skewed", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("offset", [-40.0, 3600.0])
async def test_clocks_that_differ_change_nothing(
    nats_url: str, namespace: str, skewed: Role, offset: float
) -> None:
    class NatsGraph(WorkerGraph):
        def new_queue(self) -> PrefillQueue:
            return JetStreamQueue(nats_url, namespace, "demo")

    graph, before = NatsGraph(), [failures(reason) for reason in REASONS]
    with clock.skewed(offset if skewed is Role.DECODE else 0.0):
        await graph.__aenter__()
    async with graph._stack:
        with clock.skewed(offset if skewed is Role.PREFILL else 0.0):
            await graph.prefill()
        frontend = await graph.frontend()
        for start in range(5):
            assert (await frontend.ask(LONG[start:])).way[0] == "remote"
        assert [failures(reason) for reason in REASONS] == before, "nothing was computed twice"
