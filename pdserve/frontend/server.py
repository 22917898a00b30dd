"""The frontend process: start, serve HTTP, drain (`process/life.py`). All frontends of a machine share a port."""

import asyncio
import itertools
import logging
import os
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Self

import httpx
import uvicorn
from starlette.types import ASGIApp

from pdserve import registry
from pdserve.config.engine_args.installed import installed_vllm
from pdserve.config.schema import Config, FrontendConfig
from pdserve.contract.records import Instance, Role
from pdserve.contract.reports import ProcessReport, Receipt
from pdserve.frontend.app import FrontendApp
from pdserve.frontend.edge.certificate_reload import RenewedCertificate
from pdserve.frontend.edge.connections import FIRST_REQUEST_WITHIN, ClientConnection, ClientConnections
from pdserve.frontend.edge.sockets import accept_all, bind, ignore_new_clients
from pdserve.frontend.keys.auth import KeySource
from pdserve.frontend.keys.origins import CrossOrigin
from pdserve.frontend.model import ModelContext
from pdserve.frontend.model.run import GRACE
from pdserve.frontend.model.served_models import serve_models
from pdserve.frontend.plugins import PluginContext, Plugins
from pdserve.frontend.vllm.lora_adapters import AdapterStore
from pdserve.observe.metrics import CONNECTIONS_CLOSED
from pdserve.plan.slots import Slot
from pdserve.process.life import Service
from pdserve.process.presence import Presence, new_instance_id
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import TaskOwner, Work
from pdserve.security.certificate import ServerCertificate
from pdserve.security.credentials import Credentials
from pdserve.stream.tcp import TcpStreamClient
from pdserve.util.net import url_host

logger = logging.getLogger(__name__)

LOAD_WITHIN = 300.0
"""Maximum of seconds to wait for the models before serving, if other frontends serve meanwhile."""
SHUTDOWN_WITHIN = 3600.0
"""Seconds for a TLS shutdown; long, because `ClientConnections.watch` aborts blocked connections."""
OTHER_FILES = 256
"""File descriptors kept for workers, etcd and logs."""
EXHAUSTED = 1.0
"""Seconds without accepting after file descriptors or memory ran out."""
HANDSHAKE_WITHIN = 0.2
"""Seconds for which a stopping server still accepts connections whose TCP handshake had begun: some round trips."""
KEEP_ALIVE = 125
"""Seconds that an idle connection stays open: longer than in clients (httpx 5) and reverse proxies (nginx 60, Traefik
90, Caddy 120), because a server that closes first loses a request that was just sent."""


