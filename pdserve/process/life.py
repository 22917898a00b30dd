"""The life cycle of a process of the graph: start, warm up, announce, serve, drain, end. `run` is the whole process,
and `Service` the part that differs by role."""

import asyncio
import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib import import_module
from typing import Any

import psutil
import uvloop

from pdserve.config.schema import Config
from pdserve.contract.reports import OutageTracker, ProcessReport, Receipt
from pdserve.observe.metrics import CERTIFICATE_END, CONNECTED
from pdserve.observe.process_pages import serve_pages
from pdserve.observe.tracing import Tracer
from pdserve.plan.graph import service_of
from pdserve.plan.slots import Slot
from pdserve.process.signals import DRAINS, ENGINE_KILLED, SERVES, STARTS, STOPPERS, SUPERVISOR_DIED, Stops
from pdserve.runtime.tasks import TaskOwner, Work, forever, process_owner
from pdserve.security.credentials import Credentials, valid_until
from pdserve.util.errors import ConfigError, EngineDead, PdserveError, find_engine_death, leaf_errors
from pdserve.util.ticks import tick

logger = logging.getLogger(__name__)
Beat = Callable[[bytes], None]
"""Gets heartbeats: STARTS, SERVES or DRAINS."""

AT_ONCE = 1.5
"""Seconds for a role to close its connections when it ends without a drain."""
LAST_RESORT = 15.0
"""After three drain timeouts and these seconds, a role whose supervisor died drains by itself: the guardian must have
died, too."""
BEAT = 1.0
"""Seconds between two heartbeats."""
FAILED_WITHIN = 15.0
"""Seconds for a failed service to send its last messages and end its engine processes."""
END_WITHIN = 1.0
"""Seconds for which a process may still run after the end of its work."""


class Service(ABC):
    """The work of one process. `run` calls `start`, `permanent`, `warm_up` and `announce`, in this order. `stop`
    makes it call `drain` and return."""

    def __init__(self, config: Config, slot: Slot, instance_id: str, metrics_url: str) -> None:
        self.id = instance_id
        self.ready = asyncio.Event()
        """Set while requests may arrive: from just before the announcement until `stop`."""
        self.draining = False
        self.fault = ""
        """Why the process cannot serve though it responds: its engine hangs or is dead, or the process is ending."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called when a failure ends the service."""
        self.tasks: asyncio.TaskGroup
        """Tasks of requests and of permanent work; exists from the call of `permanent` to the end of `drain`."""
        self.tracer = Tracer()
        self.connections = OutageTracker()
        self._config = config
        self._slot = slot
        self._metrics_url = metrics_url
        self._stop = asyncio.Event()
        self._announced = False

    def stop(self) -> None:
        self._stop.set()

    def depends_on(self, server: str, url: str | None, connected: Callable[[], bool]) -> None:
        """Show the connection to `NATS` or `etcd` on this process's pages and in its metrics."""
        self.connections.add(server, url or "", connected)
        CONNECTED.labels(server).set_function(connected)

    def unready(self) -> str:
        """Why this process should get no requests; empty if it should."""
        if self.draining:
            return "it is draining"
        return self.fault or ("" if self._announced else "it is starting")

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task whose failure ends the service. Raises RuntimeError if the service is ending."""
        try:
            self.tasks.create_task(work)
        except RuntimeError:
            work.close()  # Python would warn that it was never awaited
            raise

    async def run(self) -> None:
        """Serve until `stop`, then drain. Errors of `start` are raised as they are. Later, it raises EngineDead (after
        a call of `engine_died`) or a group with other errors. No background task outlives it."""
        async with process_owner(), AsyncExitStack() as stack:
            await self.start(stack)
            if endpoint := self._config.otlp_endpoint:
                service = f"pdserve-{self._slot.role.value}"
                await stack.enter_async_context(self.tracer.exporting(endpoint, service, self.id))
            try:
                async with asyncio.TaskGroup() as self.tasks:
                    try:
                        await self._serve()
                    except BaseException:  # usually the group's cancellation after a task failed
                        self._fail("it ends")
                        raise
            except BaseExceptionGroup as failures:
                if death := find_engine_death(failures):
                    await self.engine_died(death)
                    raise death from failures
                raise

    async def _serve(self) -> None:
        permanent = [
            self.tasks.create_task(forever(work, name))
            for name, work in {"outages": self.connections.follow, **self.permanent()}.items()
        ]
        for task in permanent:
            task.add_done_callback(self._note_death)
        await self.warm_up()
        self.ready.set()
        await self.announce()
        self._announced = True
        await self._stop.wait()
        self.draining = True
        self.ready.clear()
        await self.drain()
        for task in permanent:
            task.cancel()

    def _note_death(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (death := task.exception()):
            self._fail(str(death))

    def _fail(self, why: str) -> None:
        self.fault = self.fault or why
        self.on_failure()

    @abstractmethod
    async def start(self, stack: AsyncExitStack) -> None:
        """Enter all resources on `stack`, which is left at the end."""

    @abstractmethod
    def permanent(self) -> Mapping[str, Work]:
        """By name: work that goes on until the drain is over. It is restarted when it fails or returns; only EngineDead
        ends the service."""

    async def warm_up(self) -> None:
        """Prepare for the first request."""
        return

    @abstractmethod
    async def announce(self) -> None:
        """Register this process, so that others send requests."""

    @abstractmethod
    async def drain(self) -> None:
        """Take no new requests, and finish the running ones within the drain timeout."""

    def watched(self) -> ProcessReport:
        """The state for this process's pages. Roles may raise AttributeError before `start`."""
        return ProcessReport()

    def receipts(self, limit: int, key: str | None, request_id: str) -> list[Receipt]:
        """Receipts of running and finished requests, newest first: of the API key named `key` (None: of all), and of
        `request_id` (empty: of all)."""
        return []

    async def engine_died(self, death: EngineDead) -> None:
        """Report the requests and KV that are lost with the engine, while the connections are still open."""
        return


