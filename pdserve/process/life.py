"""The life of a process of the graph, the same for frontends, decode and prefill workers: start, announce, serve,
drain, end. `run` is the process from the outside, `Service` what each role gives to it."""

import asyncio
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from importlib import import_module
from typing import Any

import psutil
import uvloop

from pdserve.config.schema import Config
from pdserve.errors import ConfigError, EngineDead, PdserveError, leaves
from pdserve.graph import GRAPH
from pdserve.observe.pages import serve_pages
from pdserve.observe.tracing import make_tracer
from pdserve.plan.slots import Slot
from pdserve.process.signals import STOPPERS, SUPERVISOR_DIED
from pdserve.tasks import process_owner, unending
from pdserve.watch import Connections, Receipt, Watched

log = logging.getLogger(__name__)

AT_ONCE = 1.5
"""seconds to close what can be closed where a role ends without draining"""
SAME_SIGNAL = 0.2
"""seconds within which a signal that is told again is the same signal: uvloop 0.21 tells a signal twice where another
one comes just before it, as SUPERVISOR_DIED does before the guardian's SIGTERM (measured: 5 % of such pairs)"""
LAST_RESORT = 15.0
"""seconds beyond all drains after which a role whose supervisor died stops by itself: its guardian is gone, too"""
END_WITHIN = 1.0
"""seconds from the end of a role's work to the end of its process"""


