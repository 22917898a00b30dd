"""Workers on hosts whose clocks differ, on a real NATS: remote prefill goes on as if they did not."""

from contextlib import AsyncExitStack

import pytest

from pdserve import clock
from pdserve.config.schema import DecodeConfig
from pdserve.decode.worker import DecodeWorker
from pdserve.engine.sim.engine import SimEngine
from pdserve.plan.slots import Slot
from pdserve.prefill.worker import PrefillWorker
from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.records import Role
from pdserve.stream.tcp import TcpStreamServer
from tests.conditions import until
from tests.decode.graph import FrontendStream, config, living
from tests.decode.test_worker import LONG, expected, failures
from tests.engine.sims import spec
from tests.memory.registry import MemoryRegistry, MemoryServer

REASONS = ("timeout", "expired", "queue-down", "engine", "prefill-worker-gone", "no-prefill-worker")


@pytest.mark.parametrize("skewed", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("offset", [-40.0, 3600.0])
async def test_clocks_that_differ_change_nothing(
    nats_url: str, namespace: str, skewed: Role, offset: float
) -> None:
    graph = config(DecodeConfig(remote_prefill=True, max_local_prefill_length=32, max_prefill_queue_size=4))
    server, stream = MemoryServer(), TcpStreamServer("127.0.0.1")
    decode_engine = SimEngine(spec(Role.DECODE, "decode-0"))
    prefill_engine = SimEngine(spec(Role.PREFILL, "prefill-0"))
    decode = DecodeWorker(
        graph,
        Slot(Role.DECODE, 0),
        "decode-0",
        decode_engine,
        MemoryRegistry(server, "t"),
        JetStreamQueue(nats_url, namespace, "demo"),
        stream,
    )
    prefill = PrefillWorker(
        graph,
        Slot(Role.PREFILL, 0),
        "prefill-0",
        prefill_engine,
        MemoryRegistry(server, "t"),
        JetStreamQueue(nats_url, namespace, "demo"),
    )
    before = [failures(reason) for reason in REASONS]
    async with AsyncExitStack() as stack:
        with clock.skewed(offset if skewed is Role.DECODE else 0.0):
            await stack.enter_async_context(living(decode))
        with clock.skewed(offset if skewed is Role.PREFILL else 0.0):
            await stack.enter_async_context(living(prefill))
        await until(lambda: bool(decode.view.instances(Role.PREFILL)))
        frontend = await stack.enter_async_context(FrontendStream(stream.address))
        for start in range(5):
            answered = await frontend.ask(LONG[start:])
            assert answered.way[0] == "remote"
            assert answered.tokens == expected(LONG[start:], 4)
        assert [failures(reason) for reason in REASONS] == before, "nothing was computed twice"
