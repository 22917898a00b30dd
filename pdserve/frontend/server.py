"""The frontend: an HTTP server on the port that all frontends of this machine share, and what it does in each part of
its life (`process/life.py`)."""

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any, Self

import httpx
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from pdserve import queue, registry, stream
from pdserve.config.host import installed_vllm
from pdserve.config.schema import Config, FrontendConfig
from pdserve.credentials import Credentials
from pdserve.errors import QueueUnavailable
from pdserve.frontend.app import GRACE, FrontendApp
from pdserve.frontend.auth import KeySource
from pdserve.frontend.model import ModelContext
from pdserve.frontend.models import serve_models
from pdserve.frontend.pages import MetricsPage
from pdserve.frontend.sockets import ClientConnections, accept_all, bind
from pdserve.messages import Load
from pdserve.plan.slots import Slot
from pdserve.process.life import Service
from pdserve.process.presence import Presence, new_instance_id, registered_skew
from pdserve.records import Instance, Role
from pdserve.registry.view import RegistryView
from pdserve.tasks import Owner

logger = logging.getLogger(__name__)

LOAD_WITHIN = 60.0
"""seconds that a frontend beside others takes to load its models before it takes requests nevertheless"""
CLOCK_WITHIN = 3.0
"""seconds that NATS gets to tell its time"""


class Frontend(Service):
    @classmethod
    def connect(cls, config: Config, slot: Slot, metrics_url: str) -> Self:
        return cls(config, slot, new_instance_id(slot), metrics_url)

    async def start(self, stack: AsyncExitStack) -> None:
        """Raises ConfigError where the port or the API keys cannot be used."""
        config, frontend = self._config, self._config.frontend
        assert frontend is not None, f"{config.path} has no section for a frontend"
        assert config.etcd is not None
        assert config.nats is not None
        self._keys = KeySource(config.security.api_keys)
        credentials = Credentials.load(config.security.credentials)
        self._socket = stack.enter_context(bind(frontend.host, frontend.port))
        connection = await stack.enter_async_context(
            registry.connect(config.etcd, config.namespace, patient=True)
        )
        view = await stack.enter_async_context(RegistryView(connection))
        context = self._model_context(frontend, config.nats, credentials)
        models = await stack.enter_async_context(
            serve_models(view, context, config.served_model_name, frontend)
        )
        client = await stack.enter_async_context(httpx.AsyncClient())
        if view.instances(Role.FRONTEND):  # they answer on this port meanwhile
            with suppress(TimeoutError):
                await asyncio.wait_for(models.settled(), LOAD_WITHIN)
        self._models = models
        self._presence = Presence(connection, self._instance(await _clock_skew(config.nats)), None)
        page = MetricsPage(view, self.id, client)
        app = FrontendApp(models, page, self._keys.keys, config.request_timeout, frontend.max_request_timeout)
        self._connections = ClientConnections(frontend.header_timeout, frontend.write_timeout)
        self._server = QuietServer(
            http_config(app, self._connections, config.drain_timeout), self._connections
        )

    def permanent(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._connections.watch(), self._keys.follow()]

    def load(self) -> Load:
        return self._models.report()

    async def announce(self) -> None:
        self._serving = self.tasks.create_task(self._serve_http(), name="uvicorn")
        await self._presence.announce()
        logger.info("listening on %s", self._presence.instance.address)

    async def _serve_http(self) -> None:
        await self._server.serve(sockets=[self._socket])
        if not self.draining:
            raise RuntimeError("the HTTP server ended by itself")

    async def drain(self) -> None:
        """Stop accepting, and let running requests finish within the drain timeout."""
        logger.info("stopping: running requests may finish")
        self._connections.draining = True
        self._server.should_exit = True
        await self._presence.leave()
        await self._serving
        logger.info("stopped")

    def _model_context(
        self, frontend: FrontendConfig, nats: str, credentials: Credentials | None
    ) -> ModelContext:
        config, serial = self._config, itertools.count(1)
        return ModelContext(
            # a name of its own for each connection: a worker takes a second connection of the same name for the
            # successor of the first, and while a model's card changes there are two
            connect=lambda address: stream.connect(address, f"{self.id}.{next(serial)}", credentials),
            blobs=queue.connect_blobs(nats, config.namespace),
            state_dir=config.state_dir,
            router=frontend.router,
            request_timeout=config.request_timeout,
            longest=max(config.request_timeout, frontend.max_request_timeout) + 2 * GRACE,
        )

    def _instance(self, clock_skew: float | None) -> Instance:
        return Instance(
            id=self.id,
            role=self._slot.role,
            address=f"http://{self._config.host}:{self._socket.getsockname()[1]}",
            metrics=self._metrics_url,
            host=self._config.host,
            pid=os.getpid(),
            vllm_version=installed_vllm().version,
            clock_skew=clock_skew,
        )


async def _clock_skew(nats: str) -> float | None:
    with suppress(QueueUnavailable, TimeoutError):
        async with asyncio.timeout(CLOCK_WITHIN):
            return registered_skew(await queue.clock_skew(nats), None)
    return None


def cross_origin(app: ASGIApp) -> ASGIApp:
    """Browsers may ask from anywhere, as with vLLM's own server."""
    return CORSMiddleware(app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])


class QuietServer(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again at the end, and the exit code would not be 0. Connections are
    accepted together: uvloop accepts one in each turn of its loop, and where tokens make turns long, requests would
    wait in the kernel's queue, neither admitted nor refused."""

    def __init__(self, config: uvicorn.Config, connections: ClientConnections) -> None:
        super().__init__(config)
        self._listening: Sequence[socket.socket] = ()
        self._accepting = Owner()
        connections.on_open = self._accept_waiting

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._listening = sockets or ()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take also the connections that the kernel has made and this process has not accepted yet: closing the
        listening socket would reset them."""
        late = [self._take(sock) for sock in accept_all(sockets or ())]
        async with self._accepting:
            end, *_ = await asyncio.gather(super().shutdown(sockets), *late, return_exceptions=True)
        if isinstance(end, BaseException):
            raise end

    def _accept_waiting(self) -> None:
        for sock in accept_all(self._listening):
            self._accepting.start(self._take(sock), "accept")

    async def _take(self, sock: socket.socket) -> None:
        with suppress(OSError):  # it is gone already
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, sock)

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def http_config(app: ASGIApp, connections: ClientConnections, drain_timeout: float) -> uvicorn.Config:
    return uvicorn.Config(
        cross_origin(app),
        http=connections,  # type: ignore[arg-type]  # any callable that makes a protocol
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # a client on this host could pass for many
        timeout_keep_alive=65,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
    )
