"""A role as a process: built from the configuration, stopped by signals."""

import asyncio
import logging
import signal
from typing import Protocol

from pdserve.config.schema import Config
from pdserve.engine.base import Engine
from pdserve.engine.spec import EngineSpec, make_engine
from pdserve.messages import Role
from pdserve.plan.slots import Slot
from pdserve.process.identity import worker_config
from pdserve.process.lifecycle import STOPPERS, SUPERVISOR_DIED

log = logging.getLogger(__name__)


AT_ONCE = 1.5
"""seconds to close what can be closed where a role ends without draining"""
SAME = 0.2
"""seconds within which a signal that is told again is the same one: uvloop 0.21 tells a signal twice where another one
comes just before it, as SUPERVISOR_DIED does before the guardian's SIGTERM (measured: 5 % of such pairs)"""
LAST_RESORT = 15.0
"""seconds beyond all drains after which a role whose supervisor died stops by itself: its guardian is gone, too"""


class Process(Protocol):
    """What a role runs: a worker, or a frontend."""

    @property
    def ready(self) -> asyncio.Event:
        """Set while it serves, until it is told to stop."""

    def stop(self) -> None:
        """Drain, and return from `run`."""

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


async def run_until_signalled(process: Process, drain_timeout: float) -> None:
    """The first of `STOPPERS` lets a serving role drain; one that is still starting, or another SIGTERM or SIGINT,
    ends it at once. Returns in all cases, though in the latter something may still run after `AT_ONCE`, in a thread
    that cannot be ended; what the role raises comes through."""
    life = asyncio.create_task(process.run())
    over = asyncio.Event()
    life.add_done_callback(lambda _: over.set())
    told: dict[signal.Signals, float] = {}

    def stop(number: signal.Signals) -> None:
        now, again = loop.time(), bool(told)
        if now < told.get(number, -SAME) + SAME:
            return
        told[number] = now
        if again and number is signal.SIGHUP:
            return  # the shell and the kernel both say that a terminal is closed
        if process.ready.is_set():
            process.stop()
        else:
            log.info("told again: ending at once" if again else "told to stop while starting: ending at once")
            life.cancel()
            loop.call_later(AT_ONCE, over.set)

    def orphaned() -> None:
        log.error("the supervisor was killed; its guardian stops the graph")
        loop.call_later(3 * drain_timeout + LAST_RESORT, stop, signal.SIGTERM)

    loop = asyncio.get_running_loop()
    for number in STOPPERS:
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(SUPERVISOR_DIED, orphaned)
    try:
        await over.wait()
        if life.done() and not life.cancelled():
            life.result()
    finally:
        life.cancel()
        for number in (*STOPPERS, SUPERVISOR_DIED):
            loop.remove_signal_handler(number)
