import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from starlette.types import ASGIApp

from pdserve.config.engine_args.installed import installed_vllm
from pdserve.config.schema import AdmissionLimits
from pdserve.contract.live_settings import slo_settings
from pdserve.contract.records import ModelCard, Role, encode_record
from pdserve.contract.reports import ProcessReport
from pdserve.contract.slo import NO_SLO, SloTargets
from pdserve.frontend.app import FrontendApp
from pdserve.frontend.edge.certificate_reload import RenewedCertificate
from pdserve.frontend.edge.connections import ClientConnections
from pdserve.frontend.edge.sockets import bind
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.model import ModelContext
from pdserve.frontend.model.processor import Processor
from pdserve.frontend.model.served_models import ServedModels, serve_models
from pdserve.frontend.plugins import PLUGINS, PluginContext, Plugins
from pdserve.frontend.server import QuietServer, http_config
from pdserve.frontend.vllm.lora_adapters import AdapterStore
from pdserve.observe.tracing import Tracer
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from pdserve.security.certificate import ServerCertificate
from pdserve.security.credentials import Credentials
from pdserve.stream.archives import archive_name
from pdserve.stream.tcp import TcpStreamClient
from tests.conditions import until
from tests.frontend.model.echo import EchoWorker
from tests.memory.registry import MemoryRegistry, MemoryServer
from tests.uvloops import Loop

VERSION = installed_vllm().version
MODEL = Path(__file__).parents[2] / "pdserve" / "demo" / "model"


in_session = pytest.mark.asyncio(loop_scope="session")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Frontends run on uvloop, whose transports differ from asyncio's, above all with TLS."""
    return {"uvloop": Loop}


def pytest_configure(config: pytest.Config) -> None:
    # vLLM's own code causes this warning
    config.addinivalue_line("filterwarnings", "ignore:max_tokens is deprecated:DeprecationWarning")


def card(name: str = "demo", **changes: object) -> ModelCard:
    args = {"max-model-len": 4096, "max-num-seqs": 8, "enforce-eager": True, "kv-cache-dtype": "auto"}
    fields: dict[str, object] = {
        "name": name,
        "model": str(MODEL),
        "engine_args": args,
        "max_model_len": 4096,
        "vllm_version": VERSION,
        "created": 1700000000,
    }
    return ModelCard(**{**fields, **changes})  # type: ignore[arg-type]


class Graph:
    """A frontend in this process, on a real port, with decode workers without engines (`EchoWorker`)."""

    def __init__(self, id: str = "frontend-0-test", registry: MemoryServer | None = None) -> None:
        """For a second frontend of the same graph, `registry` is that of the first."""
        self.id, self.registry = id, registry or MemoryServer()
        self._count = 0
        self.models: ServedModels
        self.context: PluginContext
        self.plugins: Plugins
        self.app: FrontendApp
        self.url = ""
        self.http: httpx.AsyncClient
        """an HTTP client that asks this frontend"""

    async def start(self, stack: AsyncExitStack, state: Path, tracer: Tracer | None = None) -> None:
        enter, serial = stack.enter_async_context, itertools.count()
        registry = await enter(MemoryRegistry(self.registry))
        view = await enter(RegistryView(registry))
        context = ModelContext(
            lambda address: TcpStreamClient(address, f"{self.id}.{next(serial)}"),
            state,
            "round-robin",
            20.0,
            adapters=AdapterStore(registry, view),
        )
        self.models = await enter(serve_models(view, context, "demo", AdmissionLimits()))
        http = await enter(httpx.AsyncClient(trust_env=False))
        self.context = PluginContext(
            self.id,
            "demo",
            self.models,
            ApiKeys(),
            view,
            http,
            lambda: self.watched,
            tracer or Tracer(),
        )
        self.plugins = Plugins.load(self.context)
        self.app = FrontendApp(self.models, self.context.keys, self.plugins, 20.0)
        self.url = await serve(self.app, stack)
        self.http = await enter(httpx.AsyncClient(base_url=self.url, timeout=30))

    @property
    def watched(self) -> ProcessReport:
        return self.plugins.add_to_report(ProcessReport())

    def processor(self, model: str = "demo") -> Processor:
        found = self.models.find(model).processor
        assert found is not None
        return found

    def app_with(self, keys: ApiKeys, plugins: Iterable[str] = PLUGINS) -> FrontendApp:
        """Return another app of the same models, with these keys and plugins."""
        context = replace(self.context, keys=keys, running={})
        return FrontendApp(self.models, keys, Plugins.load(context, plugins), 20.0)

    @asynccontextmanager
    async def worker(
        self,
        model: str = "demo",
        *,
        connected: bool = True,
        generation: int = 0,
        args: Mapping[str, object] = MappingProxyType({}),
        slo: SloTargets = NO_SLO,
        role: Role = Role.DECODE,
        **options: Any,
    ) -> AsyncIterator[EchoWorker]:
        """Yield a registered worker. If `connected`, first wait until the frontend has connected. On exit, kill the
        worker and end its lease. `options`: fields of EchoWorker. With `archive`, the model is on another host."""
        self._count += 1
        worker = EchoWorker(f"{role.value}-0-{self._count:04}", model, role=role, **options)
        served = card(model, fingerprint=worker.loaded, generation=generation)
        served = msgspec.structs.replace(served, engine_args={**served.engine_args, **args})
        if worker.archive:
            blob = archive_name(worker.archive)
            served = msgspec.structs.replace(served, model="/elsewhere/model", blob=blob)
        async with worker, MemoryRegistry(self.registry) as registry:
            worker.instance = msgspec.structs.replace(worker.instance, settings=slo_settings(slo))
            await registry.put(keys.card(model, worker.id), encode_record(served))
            await registry.put(keys.instance(worker.instance), encode_record(worker.instance))
            if connected:
                await worker.until(lambda: worker.hello)
            yield worker


async def serve(
    app: ASGIApp,
    stack: AsyncExitStack,
    connections: ClientConnections | None = None,
    certificate: RenewedCertificate | None = None,
) -> str:
    connections = connections or ClientConnections(30.0, 30.0)
    server = QuietServer(http_config(app, connections, 1.0), connections, certificate)
    sock = stack.enter_context(bind("127.0.0.1", 0))
    port = sock.getsockname()[1]
    task = asyncio.create_task(server.serve(sockets=[sock]))
    watching = asyncio.create_task(connections.watch())
    await until(lambda: server.started)

    async def stop() -> None:
        server.should_exit = True
        await task
        watching.cancel()

    stack.push_async_callback(stop)
    return f"{'https' if certificate else 'http'}://127.0.0.1:{port}"


def address_of(url: str) -> tuple[str, int]:
    parts = httpx.URL(url)
    assert parts.port is not None
    return parts.host, parts.port


@asynccontextmanager
async def running_graph(state: Path) -> AsyncIterator[Graph]:
    graph = Graph()
    async with AsyncExitStack() as stack:
        await graph.start(stack, state)
        yield graph


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def graph(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Graph]:
    async with running_graph(tmp_path_factory.mktemp("state")) as graph:
        yield graph


@pytest.fixture(scope="session")
def certificate(credentials: Credentials) -> ServerCertificate:
    return ServerCertificate(credentials.certificate, credentials.key)


def trusting(certificate: ServerCertificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate.chain.with_name("ca.pem"))


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def either(request: pytest.FixtureRequest, certificate: ServerCertificate) -> ServerCertificate | None:
    """The certificate for a server that speaks TLS, or None for one that does not."""
    return certificate if request.param else None
