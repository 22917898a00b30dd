"""Each outage fires its alert in a real Prometheus and is a problem in `/health`, which still returns 200 because
requests are served. Tested with and without `serve`. In pods: `test_chart_pods.py`."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from pdserve_bench.graphs.launch import PDSERVE, RunningGraph, StartedGraph, started
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.graphs.without_serve import started_without_serve

from tests.conditions import until
from tests.deploy.prometheus import Prometheus, scraping

PREFILL = "PdserveNoPrefillWorker: No prefill worker of demo is there"
DECODE = "PdserveNoDecodeWorker: No decode worker of demo is there"
NATS, ETCD = "PdserveServerLost: NATS does not answer", "PdserveServerLost: etcd does not answer"
DOWN = "PdserveWorkerDown: decode-1 on 127.0.0.1 is not ready"


class Watched:
    """A graph and the Prometheus that scrapes it."""

    def __init__(self, url: str, prometheus: Prometheus, key: str = "") -> None:
        self.url, self.prometheus = url, prometheus
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    async def fires(self, *alerts: str) -> None:
        """Wait until exactly these alerts fire."""
        fired: set[str] = set()
        for _ in range(90):
            fired = await asyncio.to_thread(self.prometheus.firing)
            found = [alert for alert in alerts if any(said.startswith(alert) for said in fired)]
            if len(found) == len(alerts) == len(fired):
                return
            await asyncio.sleep(1)
        raise AssertionError(f"{fired} fire instead of {alerts}")

    async def has_fired(self, alert: str) -> bool:
        return any(said.startswith(alert) for said in await asyncio.to_thread(self.prometheus.firing))

    async def fires_among(self, *alerts: str) -> None:
        """Wait until each of these alerts has fired; others may fire, too."""
        for alert in alerts:
            for _ in range(120):
                if await self.has_fired(alert):
                    break
                await asyncio.sleep(1)
            else:
                raise AssertionError(f"{alert} does not fire, but {self.prometheus.firing()}")

    async def well(self) -> bool:
        with suppress(httpx.HTTPError):  # the graph is starting
            return (await self.health())[:2] == (200, "ok")
        return False

    async def health(self) -> tuple[int, str, str]:
        async with httpx.AsyncClient(trust_env=False, timeout=30, headers=self.headers) as http:
            answer = await http.get(f"{self.url}/health")
        body = answer.json()
        return answer.status_code, body["status"], "; ".join(body.get("problems", []))

    async def is_degraded(self, problem: str) -> None:
        async def degraded() -> bool:
            with suppress(httpx.TransportError):  # the connection was to a frontend that was just killed
                code, status, problems = await self.health()
                assert code == 200
                return status == "degraded" and problem in problems
            return False

        await until(degraded, 60)


async def cause_outages(graph: Watched, send: Callable[[str, int], None]) -> None:
    """Suspend and continue in turn: a decode worker with NATS; etcd; all prefill workers; all decode workers."""

    async def suspend(names: list[str], problem: str, *alerts: str) -> None:
        for name in names:
            send(name, signal.SIGSTOP)
        await graph.is_degraded(problem)
        await graph.fires(*alerts)
        for name in names:
            send(name, signal.SIGCONT)
        await until(graph.well, 60)
        await graph.fires()

    await until(graph.well, 60)
    await graph.fires()
    await suspend(["decode-1", "nats"], "NATS does not answer", DOWN, NATS)
    await suspend(["etcd"], "etcd does not answer", ETCD)
    prefill = ["prefill-0", "prefill-1"]
    downs = [f"PdserveWorkerDown: {name} on" for name in prefill]
    await suspend(prefill, "no prefill worker is available", PREFILL, *downs)

    await suspend(
        ["decode-0", "decode-1"],
        "no decode worker is available: prefill-0",
        DECODE,
        DOWN,
        DOWN.replace("-1", "-0"),
    )


def _file(folder: Path) -> Path:
    return write(simulated(graph={"drain-timeout": 5}), folder / "sim.yaml")


@contextmanager
def watched(folder: Path, running: RunningGraph) -> Iterator[Watched]:
    with scraping(folder, running.graph.url.removeprefix("http://")) as prometheus:
        yield Watched(running.graph.url, prometheus)


@pytest.mark.timeout(600)
async def test_outages_under_serve_fire_their_alerts(tmp_path: Path) -> None:
    async with started(_file(tmp_path), tmp_path, print, workers=2) as running:
        with watched(tmp_path, running) as graph:
            await cause_outages(graph, partial(send_to, running))


def send_to(running: StartedGraph, name: str, number: int) -> None:
    """Send a signal to a process of `serve`."""
    (process,) = (each for each in running.serve.processes() if _is(each.cmdline(), name))
    process.send_signal(number)


def _is(command: Sequence[str], name: str) -> bool:
    role, _, index = name.partition("-")
    return role in command and index in command[-1:] if index else name in Path(command[0]).name


@pytest.mark.timeout(600)
async def test_outages_without_serve_fire_their_alerts(tmp_path: Path) -> None:
    """At the end, the prefill workers, a frontend, NATS and etcd are killed, and nothing restarts them until their
    alerts fire."""
    async with started_without_serve(_file(tmp_path), tmp_path, print, workers=2) as running:

        def send(name: str, number: int) -> None:
            os.killpg(running.group(name), number)

        with watched(tmp_path, running) as graph:
            await cause_outages(graph, send)
            running.restarts = False
            send("prefill-0", signal.SIGKILL)
            await graph.is_degraded("prefill-0 of 127.0.0.1 is gone")
            status = await asyncio.to_thread(_status, running.graph.config)
            assert status.returncode == 3, status.stderr
            assert any("prefill-0" in each["text"] for each in json.loads(status.stdout)["problems"])
            send("frontend-1", signal.SIGKILL)
            await graph.is_degraded("frontend-1 of 127.0.0.1 is gone")
            send("nats", signal.SIGKILL)
            send("etcd", signal.SIGKILL)
            send("prefill-1", signal.SIGKILL)
            await graph.is_degraded("etcd does not answer")
            gone = ("prefill-0", "prefill-1", "frontend-1")
            await graph.fires(NATS, ETCD, *(f"PdserveWorkerDown: {name} on" for name in gone))
            running.restarts = True
            await graph.fires()


def _status(file: str) -> "subprocess.CompletedProcess[str]":
    command = [*PDSERVE, "status", "-f", file, "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
