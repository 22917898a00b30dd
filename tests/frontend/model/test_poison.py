"""A request that kills the engine which computes it costs two engines, and no other request anything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.config.schema import Config, DecodeConfig, PrefillConfig
from pdserve.decode.worker import DecodeWorker
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.spec import EngineSpec
from pdserve.plan.slots import Slot
from pdserve.prefill.worker import PrefillWorker
from pdserve.process.presence import new_instance_id
from pdserve.process.worker import EngineWorker
from pdserve.records import Role
from pdserve.stream.tcp import TcpStreamServer
from tests.conditions import until
from tests.decode.graph import Started, living
from tests.engine.sims import expected
from tests.frontend.conftest import MODEL, Graph
from tests.frontend.test_generate import complete, text_of
from tests.memory.queue import MemoryBroker, MemoryQueue
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")

FATAL = 299
ARGS = {"block-size": 16, "max-model-len": 4096}
SIM = {
    "fatal-token": FATAL,
    "prefill-rate": 1e6,
    "step-seconds": 0.004,
    "bandwidth": 1e12,
}


@asynccontextmanager
async def workers(graph: Graph, decode: int, prefill: int) -> AsyncIterator[list[Started[EngineWorker]]]:
    """Simulated workers, decode ones first, whose lease ends with them."""
    found: list[Started[EngineWorker]] = []
    broker = MemoryBroker(ack_wait=0.5)
    settings = DecodeConfig(remote_prefill=bool(prefill), max_local_prefill_length=64, engine_args=ARGS)
    config = Config(Path("test.yaml"), str(MODEL), "demo", None, settings, PrefillConfig(), drain_timeout=1.0)
    async with AsyncExitStack() as stack:
        for role, number in [(Role.PREFILL, n) for n in range(prefill)] + [
            (Role.DECODE, n) for n in range(decode)
        ]:
            name, slot = new_instance_id(Slot(role, number)), Slot(role, number)
            engine = SimEngine(
                EngineSpec(role, name, "demo", engine_args=ARGS | {"additional-config": {"sim": SIM}})
            )
            seams = (engine, MemoryRegistry(graph.registry), MemoryQueue(broker))
            worker: EngineWorker = (
                DecodeWorker(config, slot, name, *seams, TcpStreamServer("127.0.0.1"))
                if role is Role.DECODE
                else PrefillWorker(config, slot, name, *seams)
            )
            found.append(Started(worker, engine, await stack.enter_async_context(living(worker))))
        await until(lambda: graph.models.live().get("demo") == decode)
        yield found[prefill:] + found[:prefill]


def post(graph: Graph, prompt: list[int], **changes: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(complete(graph, prompt=prompt, **changes))


@pytest.mark.parametrize("prefill", [0, 2])
async def test_poison_ends_after_two_engines_and_the_others_are_served(graph: Graph, prefill: int) -> None:
    async with workers(graph, 4, prefill) as all_workers:
        prompts = [[300 + number, *range(400, 440)] for number in range(16)]
        innocents = [post(graph, prompt, max_tokens=150) for prompt in prompts[:12]]
        await until(lambda: all(worker.engine.usage.running >= 3 for worker in all_workers[:4]))
        poison = post(graph, [FATAL, *range(500, 700)], max_tokens=8)
        innocents += [post(graph, prompt, max_tokens=50) for prompt in prompts[12:]]
        answer = await poison
        answers = await asyncio.gather(*innocents)
        dead = [each.id for each in all_workers if each.engine.faults.dead]
        texts = [
            await text_of(graph, expected(prompt, 150 if prompt in prompts[:12] else 50))
            for prompt in prompts
        ]
    assert answer.status_code == 500
    assert "2 engines in a row died" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert len(dead) == 2, dead
    assert [answer.status_code for answer in answers] == [200] * 16
    assert [answer.json()["choices"][0]["text"] for answer in answers] == texts


async def test_after_a_loss_it_goes_another_way(graph: Graph) -> None:
    """KV that was read from another engine kills: the next worker computes the prompt itself."""
    async with workers(graph, 3, 1) as all_workers:
        for worker in all_workers[:3]:
            worker.engine.faults.fatal_pulls = True
        prompt = list(range(400, 600))
        answer = await post(graph, prompt, max_tokens=20)
        dead = [each.id for each in all_workers if each.engine.faults.dead]
        text = await text_of(graph, expected(prompt, 20))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text
    assert len(dead) == 1, dead


async def test_workers_that_are_killed_are_no_evidence(graph: Graph) -> None:
    """It is unknown what a killed process died of, however soon the next one dies."""
    request = post(graph, list(range(300, 320)), max_tokens=6)
    for _ in range(3):
        async with graph.worker(pace=None) as worker:
            await worker.until(lambda worker=worker: worker.jobs)
    async with graph.worker():
        assert (await request).status_code == 200
