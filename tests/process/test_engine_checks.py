"""Liveness of engines: hung, slow and stalled ones; and the memory check."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from pdserve.config.load import load
from pdserve.contract.records import Role
from pdserve.demo import MODEL_DIR
from pdserve.engine.base import EngineFacts
from pdserve.engine.sim.engine import SimEngine
from pdserve.plan.slots import Slot
from pdserve.process import engine_checks
from pdserve.process.engine_checks import log_memory
from pdserve.util.errors import EngineDead, PeerGone
from tests.conditions import holds, until
from tests.decode.graph import WorkerGraph
from tests.engine.sims import body, sim

PROMPT = list(range(3, 203))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"PROBE_INTERVAL": 0.02, "STALLS_AFTER": 0.06, "HANGS_AFTER": 0.2, "TICK": 0.02}
    for name, seconds in times.items():
        monkeypatch.setattr(engine_checks, name, seconds)


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with sim(Role.DECODE, "decode-0") as engine:
        yield engine


async def stays_alive(engine: SimEngine, seconds: float) -> bool:
    """Whether the engine counts as alive for `seconds`."""
    watching = asyncio.create_task(engine_checks.EngineWatch(engine).run())
    await asyncio.wait([watching], timeout=seconds)
    alive = watching.cancel()
    with suppress(asyncio.CancelledError, EngineDead):
        await watching
    return alive


async def test_a_hung_engine_is_dead_and_a_short_pause_is_not(engine: SimEngine) -> None:
    """The engine has no requests."""
    engine.faults.going.clear()
    asyncio.get_running_loop().call_later(0.1, engine.faults.going.set)
    assert await stays_alive(engine, 0.5)
    engine.faults.going.clear()
    assert not await stays_alive(engine, 30)


@pytest.mark.parametrize(("spins_after", "within", "alive"), [(300.0, 0.7, True), (0.6, 30.0, False)])
async def test_an_engine_that_uses_cpu_time_has_a_longer_timeout(
    engine: SimEngine, monkeypatch: pytest.MonkeyPatch, spins_after: float, within: float, alive: bool
) -> None:
    monkeypatch.setattr(engine_checks, "SPINS_AFTER", spins_after)
    engine.faults.slow = 5000.0
    await engine.generate("r", PROMPT, body(), None)
    assert await stays_alive(engine, within) is alive


@asynccontextmanager
async def stalls(engine: SimEngine, gpus: tuple[int, ...] = ()) -> AsyncIterator[list[bool]]:
    """Yield a list that gets each value of `stalled` that the engine's watch reports."""
    watch, said = engine_checks.EngineWatch(engine, gpus), list[bool]()
    watch.on_change = lambda: said.append(watch.stalled)
    watching = asyncio.create_task(watch.run())
    yield said
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_hung_engine_is_stalled_until_it_replies(
    engine: SimEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_checks, "HANGS_AFTER", 60.0)
    async with stalls(engine) as said:
        engine.faults.going.clear()
        await until(lambda: said == [True])
        engine.faults.going.set()
        await until(lambda: said == [True, False])
        engine.faults.slow = 5000.0
        await engine.generate("r", PROMPT, body(), None)
        await holds(lambda: said == [True, False], 0.5)


@pytest.mark.parametrize("busy", [0, 35])
async def test_an_engine_is_stalled_unless_its_gpu_computes(
    engine: SimEngine, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    """The engine's processes sleep until the GPU is done."""
    monkeypatch.setattr(engine_checks, "HANGS_AFTER", 60.0)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetUtilizationRates", lambda index: SimpleNamespace(gpu=busy * (index == 3))
    )
    async with stalls(engine, gpus=(2, 3)) as said:
        engine.faults.going.clear()
        if busy:
            await holds(lambda: not said, 0.5)
        else:
            await until(lambda: said == [True])


async def test_an_engine_with_a_gpu_is_not_stalled_without_nvml(
    engine: SimEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_checks, "HANGS_AFTER", 60.0)
    async with stalls(engine, gpus=(0,)) as said:
        engine.faults.going.clear()
        await holds(lambda: not said, 0.5)


async def test_a_worker_whose_engine_hangs_ends_and_leaves_the_registry() -> None:
    async with WorkerGraph() as graph:
        other, frontend = await graph.registry_of_another(), await graph.frontend()
        await frontend.submit(PROMPT, 1000)
        graph.decode_engine.faults.going.clear()
        with pytest.raises(EngineDead, match="hangs"):
            await asyncio.wait_for(graph.life, 30)
        assert await other.read("") == {}
        with pytest.raises(PeerGone):  # so that the request migrates
            await asyncio.wait_for(frontend.reader, 30)


async def test_a_prefill_worker_whose_kv_cannot_be_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "REACH_INTERVAL", 0.02)
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        prefill.engine.faults.deaf = True
        with pytest.raises(EngineDead, match="its KV cannot be read"):
            await asyncio.wait_for(prefill.life, 30)


async def test_a_single_failed_probe_of_the_side_channel_is_tolerated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_checks, "REACH_INTERVAL", 0.02)
    async with sim(Role.PREFILL, "prefill-0") as engine:
        watching = asyncio.create_task(engine_checks.watch_side_channel(engine))
        for _ in range(5):
            engine.faults.deaf = True
            await asyncio.sleep(0.03)
            engine.faults.deaf = False
            await asyncio.sleep(0.05)
        assert watching.cancel()


# memory

FACTS = EngineFacts(16_384, 32, 4096, 32, 2048, 128.0, "0.32.0", ["generate"])
"""of the demo model with 1 GiB for KV on the CPU"""


@pytest.mark.parametrize(
    ("engine", "blocks", "logged"),
    [
        ("vllm", 13_200, "INFO KV blocks, found / planned: 13,200 / 16,384 (x 0.81)"),
        ("vllm", 12_000, "WARNING KV blocks, found / planned: 12,000 / 16,384 (x 0.73); docs/memory.md"),
        ("sim", 12_000, ""),
    ],
)
def test_kv_blocks_are_compared_with_the_plan(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, engine: str, blocks: int, logged: str
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(
        f"VllmWorker: {{model: {MODEL_DIR}, engine: {engine}, block-size: 32, max-model-len: 4096}}\n"
    )
    with caplog.at_level(logging.INFO):
        log_memory(load(path, {}), Slot(Role.DECODE, 0), replace(FACTS, kv_blocks=blocks))
    assert "".join(f"{each.levelname} {each.message}" for each in caplog.records).startswith(logged)
    assert bool(caplog.records) is bool(logged)
