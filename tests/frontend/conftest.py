import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import uvicorn
from msgspec.structs import replace
from starlette.types import ASGIApp

from pdserve.config.host import installed_vllm
from pdserve.config.schema import AdmissionLimits
from pdserve.frontend.app import FrontendApp
from pdserve.frontend.auth import ApiKeys
from pdserve.frontend.model import ModelContext
from pdserve.frontend.models import ServedModels, serve_models
from pdserve.frontend.pages import MetricsPage
from pdserve.frontend.server import QuietServer, cross_origin
from pdserve.frontend.sockets import ClientConnections
from pdserve.queue.base import BlobStore
from pdserve.records import ModelCard, encode_record
from pdserve.registry import keys
from pdserve.registry.memory import MemoryRegistry, MemoryServer
from pdserve.registry.view import RegistryView
from pdserve.stream import connect
from tests.conditions import until
from tests.frontend.model.echo import EchoWorker

VERSION = installed_vllm().version
MODEL = Path(__file__).parents[2] / "pdserve" / "demo" / "model"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "filterwarnings", "ignore:max_tokens is deprecated:DeprecationWarning"
    )  # vLLM's own


class NoBlobs(BlobStore):
    async def put(self, name: str, data: bytes) -> None:
        raise NotImplementedError

    async def get(self, name: str) -> bytes:
        raise KeyError(name)


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
    """A frontend in this process, on a real port, with echoing decode workers."""

    def __init__(self, server: MemoryServer) -> None:
        self.registry = server
        self.models: ServedModels
        self.app: FrontendApp
        self.url = ""
        self.http: httpx.AsyncClient
        self._count = 0

    @asynccontextmanager
    async def worker(
        self,
        model: str = "demo",
        *,
        pace: float | None = 0.0,
        prefill: str = "local",
        connected: bool = True,
        at_once: int = 0,
        loaded: str = "",
        generation: int = 0,
        args: dict[str, object] | None = None,
    ) -> AsyncIterator[EchoWorker]:
        """A worker that is registered and connected; leaving kills it and its lease."""
        self._count += 1
        worker = EchoWorker(
            f"decode-0-{self._count:04}", model, pace=pace, prefill=prefill, at_once=at_once, loaded=loaded
        )
        served = card(model, fingerprint=loaded, generation=generation)
        served = replace(served, engine_args={**served.engine_args, **(args or {})})
        async with worker, MemoryRegistry(self.registry) as registry:
            await registry.put(keys.card(model, worker.id), encode_record(served))
            await registry.put(keys.instance(worker.instance), encode_record(worker.instance))
            if connected:
                await worker.until(lambda: worker.hello)
            yield worker


async def serve(app: ASGIApp, stack: AsyncExitStack, connections: ClientConnections | None = None) -> str:
    connections = connections or ClientConnections(30.0, 30.0)
    config = uvicorn.Config(
        app,
        http=connections,  # type: ignore[arg-type]
        port=0,
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = QuietServer(config, connections)
    task = asyncio.create_task(server.serve())
    watching = asyncio.create_task(connections.watch())
    await until(lambda: server.started)

    async def stop() -> None:
        server.should_exit = True
        await task
        watching.cancel()

    stack.push_async_callback(stop)
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://127.0.0.1:{port}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def graph(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Graph]:
    server = MemoryServer()
    serial = itertools.count()
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(MemoryRegistry(server))
        view = await stack.enter_async_context(RegistryView(registry))
        context = ModelContext(
            lambda address: connect(address, f"frontend-{next(serial)}"),
            NoBlobs(),
            tmp_path_factory.mktemp("state"),
            "round-robin",
            20.0,
        )
        graph = Graph(server)
        graph.models = await stack.enter_async_context(serve_models(view, context, "demo", AdmissionLimits()))
        client = await stack.enter_async_context(httpx.AsyncClient())
        graph.app = FrontendApp(graph.models, MetricsPage(view, "frontend-0-test", client), ApiKeys(), 20.0)
        graph.url = await serve(cross_origin(graph.app), stack)
        graph.http = await stack.enter_async_context(httpx.AsyncClient(base_url=graph.url, timeout=30))
        yield graph
