"""A graph of many simulated workers and one real frontend, on an etcd and a nats-server of its own."""

import asyncio
import os
import re
import signal
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

FLEETS = 2
"""processes that the workers share"""
STREAMS = 100
"""at most, one for each decode worker"""
STEP = 0.05
"""seconds of an engine step"""
START_WITHIN = 600.0
KNOWN_WITHIN = 60.0
_FLEET = Path(__file__).with_name("fleet.py")
_SPEED = {"step-seconds": STEP, "prefill-rate": 1e9}


class MonitoredNats(EmbeddedNats):
    """Tells how many messages it has had."""

    def command(self) -> list[str]:
        self.monitor = free_port(self.host)
        return [*super().command(), "--http_port", str(self.monitor)]


@dataclass(frozen=True)
class Reading:
    at: float
    cpu: Mapping[str, float]
    """seconds, by `frontend`, `workers`, `etcd`, `nats`"""
    etcd_puts: float
    etcd_events: float
    """sent to the processes that watch"""
    nats_messages: float
    """in and out"""


class ScaleGraph:
    """`async with scale_graph(...) as graph`; all of its processes end with it."""

    def __init__(self, tree: Path, folder: Path, workers: int) -> None:
        self.tree, self.folder, self.workers = tree, folder, workers
        self.start_seconds = 0.0
        self._stack = AsyncExitStack()
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
        self._frontend = await self._spawn(stack, "-m", "pdserve", "frontend", "-f", str(file))
        began = time.monotonic()
        half, warm = self.workers // 2, str(int(warm_ups))
        shares = [len(range(number, half, FLEETS)) for number in range(FLEETS)]
        for share in [*shares, 1]:  # the last is to be killed
            numbers = (str(share), str(share), warm, str(half + 1))
            process = await self._spawn(stack, str(_FLEET), str(file), *numbers)
            self._fleets.append(process)
        try:
            async with asyncio.timeout(START_WITHIN):
                lines = await asyncio.gather(*map(_line, self._fleets))
                self.start_seconds = time.monotonic() - began
                while await self.live() != half + 1:  # noqa: ASYNC110 (it is another process)
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise Unavailable(f"{self.workers} workers have not started within {START_WITHIN:g} s") from None
        self.victim = lines[-1][1:]

    async def _spawn(self, stack: AsyncExitStack, *command: str) -> asyncio.subprocess.Process:
        variables = {"PYTHONPATH": str(self.tree), "PDSERVE_STATE_DIR": str(self.folder)}
        with (self.folder / f"{len(self._fleets)}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                env={**os.environ, **variables},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if command[0] == str(_FLEET) else log,
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
        etcd = (await self._http.get(f"http://{self._etcd.url}/metrics")).text
        nats = (await self._http.get(f"http://127.0.0.1:{self._nats.monitor}/varz")).json()
        servers = {"etcd": self._etcd.child, "nats": self._nats.child}
        cpu = {name: cpu_seconds(child.pid) for name, child in servers.items() if child is not None}
        cpu["frontend"] = cpu_seconds(self._frontend.pid)
        cpu["workers"] = sum(cpu_seconds(fleet.pid) for fleet in self._fleets[:FLEETS])
        return Reading(
            time.monotonic(),
            cpu,
            _metric(etcd, "etcd_mvcc_put_total"),
            _metric(etcd, "etcd_debugging_mvcc_events_total"),
            nats["in_msgs"] + nats["out_msgs"],
        )

    def memory(self) -> dict[str, float]:
        """MiB resident."""
        of = {"frontend": [self._frontend], "workers": self._fleets[:FLEETS]}
        return {
            name: sum(psutil.Process(p.pid).memory_info().rss for p in each) / 2**20
            for name, each in of.items()
        }

    async def one_token(self) -> float:
        """Seconds of a request."""
        began = time.monotonic()
        await self._ask(Exchange(_body(1)))
        return time.monotonic() - began

    async def _ask(self, exchange: Exchange) -> None:
        await LoadClient(self.url).ask(exchange, 300.0)
        if exchange.error:
            raise Unavailable(f"a request failed: {exchange.error}")

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[None]:
        """Entered when all of them have begun."""
        exchanges = [Exchange(_body(4000)) for _ in range(min(STREAMS, self.workers // 2))]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(exchange)) for exchange in exchanges]
            while not all(exchange.arrivals for exchange in exchanges):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            yield
            for task in tasks:
                task.cancel()

    async def kill(self) -> dict[str, float]:
        """Kill a decode and a prefill worker: seconds until the frontend has left the one (`frontend`: its connection
        ended), and until no worker knows the other any more (`workers`: its lease ran out)."""
        before, watching = await self.live(), self._fleets[:FLEETS]
        for fleet in watching:
            assert fleet.stdin is not None
            for name in self.victim:
                fleet.stdin.write(f"watch {name}\n".encode())
        killed = time.monotonic()
        self._fleets[-1].send_signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(KNOWN_WITHIN):
                while await self.live() >= before:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                frontend = time.monotonic() - killed
                told = [await _line(fleet) for fleet in watching for _ in self.victim]
        except TimeoutError:
            raise Unavailable(f"a death is not known to all after {KNOWN_WITHIN:g} s") from None
        return {"frontend": frontend, "workers": max(float(line[1]) for line in told) - killed}


def _body(tokens: int) -> dict[str, object]:
    return {
        "model": "demo",
        "prompt": "one two three",
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }


def _metric(page: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", page, re.M)
    return float(found[1]) if found else 0.0


async def _line(process: asyncio.subprocess.Process) -> list[str]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise Unavailable("a process of the benchmark's workers has ended")
    return line.decode().split()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
