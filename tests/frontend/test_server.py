"""A whole frontend on a real etcd, real streams and simulated decode workers: start, serve, lose a worker,
drain."""

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from pdserve.config.schema import Config, DecodeConfig, FrontendConfig
from pdserve.decode.worker import DecodeWorker
from pdserve.engine.spec import EngineSpec, make_engine
from pdserve.frontend.edge.connections import ClientConnections
from pdserve.frontend.server import http_config
from pdserve.plan.slots import Slot
from pdserve.process.life import live
from pdserve.records import Instance, Role, encode_record
from pdserve.registry import connect as connect_registry
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from pdserve.stream.tcp import TcpStreamServer
from tests.conditions import until
from tests.frontend.conftest import MODEL
from tests.memory.queue import MemoryBroker, MemoryQueue

ARGS = {"max-model-len": 4096, "additional-config": {"sim": {"step-seconds": 0.01}}}


@pytest.fixture
def config(etcd_url: str, namespace: str, tmp_path: Path) -> Config:
    return Config(
        path=tmp_path / "test.yaml",
        model=str(MODEL),
        served_model_name="demo",
        frontend=FrontendConfig(port=0),
        decode=DecodeConfig(engine="sim", engine_args=ARGS),
        prefill=None,
        namespace=namespace,
        nats="nats://127.0.0.1:1",
        etcd=etcd_url,
        state_dir=tmp_path,
        request_timeout=30.0,
        drain_timeout=5.0,
    )


class FrontendProcess:
    """A running frontend, found as all processes find it: in the registry."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.get, self.post, self.stream = client.get, client.post, client.stream
        self._stopped = False

    def stop(self) -> None:
        """SIGTERM, once: afterwards it no longer handles the signal, which would end the tests."""
        if not self._stopped:
            self._stopped = True
            os.kill(os.getpid(), signal.SIGTERM)

    async def healthy(self) -> bool:
        return (await self.get("/health")).status_code == 200


@asynccontextmanager
async def frontend(config: Config) -> AsyncIterator[FrontendProcess]:
    """Leaving stops it, and wants an orderly end."""
    running = asyncio.create_task(live(config, Slot(Role.FRONTEND, 0)))
    assert config.etcd is not None
    async with connect_registry(config.etcd, config.namespace) as registry, RegistryView(registry) as view:
        await until(lambda: running.done() or bool(view.instances(Role.FRONTEND)), 10)
        if running.done():
            await running
        (me,) = view.instances(Role.FRONTEND)
        async with httpx.AsyncClient(base_url=me.address, timeout=30) as client:
            process = FrontendProcess(client)
            try:
                yield process
            finally:
                process.stop()
                await asyncio.wait_for(running, 10)
        await until(lambda: not view.instances(Role.FRONTEND), 10)


@asynccontextmanager
async def decode_worker(config: Config, index: int) -> AsyncIterator[DecodeWorker]:
    """Leaving ends it without a drain."""
    name = f"decode-{index}-{secrets.token_hex(4)}"
    engine = make_engine("sim", EngineSpec(Role.DECODE, name, config.model, engine_args=ARGS))
    assert config.etcd is not None
    worker = DecodeWorker(
        config,
        Slot(Role.DECODE, index),
        name,
        engine,
        connect_registry(config.etcd, config.namespace),
        MemoryQueue(MemoryBroker()),
        TcpStreamServer("127.0.0.1"),
    )
    task = asyncio.create_task(worker.run())
    try:
        await asyncio.wait_for(worker.ready.wait(), 10)
        yield worker
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def body(tokens: int) -> dict[str, object]:
    return {
        "model": "demo",
        "prompt": [310, 320, 330],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }


class Stream:
    """A completion that is being read."""

    def __init__(self, client: FrontendProcess, tokens: int) -> None:
        self.begun = asyncio.Event()
        self.headers = httpx.Headers()
        self.text = ""
        self.ended = asyncio.create_task(self._read(client, tokens))

    async def _read(self, client: FrontendProcess, tokens: int) -> None:
        async with client.stream("POST", "/v1/completions", json=body(tokens)) as answer:
            assert answer.status_code == 200
            self.headers = answer.headers
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                    self.begun.set()
                elif line:
                    assert line == "data: [DONE]"


async def test_its_registered_address_is_where_it_listens(config: Config) -> None:
    """Which need not be at `Graph.host`, where other machines reach the workers."""
    async with frontend(replace(config, host="127.0.0.2")) as client:
        assert (await client.get("/version")).status_code == 200


async def test_serves_and_loses_a_worker(config: Config) -> None:
    async with frontend(config) as client:
        before = await client.get("/health")
        assert before.status_code == 503
        assert "no decode worker has registered" in before.json()["missing"]
        early = await client.post("/v1/completions", json=body(3))
        assert (early.status_code, early.headers["retry-after"]) == (503, "5")
        async with decode_worker(config, 0) as first:
            await until(client.healthy, 30)
            whole = Stream(client, 60)
            await whole.ended
            moved = Stream(client, 60)
            await moved.begun.wait()
        assert not moved.ended.done()
        async with decode_worker(config, 1):
            await moved.ended
    assert whole.headers["x-pdserve-instance"] == moved.headers["x-pdserve-instance"] == first.id
    assert len(whole.text) > 60
    assert moved.text == whole.text


async def test_running_requests_finish_at_sigterm(config: Config) -> None:
    async with decode_worker(config, 0), frontend(config) as client:
        await until(client.healthy, 30)
        stream = Stream(client, 100)
        await stream.begun.wait()
        client.stop()
        await stream.ended
        with pytest.raises(httpx.ConnectError):
            await client.get("/health", headers={"connection": "close"})
    assert len(stream.text) > 100


async def test_beside_another_frontend_it_takes_requests_only_when_it_can_serve_them(config: Config) -> None:
    """They share a port: a request that came to it earlier would wait for its start, and not be served by the other."""
    other = Instance("frontend-7-other", Role.FRONTEND)
    assert config.etcd is not None
    async with (
        decode_worker(config, 0),
        connect_registry(config.etcd, config.namespace) as registry,
        RegistryView(registry) as view,
    ):
        await registry.put(keys.instance(other), encode_record(other))
        await until(lambda: bool(view.instances(Role.FRONTEND)))
        running = asyncio.create_task(live(config, Slot(Role.FRONTEND, 0)))
        await until(lambda: running.done() or len(view.instances(Role.FRONTEND)) == 2, 30)
        (me,) = (instance for instance in view.instances(Role.FRONTEND) if instance.id != other.id)
        async with httpx.AsyncClient(base_url=me.address, timeout=30) as client:
            assert "loaded" not in (await client.get("/health")).text
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 10)


async def test_forwarded_addresses_are_not_believed() -> None:
    """Any client on this host could pass for many."""
    clients = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        clients.append(scope["client"])

    async def nothing(*_: object) -> object: ...

    server = http_config(app, ClientConnections(30.0, 30.0), 1.0)
    server.load()
    headers = [(b"x-forwarded-for", b"10.0.0.7")]
    scope = {"type": "http", "method": "GET", "client": ("127.0.0.1", 9), "headers": headers}
    await server.loaded_app(scope, nothing, nothing)
    assert clients == [("127.0.0.1", 9)]
