"""A frontend process: uvicorn on the shared port, registered, until SIGTERM."""

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress

import httpx
import msgspec
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from pdserve.config.host import installed_vllm
from pdserve.config.schema import Config
from pdserve.errors import QueueUnavailable, RegistryUnavailable
from pdserve.frontend.app import GRACE, FrontendApp
from pdserve.frontend.auth import load_keys
from pdserve.frontend.model import ModelContext
from pdserve.frontend.models import ServedModels, serve_models
from pdserve.frontend.pages import MetricsPage
from pdserve.frontend.sockets import ClientConnections, accept_all, bind
from pdserve.messages import Instance, Role
from pdserve.observe.metrics import serve_metrics
from pdserve.plan.slots import Slot
from pdserve.process.identity import new_instance_id
from pdserve.process.presence import Presence, described
from pdserve.process.run import run_until_signalled
from pdserve.queue.base import BlobStore
from pdserve.queue.jetstream import connect_blobs
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.etcd import connect as connect_registry
from pdserve.registry.view import RegistryView
from pdserve.stream import connect as connect_stream
from pdserve.tasks import forever

logger = logging.getLogger(__name__)

LOAD_WITHIN = 60.0
"""seconds that a frontend beside others takes to load its models before it takes requests nevertheless"""

CLOCK_WITHIN = 3.0
"""seconds that NATS gets to tell its time"""


class Frontend:
    """`run` is its whole life; `stop` asks it to drain and return."""

    def __init__(self, config: Config, slot: Slot) -> None:
        self.ready = asyncio.Event()
        self._config, self._slot = config, slot
        self._stop = asyncio.Event()

    def stop(self) -> None:
        self.ready.clear()
        self._stop.set()

    async def run(self) -> None:
        """After `stop`, stop accepting, let running requests finish within `drain_timeout`, and return. Raises
        ConfigError where the port or the API keys cannot be used."""
        config, frontend = self._config, self._config.frontend
        assert frontend is not None, f"{config.path} has no section for a frontend"
        assert config.etcd is not None
        api_keys = load_keys()
        async with AsyncExitStack() as stack:
            sock = stack.enter_context(bind(frontend.host, frontend.port))
            me = _describe(config, self._slot, sock, stack.enter_context(serve_metrics(config.host)))
            registry = await stack.enter_async_context(
                connect_registry(config.etcd, config.namespace, patient=True)
            )
            view = await stack.enter_async_context(RegistryView(registry))
            around = _surroundings(config, frontend.router, me.id)
            roster = await stack.enter_async_context(
                serve_models(view, around, config.served_model_name, frontend)
            )
            client = await stack.enter_async_context(httpx.AsyncClient())
            if view.instances(Role.FRONTEND):
                await _load_models(roster)
            me = msgspec.structs.replace(me, clock_skew=await _clock_skew(around.blobs))
            page = MetricsPage(view, me.id, client)
            edge = FrontendApp(roster, page, api_keys, config.request_timeout, frontend.max_request_timeout)
            connections = ClientConnections(frontend.header_timeout, frontend.write_timeout)
            presence = Presence(registry, me, None, roster.report)
            await self._serve(edge, connections, sock, registry, presence)

    async def _serve(
        self,
        edge: FrontendApp,
        connections: ClientConnections,
        sock: socket.socket,
        registry: Registry,
        presence: Presence,
    ) -> None:
        server = QuietServer(_options(edge, connections, self._config.drain_timeout))
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(connections.watch(), name="connections")
            serving = tasks.create_task(server.serve(sockets=[sock]), name="uvicorn")
            telling = tasks.create_task(forever(presence.keep_current, "load report"))
            stopper = tasks.create_task(self._stop_server(server, connections, registry, presence, telling))
            self.ready.set()
            await presence.announce()
            logger.info("listening on %s", presence.instance.address)
            await serving
            stopper.cancel()
            watching.cancel()
            telling.cancel()
        logger.info("stopped")

    async def _stop_server(
        self,
        server: uvicorn.Server,
        connections: ClientConnections,
        registry: Registry,
        presence: Presence,
        telling: "asyncio.Task[None]",
    ) -> None:
        await self._stop.wait()
        logger.info("stopping: running requests may finish")
        connections.draining = True
        server.should_exit = True
        telling.cancel()  # it would register it again
        await asyncio.wait([telling])
        with suppress(RegistryUnavailable):
            await registry.delete(keys.instance(presence.instance))


async def main(config: Config, slot: Slot) -> None:
    """The process. Returns after SIGTERM and the drain; raises ConfigError."""
    await run_until_signalled(Frontend(config, slot), config.drain_timeout)


async def _load_models(roster: ServedModels) -> None:
    """Others answer on this port meanwhile: whoever came to us would wait for all of our start."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LOAD_WITHIN):
            await roster.settled()


def _surroundings(config: Config, router: str, me: str) -> ModelContext:
    assert config.nats is not None
    assert config.frontend is not None
    serial = itertools.count(1)
    return ModelContext(
        # a name of its own for each connection: a worker takes a second one of the same name for the first
        # one's successor, and while a model's card changes there are two
        connect=lambda address: connect_stream(address, f"{me}.{next(serial)}"),
        blobs=connect_blobs(config.nats, config.namespace),
        state_dir=config.state_dir,
        router=router,
        request_timeout=config.request_timeout,
        longest=max(config.request_timeout, config.frontend.max_request_timeout) + 2 * GRACE,
    )


def _describe(config: Config, slot: Slot, sock: socket.socket, metrics: str) -> Instance:
    return Instance(
        id=new_instance_id(slot),
        role=slot.role,
        address=f"http://{config.host}:{sock.getsockname()[1]}",
        metrics=metrics,
        host=config.host,
        pid=os.getpid(),
        vllm_version=installed_vllm().version,
    )


async def _clock_skew(blobs: BlobStore) -> float | None:
    with suppress(QueueUnavailable, TimeoutError):
        async with asyncio.timeout(CLOCK_WITHIN):
            return described(await blobs.clock_skew(), None)
    return None


def cross_origin(app: ASGIApp) -> ASGIApp:
    """Browsers may ask from anywhere, as with vLLM's own server."""
    return CORSMiddleware(app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])


class QuietServer(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again at the end, and the exit code would not be 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take also the connections that the kernel has made and this process has not accepted yet: closing the
        listening socket would reset them."""
        loop = asyncio.get_running_loop()
        late = [loop.connect_accepted_socket(self._protocol, sock) for sock in accept_all(sockets or ())]
        end, *_ = await asyncio.gather(super().shutdown(sockets), *late, return_exceptions=True)
        if isinstance(end, BaseException):
            raise end

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def _options(edge: FrontendApp, connections: ClientConnections, drain_timeout: float) -> uvicorn.Config:
    return uvicorn.Config(
        cross_origin(edge),
        http=connections,  # type: ignore[arg-type]  # any callable that makes a protocol
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
    )
