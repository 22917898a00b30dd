"""A worker as a process: built from the configuration, stopped by signals."""

import asyncio
import logging
import signal
from typing import Protocol

from pdserve.config.schema import Config, Slot
from pdserve.engine.base import Engine
from pdserve.engine.spec import EngineSpec, make_engine
from pdserve.messages import Role
from pdserve.worker.identity import worker_config
from pdserve.worker.lifecycle import STOPPERS

log = logging.getLogger(__name__)


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
    """The first of `STOPPERS` lets a serving worker drain; one that is still starting, or another SIGTERM or SIGINT,
    ends it at once. Returns in both cases; what the worker raises comes through."""
    life = asyncio.create_task(worker.run())
    told = False

    def stop(number: signal.Signals) -> None:
        nonlocal told
        again, told = told, True
        if again and number is signal.SIGHUP:
            return  # the shell and the kernel both say that a terminal is closed
        if worker.ready.is_set():
            worker.stop()
        else:
            log.info("told again: ending at once" if again else "told to stop while starting: ending at once")
            life.cancel()

    loop = asyncio.get_running_loop()
    for number in STOPPERS:
        loop.add_signal_handler(number, stop, number)
    try:
        await asyncio.wait([life])
        if not life.cancelled():
            life.result()
    finally:
        for number in STOPPERS:
            loop.remove_signal_handler(number)
