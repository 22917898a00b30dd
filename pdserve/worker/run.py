"""A worker as a process: built from the configuration, stopped by signals."""

import asyncio
import signal
from typing import Protocol

from pdserve.config.schema import Config, Slot
from pdserve.engine.base import Engine
from pdserve.engine.spec import EngineSpec, make_engine
from pdserve.messages import Role
from pdserve.worker.identity import worker_config


class Worker(Protocol):
    @property
    def ready(self) -> asyncio.Event: ...

    def stop(self) -> None: ...

    async def run(self) -> None: ...


def build_engine(config: Config, slot: Slot, instance_id: str) -> Engine:
    section = worker_config(config, slot.role)
    spec = EngineSpec(
        role=slot.role,
        instance=instance_id,
        model=config.model,
        served_model_name=config.served_model_name,
        engine_args=section.engine_args,
        disaggregated=slot.role is Role.PREFILL
        or (config.decode is not None and config.decode.remote_prefill),
        host=config.host,
        kv_port=slot.kv_port,
    )
    return make_engine(section.engine, spec)


async def run_until_signalled(worker: Worker) -> None:
    """The first SIGTERM or SIGINT lets a serving worker drain; one that is still starting, or a second
    signal, ends it at once. Returns in both cases; what the worker raises comes through."""
    life = asyncio.create_task(worker.run())

    def asked() -> None:
        if worker.ready.is_set():
            worker.stop()
        else:
            life.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    try:
        await asyncio.wait([life])
        if not life.cancelled():
            life.result()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
