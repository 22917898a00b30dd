"""A whole frontend on a real etcd, with an `EchoWorker`: start, serve, drain. (Requests whose worker is lost:
sequence/test_moving.py.)"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pdserve.config.schema import Config, DecodeConfig, FrontendConfig
from pdserve.contract.records import Instance, Role, encode_record
from pdserve.plan.slots import Slot
from pdserve.process.life import live
from pdserve.registry import connect as connect_registry
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from tests.conditions import until
from tests.frontend.conftest import MODEL, card
from tests.frontend.model.echo import EchoWorker
from tests.frontend.test_generate import completion


def test_a_frontend_starts_without_vllm() -> None:
    """Importing vLLM takes 6 to 7 seconds of CPU; the frontend imports it in a thread, once a model is served."""
    code = "import sys, pdserve.frontend.server; sys.exit(str({'vllm', 'torch', 'numpy'} & set(sys.modules) or ''))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""


@pytest.fixture
def config(etcd_url: str, namespace: str, tmp_path: Path) -> Config:
    return Config(
        path=tmp_path / "test.yaml",
        model=str(MODEL),
        served_model_name="demo",
        frontend=FrontendConfig(port=0),
        decode=DecodeConfig(engine="sim"),
        prefill=None,
        namespace=namespace,
        nats="nats://127.0.0.1:1",
        etcd=etcd_url,
        state_dir=tmp_path,
        request_timeout=30.0,
        drain_timeout=5.0,
    )


SHORT_TIMEOUT = {"x-request-timeout": "0.2"}


class FrontendProcess:
    """A running frontend, found as all processes find it: in the registry."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.get, self.post = client.get, client.post
        self._stopped = False

    def stop(self) -> None:
        """Send SIGTERM, but only once: a second one, after the frontend's end, would end the tests."""
        if not self._stopped:
            self._stopped = True
            os.kill(os.getpid(), signal.SIGTERM)

    async def healthy(self) -> bool:
        return (await self.get("/health")).status_code == 200


@asynccontextmanager
async def frontend(config: Config) -> AsyncIterator[FrontendProcess]:
    """Yield a running frontend. On exit, stop it, and check that it deregisters, and is not reported as lost."""
    assert config.etcd is not None
    async with connect_registry(config.etcd, config.namespace) as registry, RegistryView(registry) as view:
        others = view.instances(Role.FRONTEND)
        running = asyncio.create_task(live(config, Slot(Role.FRONTEND, 0)))
        await until(lambda: running.done() or len(view.instances(Role.FRONTEND)) > len(others))
        if running.done():
            await running
        (me,) = (instance for instance in view.instances(Role.FRONTEND) if instance not in others)
        async with httpx.AsyncClient(base_url=me.address, timeout=30) as client:
            process = FrontendProcess(client)
            try:
                yield process
            finally:
                process.stop()
                await asyncio.wait_for(running, 10)
        await until(lambda: view.instances(Role.FRONTEND) == others, 10)
        assert me.id not in {each.id for each in view.lost_processes()}


@asynccontextmanager
async def decode_worker(config: Config) -> AsyncIterator[EchoWorker]:
    assert config.etcd is not None
    async with (
        EchoWorker("decode-0-echo", pace=0.01) as worker,
        connect_registry(config.etcd, config.namespace) as registry,
    ):
        await registry.put(keys.card("demo", worker.id), encode_record(card()))
        await registry.put(keys.instance(worker.instance), encode_record(worker.instance))
        yield worker


async def test_a_frontend_from_start_to_end(config: Config) -> None:
    """The frontend listens at `Frontend.host`, which may differ from `Graph.host`, the workers' address. After SIGTERM,
    requests may run until the drain timeout."""
    async with frontend(replace(config, host="127.0.0.2", drain_timeout=2.0)) as client:
        health = await client.get("/health")
        impatient = await client.post("/v1/completions", json=completion(), headers=SHORT_TIMEOUT)
        early = asyncio.create_task(client.post("/v1/completions", json=completion()))
        assert health.status_code == 503
        assert "no decode worker has registered" in health.json()["missing"]
        assert (impatient.status_code, impatient.headers["retry-after"]) == (503, "5")
        assert (await client.get("/health")).json() == health.json()
        async with decode_worker(config) as worker:
            assert (await early).status_code == 200
            assert await client.healthy()
            bodies = [completion(max_tokens=most) for most in (60, 4000)]
            asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
            await worker.until(lambda: len([job for job in worker.jobs.values() if job.generated]) == 2)
            client.stop()
            finished, late = [await each for each in asked]
            with pytest.raises(httpx.ConnectError):
                await client.get("/health", headers={"connection": "close"})
    assert finished.json()["usage"]["completion_tokens"] == 60
    assert (late.status_code, late.headers["retry-after"]) == (503, "5")
    assert late.json()["error"]["message"] == "the frontend is shutting down"


async def test_beside_another_frontend_a_new_one_listens_only_when_it_can_serve(config: Config) -> None:
    """Both share a port: a request that came to the new one too early would wait, though the old one could serve it."""
    other = Instance("frontend-7-other", Role.FRONTEND)
    assert config.etcd is not None
    async with decode_worker(config), connect_registry(config.etcd, config.namespace) as registry:
        await registry.put(keys.instance(other), encode_record(other))
        async with frontend(config) as client:
            assert "loaded" not in (await client.get("/health")).text