class Service(ABC):
    """What one process does. `run` is its whole life, in which the methods below it are called in their order; `stop`
    asks it to drain and return."""

    def __init__(self, config: Config, slot: Slot, instance_id: str, metrics_url: str) -> None:
        self.id = instance_id
        self.ready = asyncio.Event()
        """set from just before it is announced, and may have requests, until it is told to stop"""
        self.draining = False
        self.tasks: asyncio.TaskGroup
        """work beside that of `permanent`; there from `permanent` to the end of `drain`"""
        self.tracer = make_tracer(config.otlp_endpoint, f"pdserve-{slot.role.value}", instance_id)
        self.connections = Connections()
        self._config = config
        self._slot = slot
        self._metrics_url = metrics_url
        self._stop = asyncio.Event()

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Return after `stop` and the drain. Raises EngineDead as itself, after `engine_died` has told others of it;
        other failures of tasks as the group of them. The first task to fail ends the service with its error. No
        background task outlives it, its seams' included."""
        async with process_owner(), AsyncExitStack() as stack:
            await self.start(stack)
            await stack.enter_async_context(self.tracer)
            try:
                async with asyncio.TaskGroup() as self.tasks:
                    await self._serve()
            except BaseExceptionGroup as failures:
                if death := next((leaf for leaf in leaves(failures) if isinstance(leaf, EngineDead)), None):
                    await self.engine_died(death)
                    raise EngineDead(str(death)) from failures
                raise

    async def _serve(self) -> None:
        permanent = [
            self.tasks.create_task(unending(work, getattr(work, "__qualname__", "a task")))
            for work in (self.connections.follow(), *self.permanent())
        ]
        await self.warm_up()
        self.ready.set()
        await self.announce()
        await self._stop.wait()
        self.draining = True
        self.ready.clear()
        await self.drain()
        for task in permanent:
            task.cancel()

    @abstractmethod
    async def start(self, stack: AsyncExitStack) -> None:
        """Enter all that is needed to serve; `stack` leaves it at the end, in the opposite order."""

    @abstractmethod
    def permanent(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Work that never ends by itself: when any of it does, the service fails. It goes on during the drain, since
        running requests need it."""

    async def warm_up(self) -> None:
        """Do what is better done before the first request."""
        return

    @abstractmethod
    async def announce(self) -> None:
        """Tell the others that it serves."""

    @abstractmethod
    async def drain(self) -> None:
        """Take nothing new, and finish what is there within the drain timeout."""

    def watched(self) -> Watched:
        """What it is doing; raises AttributeError before `start`."""
        return Watched()

    def receipts(self, limit: int, key: str | None, request_id: str) -> list[Receipt]:
        """Of requests that this process answers or has answered, the newest first; with `key`, of the API key of this
        name, with `request_id`, of this id."""
        return []

    async def engine_died(self, death: EngineDead) -> None:
        """Say what is lost with the engine, while the seams are still there."""
        return


# the process


def run(config: Config, slot: Slot) -> int:
    """Live as this slot of the graph; the exit code."""
    os.environ.update(slot.env)  # before vLLM is imported
    return uvloop.run(_live_to_the_end(config, slot))


def exit_code(name: str, error: Exception) -> int:
    """Say why the role ended, in a sentence where it is one of our own errors. A wrong configuration (2) is told apart
    however late it was found: the supervisor does not try it again."""
    found = leaves(error)
    if problems := [problem for leaf in found if isinstance(leaf, ConfigError) for problem in leaf.problems]:
        for problem in problems:
            log.error("%s", problem)
        return 2
    if dead := next((leaf for leaf in found if isinstance(leaf, EngineDead)), None):
        log.error("the engine is gone, and this worker with it: %s", dead)
    elif all(isinstance(leaf, PdserveError) for leaf in found):
        log.error("%s failed: %s", name, "; ".join(map(str, found)))
    else:
        log.error("%s failed", name, exc_info=error)
    return 1


async def live(config: Config, slot: Slot) -> None:
    """One role in this event loop. Returns after SIGTERM and the drain; raises what `Service.run` raises."""
    module, _, name = GRAPH[slot.role].service.partition(":")
    connect: Callable[[Config, Slot, str], Service] = getattr(import_module(module), name).connect
    with serve_pages(config.host) as pages:
        service = connect(config, slot, pages.metrics)
        pages.watched, pages.receipts = service.watched, service.receipts
        await live_until_signalled(service, config.drain_timeout)


async def live_until_signalled(service: Service, drain_timeout: float) -> None:
    """The first of `STOPPERS` lets a service that is ready drain; while it starts, or when SIGTERM or SIGINT come
    again, it ends at once. Returns in all cases, though in the latter something may still run after `AT_ONCE`, in a
    thread that cannot be ended; what the service raises comes through."""
    life = asyncio.create_task(service.run())
    over = asyncio.Event()
    life.add_done_callback(lambda _: over.set())
    told: dict[signal.Signals, float] = {}

    def stop(number: signal.Signals) -> None:
        now, again = time.monotonic(), bool(told)
        if now < told.get(number, -SAME_SIGNAL) + SAME_SIGNAL:
            return
        told[number] = now
        if again and number is signal.SIGHUP:
            return  # the shell and the kernel both say that a terminal is closed
        if (service.ready.is_set() or service.draining) and not again:
            service.stop()
        else:
            log.info("told again: ending at once" if again else "told to stop while starting: ending at once")
            life.cancel()
            loop.call_later(AT_ONCE, over.set)

    def orphaned() -> None:
        log.error("the supervisor was killed; its guardian stops the graph")
        told.clear()  # what the supervisor had told, the guardian tells once more
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


async def _live_to_the_end(config: Config, slot: Slot) -> int:
    """Nothing is left to do after `live`, but a thread may still import or start vLLM, and Python would wait for it.
    Signals that come late do not change the exit code."""
    failure: Exception | None = None
    try:
        await live(config, slot)
    except Exception as error:
        failure = error
    for number in STOPPERS:
        signal.signal(number, signal.SIG_IGN)
    code = exit_code(slot.name, failure) if failure else 0
    timer = threading.Timer(END_WITHIN, _end, [code])
    timer.daemon = True
    timer.start()
    return code


def _end(code: int) -> None:
    """Multiprocessing's resource tracker cleans up behind the others, and ends by itself."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not any("resource_tracker" in part for part in process.cmdline()):
                process.kill()
    os._exit(code)
