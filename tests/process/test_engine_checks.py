"""An engine that hangs, and one that is only slow."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from pdserve.engine.sim.engine import SimEngine
from pdserve.errors import EngineDead
from pdserve.process import engine_checks
from pdserve.records import Role
from tests.decode.graph import Graph
from tests.engine.sims import body, sim

PROMPT = list(range(3, 203))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"PROBE_INTERVAL": 0.02, "HANGS_AFTER": 0.2, "TICK": 0.02}.items():
        monkeypatch.setattr(engine_checks, name, seconds)


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with sim(Role.DECODE, "decode-0") as engine:
        yield engine


async def watched(engine: SimEngine, seconds: float) -> bool:
    """Whether it counts as alive for so long."""
    watching = asyncio.create_task(engine_checks.watch_engine(engine))
    await asyncio.wait([watching], timeout=seconds)
    alive = watching.cancel()
    with suppress(asyncio.CancelledError, EngineDead):
        await watching
    return alive


async def test_an_idle_engine_lives(engine: SimEngine) -> None:
    assert await watched(engine, 0.5)


async def test_one_that_hangs_idly_is_dead(engine: SimEngine) -> None:
    engine.faults.going.clear()
    assert not await watched(engine, 5)


async def test_one_that_hangs_in_a_step_is_dead(engine: SimEngine) -> None:
    await engine.generate("r", PROMPT, body(1000), None)
    engine.faults.going.clear()
    assert not await watched(engine, 5)


async def test_one_that_computes_for_long_lives(engine: SimEngine) -> None:
    engine.faults.slow = 5000.0
    await engine.generate("r", PROMPT, body(), None)
    assert await watched(engine, 1.0)


async def test_one_that_stands_still_for_a_moment_lives(engine: SimEngine) -> None:
    engine.faults.going.clear()
    asyncio.get_running_loop().call_later(0.1, engine.faults.going.set)
    assert await watched(engine, 0.6)


async def test_a_worker_whose_engine_hangs_ends_and_leaves_the_registry() -> None:
    async with Graph() as graph:
        other, frontend = await graph.registry_of_another(), await graph.frontend()
        await frontend.submit(PROMPT, 1000)
        graph.decode_engine.faults.going.clear()
        with pytest.raises(EngineDead, match="hangs"):
            await asyncio.wait_for(graph.life, 5)
        assert await other.read("") == {}
        assert not graph.stream._clients, "frontends were told, and go on elsewhere"


async def test_a_prefill_worker_whose_kv_cannot_be_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "REACH_INTERVAL", 0.02)
    async with Graph() as graph:
        prefill = await graph.prefill()
        prefill.engine.faults.deaf = True
        with pytest.raises(EngineDead, match="its KV cannot be read"):
            await asyncio.wait_for(prefill.life, 5)


async def test_a_side_channel_that_misses_a_question_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "REACH_INTERVAL", 0.02)
    async with sim(Role.PREFILL, "prefill-0") as engine:
        watching = asyncio.create_task(engine_checks.watch_side_channel(engine))
        for _ in range(5):
            engine.faults.deaf = True
            await asyncio.sleep(0.03)
            engine.faults.deaf = False
            await asyncio.sleep(0.05)
        assert watching.cancel()
