"""Too much load and repeated failures fire their alerts in a real Prometheus. (Outages: `test_outages.py`.)"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from pdserve_bench.graphs.launch import StartedGraph, started
from pdserve_bench.graphs.simulated import simulated, write

from pdserve.runtime.tasks import TaskOwner
from pdserve.security.credentials import create
from pdserve.supervisor.servers.embedded import etcd_binary
from pdserve.util.net import free_port
from tests.conditions import until
from tests.deploy.prometheus import scraping
from tests.deploy.test_outages import send_to, watched
from tests.full_disk import small_disk

PROMPT = "The code of the red box is 1000. " * 30
"""about 400 tokens"""
STOP_ENGINE = signal.SIGUSR2
WORKERS = ("decode-0", "decode-1", "prefill-0", "prefill-1")


@asynccontextmanager
async def under_load(url: str, clients: int, headers: dict[str, str] | None = None) -> AsyncIterator[None]:
    """Run `clients` clients that send requests one after another, each request with an uncached prompt."""

    async def client() -> None:
        while True:
            prompt = os.urandom(4).hex() + PROMPT
            body = {"model": "demo", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
            with suppress(httpx.HTTPError):
                answer = await http.post("/v1/completions", json=body, headers=headers)
                await asyncio.sleep(0.5 if answer.is_error else 0)

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http, TaskOwner() as tasks:
        for _ in range(clients):
            tasks.start(client(), "client")
        yield


@pytest.mark.timeout(600)
async def test_too_much_load_fires_alerts(tmp_path: Path) -> None:
    """Requests wait for seconds and break their SLO, the queues are full, and clients get 429. Also, the graph's
    certificate expires in a week, and the disk of batches is small."""
    sections = simulated(
        {"prefill-rate": 200, "step-seconds": 0.05},
        decode={"max-num-seqs": 8, "max-prefill-queue-size": 1},
        frontend={"max-waiting": 8, "batches": str(tmp_path / "disk")},
    )
    file = write({**sections, "Slo": {"ttft": "1s"}}, tmp_path / "sim.yaml")
    own = create(tmp_path / "credentials", valid=timedelta(days=7))
    security = {"credentials": str(own.folder)}
    names = ["PdserveRefusals", "PdserveSlowFirstToken", "PdservePromiseBroken", "PdservePrefillQueueFull"]
    names += ["PdserveCertificateExpires", "PdserveBatchesDiskFull"]
    with small_disk(tmp_path / "disk"):
        async with started(file, tmp_path, print, security=security) as running:
            with watched(tmp_path, running) as graph:
                await until(graph.well, 60)
                async with under_load(running.graph.url, 24):
                    await graph.fires_among(*(f"{name}: " for name in names))


@pytest.mark.timeout(600)
async def test_repeated_failures_fire_alerts(tmp_path: Path) -> None:
    """Remote prefills fail, an engine stalls, decode workers die, all workers hang, and at last the frontends hang."""
    speed = {"prefill-rate": 400, "step-seconds": 0.02, "stop-signal": int(STOP_ENGINE)}
    sections = simulated(speed, graph={"drain-timeout": 5})
    async with started(write(sections, tmp_path / "sim.yaml"), tmp_path, print, workers=2) as running:
        with watched(tmp_path, running) as graph:
            await until(graph.well, 60)
            async with under_load(running.graph.url, 4):
                while not await graph.has_fired("PdserveFallbacks: "):
                    await pause(running, ("prefill-0", "prefill-1"), 8)
                    await until(graph.well, 60)
            for _ in range(4):  # the signal stops the engine, or continues a stopped one
                send_to(running, "decode-0", STOP_ENGINE)
                await asyncio.sleep(6)
            await graph.fires_among("PdserveEngineStalls: The engine of decode-0")
            await until(graph.well, 60)
            for number in (0, 1, 0):
                send_to(running, f"decode-{number}", signal.SIGKILL)
                await graph.is_degraded(f"decode-{number}")
                await until(graph.well, 60)
            await graph.fires_among("PdserveWorkerRestarts: 3 decode workers of demo")
            for name in WORKERS:
                send_to(running, name, signal.SIGSTOP)
            async with under_load(running.graph.url, 4, {"x-request-timeout": "2"}):
                await graph.fires_among("PdserveErrors: ")
            for name in WORKERS:
                send_to(running, name, signal.SIGCONT)
            for name in ("frontend-0", "frontend-1"):
                send_to(running, name, signal.SIGSTOP)
            await graph.fires_among("PdserveNotScraped: ")
            for name in ("frontend-0", "frontend-1"):
                send_to(running, name, signal.SIGCONT)
            await until(graph.well, 60)


def test_a_growing_etcd_fires_its_alert(tmp_path: Path) -> None:
    """A key is overwritten, which grows the database, until the alert of a full etcd fires."""
    port, peers = free_port("127.0.0.1"), free_port("127.0.0.1")
    url, etcdctl = f"http://127.0.0.1:{port}", etcd_binary().with_name("etcdctl")
    options = {
        "data-dir": tmp_path / "etcd",
        "quota-backend-bytes": 400_000,
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": f"http://127.0.0.1:{peers}",
        "log-level": "error",
    }
    etcd = subprocess.Popen([etcd_binary(), *(f"--{name}={value}" for name, value in options.items())])
    try:
        with scraping(tmp_path, f"127.0.0.1:{port}") as prometheus:
            deadline = time.monotonic() + 90
            while not any(said.startswith("PdserveEtcdFull: ") for said in prometheus.firing()):
                assert time.monotonic() < deadline, prometheus.series("etcd_mvcc_db_total_size_in_bytes")
                subprocess.run([etcdctl, "--endpoints", url, "put", "key", "x" * 50_000], check=False)
                time.sleep(1)
    finally:
        etcd.terminate()
        etcd.wait(30)


async def pause(running: StartedGraph, names: tuple[str, ...], seconds: float) -> None:
    for name in names:
        send_to(running, name, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    for name in names:
        send_to(running, name, signal.SIGCONT)
