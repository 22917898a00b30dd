"""Workers with simulated engines, for a model that the frontend of a test serves."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pdserve.config.schema import Config, DecodeConfig, PrefillConfig
from pdserve.contract.records import Role
from pdserve.decode.worker import DecodeWorker
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.spec import EngineSpec
from pdserve.plan.slots import Slot
from pdserve.prefill.worker import PrefillWorker
from pdserve.process.presence import new_instance_id
from pdserve.process.worker import EngineWorker
from pdserve.stream.tcp import TcpStreamServer
from tests.conditions import until
from tests.decode.graph import Started, living
from tests.frontend.conftest import MODEL, Graph
from tests.memory.queue import MemoryBroker, MemoryQueue
from tests.memory.registry import MemoryRegistry

SIM = {"prefill-rate": 1e6, "step-seconds": 0.004, "bandwidth": 1e12}


@asynccontextmanager
async def sim_workers(
    graph: Graph,
    decode: int,
    prefill: int = 0,
    *,
    model: str = "demo",
    slots: int = 256,
    step: float = 0.004,
    folder: Path = MODEL,
    args: Mapping[str, object] = MappingProxyType({}),
    traces: str | None = None,
) -> AsyncIterator[list[Started[EngineWorker]]]:
    """Yield decode workers, then prefill workers. When a worker ends, its lease ends. `args`: more engine arguments."""
    workers, broker = list[Started[EngineWorker]](), MemoryBroker(ack_wait=0.5)
    args = {"block-size": 16, "max-model-len": 4096, "max-num-seqs": slots, **args}
    simulated = args | {"additional-config": {"sim": SIM | {"step-seconds": step}}}
    settings = DecodeConfig(remote_prefill=bool(prefill), max_local_prefill_length=64, engine_args=args)
    prefilling = PrefillConfig(engine_args=args)
    config = Config(Path("test.yaml"), str(folder), model, None, settings, prefilling, drain_timeout=1.0)
    config, before = replace(config, otlp_endpoint=traces), graph.models.usable_workers().get(model, 0)
    async with AsyncExitStack() as stack:
        for number, role in enumerate([Role.PREFILL] * prefill + [Role.DECODE] * decode):
            slot = Slot(role, number)
            name = new_instance_id(slot)
            engine = SimEngine(EngineSpec(role, name, model, engine_args=simulated))
            seams = (engine, MemoryRegistry(graph.registry), MemoryQueue(broker))
            worker: EngineWorker = (
                PrefillWorker(config, slot, name, *seams)
                if role is Role.PREFILL
                else DecodeWorker(config, slot, name, *seams, TcpStreamServer("127.0.0.1"))
            )
            workers.append(Started(worker, engine, await stack.enter_async_context(living(worker))))
        await until(lambda: graph.models.usable_workers().get(model) == before + decode)
        yield workers[prefill:] + workers[:prefill]


@asynccontextmanager
async def sim_engines(graph: Graph, *counts: int, **options: Any) -> AsyncIterator[list[SimEngine]]:
    async with sim_workers(graph, *counts, **options) as workers:
        yield [worker.engine for worker in workers]