class Frontend(Service):
    @classmethod
    def connect(cls, config: Config, slot: Slot, metrics_url: str) -> Self:
        return cls(config, slot, new_instance_id(slot), metrics_url)

    async def start(self, stack: AsyncExitStack) -> None:
        """Raises ConfigError if the port, the certificate or the API keys are unusable."""
        config, frontend = self._config, self._config.frontend
        assert frontend is not None, f"{config.path} has no section for a frontend"
        assert config.etcd is not None
        self._keys = KeySource(config.security.api_keys)
        credentials = Credentials.load(config.security.credentials)
        files = ServerCertificate.of(config.security.tls_certificate, config.security.tls_key)
        self._certificate = RenewedCertificate(files) if files else None
        self._socket = stack.enter_context(bind(frontend.host, frontend.port))
        connection = await stack.enter_async_context(
            registry.connect(config.etcd, config.namespace, credentials, patient=True)
        )
        self.depends_on("etcd", config.etcd, lambda: connection.connected)
        self._presence = Presence(connection, self._instance(), None)
        await self._presence.wait_until_compatible()
        view = await stack.enter_async_context(RegistryView(connection))
        self._keys.keys.ledger.frontends = lambda: len(view.instances(Role.FRONTEND))
        context = self._model_context(frontend, credentials, AdapterStore(connection, view))
        models = await stack.enter_async_context(
            serve_models(view, context, config.served_model_name, frontend)
        )
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        if view.instances(Role.FRONTEND):  # the other frontends serve this port meanwhile
            with suppress(TimeoutError):
                await asyncio.wait_for(models.settled(), LOAD_WITHIN)
        self._models, self._view = models, view
        keys, model = self._keys.keys, config.served_model_name
        self._plugins = plugins = Plugins.load(
            PluginContext(
                self.id,
                model,
                models,
                keys,
                view,
                client,
                self.watched,
                self.tracer,
                app=lambda: app,
                config=frontend,
                draining=lambda: self.draining,
                outages=self.connections.outages,
            )
        )
        app = FrontendApp(models, keys, plugins, config.request_timeout, frontend.max_request_timeout)
        edge = CrossOrigin(
            app,
            keys,
            frontend.allowed_origins,
            host=frontend.host,
            open_paths=plugins.open_paths | plugins.local_paths,
        )
        files_left = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES
        self._connections = ClientConnections(
            frontend.header_timeout,
            frontend.write_timeout,
            most=max(1, min(frontend.max_connections, files_left)),
        )
        self._server = QuietServer(
            http_config(edge, self._connections, config.drain_timeout), self._connections, self._certificate
        )

    def permanent(self) -> Mapping[str, Work]:
        return {
            "client connections": self._connections.watch,
            "API keys": self._keys.follow,
            **self._plugins.work,
            **({"certificate": self._certificate.watch} if self._certificate else {}),
        }

    def watched(self) -> ProcessReport:
        own = ProcessReport(
            self._models.report(),
            self._models.links(),
            outages=self.connections.outages(),
            gone=self._view.lost_processes(),
        )
        return self._plugins.add_to_report(own)

    def receipts(self, limit: int, key: str | None, request_id: str) -> list[Receipt]:
        return self._plugins.receipts(limit, key, request_id)

    async def announce(self) -> None:
        self._serving = self.tasks.create_task(self._serve_http(), name="uvicorn")
        await self._presence.announce()
        logger.info("listening on %s", self._presence.instance.address)

    async def _serve_http(self) -> None:
        await self._server.serve(sockets=[self._socket])
        if not self.draining:
            raise RuntimeError("the HTTP server ended by itself")

    async def drain(self) -> None:
        """Stop accepting; let running requests finish within the drain timeout."""
        logger.info("stopping: running requests may finish")
        self._connections.draining = True
        self._server.should_exit = True
        await self._presence.drain()  # so that other frontends do not report this one as lost
        await self._presence.leave()
        await self._serving
        logger.info("stopped")

    def _model_context(
        self, frontend: FrontendConfig, credentials: Credentials | None, adapters: AdapterStore
    ) -> ModelContext:
        config, serial = self._config, itertools.count(1)
        return ModelContext(
            # each connection has its own name, because a worker closes an earlier one of the same name; two exist
            # while a model's card changes
            connect=lambda address: TcpStreamClient(address, f"{self.id}.{next(serial)}", credentials),
            state_dir=config.state_dir,
            router=frontend.router,
            request_timeout=config.request_timeout,
            max_request_seconds=max(config.request_timeout, frontend.max_request_timeout) + 2 * GRACE,
            adapters=adapters,
        )

    def _instance(self) -> Instance:
        config, frontend = self._config, self._config.frontend
        assert frontend is not None
        host = url_host(frontend.host, config.host)
        return Instance(
            id=self.id,
            role=self._slot.role,
            address=f"{config.scheme}://{host}:{self._socket.getsockname()[1]}",
            metrics=self._metrics_url,
            host=config.host,
            pid=os.getpid(),
            vllm_version=installed_vllm().version,
            settings={"router": frontend.router},
        )


class QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals alone and accepts connections itself.

    uvicorn would raise a signal again at the end, and the exit code would not be 0. uvloop accepts one connection per
    turn of its loop, so requests would wait in the kernel, neither admitted nor refused.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        connections: ClientConnections,
        certificate: RenewedCertificate | None = None,
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._certificate = certificate
        self._listening: Sequence[socket.socket] = ()
        self._accepting = TaskOwner()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen without asyncio's servers, unlike uvicorn."""
        self.servers = []
        self._listening = sockets or ()
        for sock in self._listening:
            sock.listen(self.config.backlog)
        self._listen()
        self.started = True

    def _listen(self) -> None:
        for sock in self._listening:
            if sock.fileno() >= 0:
                asyncio.get_running_loop().add_reader(sock, self._accept)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First accept the connections that the kernel has, because closing the socket would reset them: those that
        wait in its queue, and those in the handshake."""
        for sock in self._listening:
            ignore_new_clients(sock)
        await asyncio.sleep(HANDSHAKE_WITHIN)
        self._accept()
        for sock in self._listening:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        async with self._accepting:
            await self._accepting.settle(FIRST_REQUEST_WITHIN)
        await super().shutdown(sockets)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            for sock in accept_all(self._listening):
                protocol = self._connections(self.config, self.server_state, self.lifespan.state)
                if self._connections.enter(protocol):
                    self._accepting.start(self._take(sock, protocol), "accept")
                else:
                    sock.close()
        except OSError as error:
            logger.error("accepting no connections for a second: %s", error)
            for sock in self._listening:
                loop.remove_reader(sock)
            loop.call_later(EXHAUSTED, self._listen)

    async def _take(self, sock: socket.socket, protocol: ClientConnection) -> None:
        tls = self._certificate
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=tls.context if tls else None,
                ssl_handshake_timeout=self._connections.header_timeout if tls else None,
                ssl_shutdown_timeout=SHUTDOWN_WITHIN if tls else None,
            )
        except (OSError, TimeoutError):  # the client left, or its handshake failed or timed out
            CONNECTIONS_CLOSED.labels("handshake").inc()
        finally:
            if protocol.transport is None:
                self._connections.leave(protocol)
                sock.close()


def http_config(app: ASGIApp, connections: ClientConnections, drain_timeout: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connections,  # type: ignore[arg-type]  # any callable that makes a protocol
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,  # a client on this host could pose as many clients
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
    )
