"""A graph of many simulated workers and one real frontend, on an etcd and a nats-server of its own."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from pdserve.errors import Unavailable
from pdserve.ports import free_port
from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats
from pdserve_bench.client import Exchange, LoadClient
from pdserve_bench.simulated import simulated, write
from pdserve_bench.systems.cpu import cpu_seconds
from pdserve_bench.watch import series

FLEETS = 2
STREAMS = 100
"""at most, one for each decode worker"""
STEP = 0.05
START_WITHIN = 600.0
_FLEET = "pdserve_bench.scale.fleet"
_SPEED = {"step-seconds": STEP, "prefill-rate": 1e9}


class MonitoredNats(EmbeddedNats):
    """Tells how many messages it has had."""

    def command(self) -> list[str]:
        self.monitor = free_port(self.host)
        return [*super().command(), "--http_port", str(self.monitor)]


@dataclass(frozen=True)
class Reading:
    at: float
    counts: Mapping[str, float]
    """CPU seconds of `frontend`, `workers`, `etcd` and `nats`; `etcd puts`, `etcd events` (sent to the processes that
    watch) and `nats messages` (in and out) so far"""


class ScaleGraph:
    """The graph; its processes end with the stack on which it was started."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        self.start_seconds = 0.0
        self._fleets: list[asyncio.subprocess.Process] = []

    async def start(self, stack: AsyncExitStack, *, warm_ups: bool) -> None:
        """Raises Unavailable where it does not start in time."""
        self._etcd = await stack.enter_async_context(EmbeddedEtcd(self.folder))
        self._nats = await stack.enter_async_context(MonitoredNats(self.folder))
        self._http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=10.0))
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        sections = simulated(
            _SPEED,
            frontend={"port": port},
            graph={"etcd": self._etcd.url, "nats": self._nats.url},
            common={"block-size": 16},
        )
        file = write(sections, self.folder / "graph.yaml")
        self._frontend = await self._spawn(stack, "pdserve", "frontend", "-f", str(file))
        began = time.monotonic()
        half, warm = self.workers // 2, str(int(warm_ups))
        shares = [len(range(number, half, FLEETS)) for number in range(FLEETS)]
        for share in shares:
            numbers = (str(share), str(share), warm, str(half))
            process = await self._spawn(stack, _FLEET, str(file), *numbers)
            self._fleets.append(process)
        try:
            async with asyncio.timeout(START_WITHIN):
                await asyncio.gather(*map(_ready, self._fleets))
                self.start_seconds = time.monotonic() - began
                while await self.live() != half:  # noqa: ASYNC110 (it is another process)
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise Unavailable(f"{self.workers} workers have not started within {START_WITHIN:g} s") from None

    async def _spawn(self, stack: AsyncExitStack, module: str, *arguments: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{module}-{len(self._fleets)}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                env={**os.environ, "PDSERVE_STATE_DIR": str(self.folder)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if module == _FLEET else log,
                stderr=log,
                limit=1 << 20,
            )
        stack.push_async_callback(_stop, process)
        return process

    async def live(self) -> int:
        """Decode workers that the frontend is connected to."""
        try:
            return sum((await self._http.get(f"{self.url}/health")).json()["workers"].values())
        except (httpx.HTTPError, ValueError):
            return 0

    async def read(self) -> Reading:
        etcd = series((await self._http.get(f"http://{self._etcd.url}/metrics")).text)
        nats = (await self._http.get(f"http://127.0.0.1:{self._nats.monitor}/varz")).json()
        pids = {"frontend": [self._frontend.pid], "workers": [fleet.pid for fleet in self._fleets]}
        pids |= {server.name: [server.child.pid] for server in (self._etcd, self._nats) if server.child}
        counts = {name: sum(map(cpu_seconds, each)) for name, each in pids.items()}
        counts["etcd puts"] = etcd["etcd_mvcc_put_total"]
        counts["etcd events"] = etcd["etcd_debugging_mvcc_events_total"]
        counts["nats messages"] = nats["in_msgs"] + nats["out_msgs"]
        return Reading(time.monotonic(), counts)

    def memory(self) -> dict[str, float]:
        """MiB resident."""
        of = {"frontend": [self._frontend], "workers": self._fleets}
        return {
            name: sum(psutil.Process(p.pid).memory_info().rss for p in each) / 2**20
            for name, each in of.items()
        }

    async def _ask(self, exchange: Exchange) -> None:
        await LoadClient(self.url).ask(exchange, 300.0)
        if exchange.error:
            raise Unavailable(f"a request failed: {exchange.error}")

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[None]:
        """Entered when all of them have begun."""
        exchanges = [Exchange(_body()) for _ in range(min(STREAMS, self.workers // 2))]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(exchange)) for exchange in exchanges]
            while not all(exchange.arrivals for exchange in exchanges):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            yield
            for task in tasks:
                task.cancel()


def _body() -> dict[str, object]:
    return {
        "model": "demo",
        "prompt": "one two three",
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }


async def _ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    if not await process.stdout.readline():
        raise Unavailable("a process of the benchmark's workers has ended")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