# the process


def run(config: Config, slot: Slot, beat: Beat | None = None) -> int:
    """Run this slot of the graph; return the exit code."""
    os.environ.update(slot.env)  # before vLLM is imported
    return uvloop.run(_live_to_the_end(config, slot, beat))


def exit_code(name: str, error: Exception) -> int:
    """Log why the role ended, without a traceback for pdserve's own errors. Return its exit code: 2 for a wrong
    configuration, `ENGINE_KILLED`, or 1."""
    causes = leaf_errors(error)
    if problems := [problem for leaf in causes if isinstance(leaf, ConfigError) for problem in leaf.problems]:
        for problem in problems:
            logger.error("%s", problem)
        return 2
    if dead := find_engine_death(error):
        logger.error("engine process died; exiting: %s", dead)
        return ENGINE_KILLED if dead.killed else 1
    if all(isinstance(leaf, PdserveError) for leaf in causes):
        logger.error("%s failed: %s", name, "; ".join(map(str, causes)))
    else:
        logger.error("%s failed", name, exc_info=error)
    return 1


async def live(config: Config, slot: Slot, beat: Beat | None = None) -> None:
    """Run one role in this event loop; returns and raises like `live_until_signalled`."""
    module, _, name = service_of(slot, config).partition(":")
    connect: Callable[[Config, Slot, str], Service] = getattr(import_module(module), name).connect
    with serve_pages(config.host, slot.pages_port) as pages:
        service = connect(config, slot, pages.metrics)
        if credentials := Credentials.load(config.security.credentials):
            CERTIFICATE_END.labels("graph").set(valid_until(credentials.certificate).timestamp())
        pages.watched, pages.receipts = service.watched, service.receipts
        pages.fault, pages.unready = lambda: service.fault, service.unready
        async with TaskOwner() as tasks:
            if beat:
                tasks.forever(partial(send_heartbeats, service, beat), "heartbeats")
            await live_until_signalled(service, config.drain_timeout)


async def send_heartbeats(service: Service, beat: Beat) -> None:
    """Call `beat` with the service's phase every `BEAT` seconds while it has no fault."""
    while True:
        if not service.fault:
            beat(DRAINS if service.draining else STARTS if service.unready() else SERVES)
        await tick(BEAT)


async def live_until_signalled(service: Service, drain_timeout: float) -> None:
    """Run the service. The first signal of `STOPPERS` drains it. The second ends it at once, and so does the first if
    the service is not ready or has failed. Raises the service's errors, and PdserveError if the service failed but does
    not end."""
    life = asyncio.create_task(service.run())
    over = asyncio.Event()
    life.add_done_callback(lambda _: over.set())
    stops = Stops()

    def stop(number: signal.Signals) -> None:
        if not stops.adds(number):
            return
        again = stops.count > 1
        if (service.ready.is_set() or service.draining) and not again and not service.fault:
            service.stop()
        else:
            why = "second signal" if again else service.fault or "stopped while starting"
            logger.info("%s: ending at once", why)
            life.cancel()
            loop.call_later(AT_ONCE, over.set)

    def orphaned() -> None:
        logger.error("supervisor died; waiting for its guardian to stop the graph")
        stops.count = 0  # the guardian repeats the supervisor's signal
        loop.call_later(3 * drain_timeout + LAST_RESORT, stop, signal.SIGTERM)

    loop = asyncio.get_running_loop()
    service.on_failure = lambda: loop.call_later(FAILED_WITHIN, over.set)
    for number in STOPPERS:
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(SUPERVISOR_DIED, orphaned)
    try:
        await over.wait()
        if life.done() and not life.cancelled():
            life.result()
        elif service.fault and not stops.count:
            raise PdserveError(f"{service.fault}; it did not end within {FAILED_WITHIN:g} s")
    finally:
        life.cancel()
        for number in (*STOPPERS, SUPERVISOR_DIED):
            loop.remove_signal_handler(number)


async def _live_to_the_end(config: Config, slot: Slot, beat: Beat | None) -> int:
    """Run `live`, and end the process soon after it, because Python would wait for a thread that still imports or
    starts vLLM. Late signals do not change the exit code."""
    failure: Exception | None = None
    try:
        await live(config, slot, beat)
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
    """Kill all child processes except multiprocessing's resource tracker, which removes their shared memory and ends by
    itself; then end this process."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not any("resource_tracker" in part for part in process.cmdline()):
                process.kill()
    os._exit(code)
