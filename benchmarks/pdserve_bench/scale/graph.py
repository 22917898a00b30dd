"""A graph of many simulated workers, with real frontends, on etcds and nats-servers of its own."""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil

from pdserve.credentials import create
from pdserve.ports import free_port
from pdserve.supervisor.exits import exit_of
from pdserve.supervisor.readiness import until_frontends_ready
from pdserve_bench.clusters import EtcdMember, NatsMember, addresses, cluster
from pdserve_bench.cpu import cpu_seconds
from pdserve_bench.launch import ServerRun, family
from pdserve_bench.progress import say
from pdserve_bench.simulated import simulated, write
from pdserve_bench.watch import series

FLEETS = 2
PAIRS = 10_000
"""of a decode and a prefill worker, beyond which none warms up: on hosts of their own they have the CPU for it, and
here a thousand share one"""
STEP = 0.05
_FLEET = "pdserve_bench.scale.fleet"
_SPEED = {"step-seconds": STEP, "prefill-rate": 1e9}


@dataclass(frozen=True)
class GraphSize:
    decode: int
    prefill: int
    frontends: int = 1
    servers: int = 1
    """of NATS and of etcd each, 1 or 3"""


@dataclass(frozen=True)
class Reading:
    at: float
    counts: Mapping[str, float]
    """CPU seconds of `frontend`, `workers`, `etcd`, `nats`, each kind together; `etcd puts`, `etcd events` (sent to the
    processes that watch) and `nats messages` (in and out) so far"""

    def rates(self, before: "Reading") -> dict[str, float]:
        """Per second since then."""
        took = self.at - before.at
        return {name: (count - before.counts[name]) / took for name, count in self.counts.items()}


class ScaleGraph:
    """The graph; its processes end with the stack on which it was started. Where it has several servers of a kind it
    has certificates too, as graphs over several hosts must."""

    def __init__(self, folder: Path, size: GraphSize) -> None:
        self.folder, self.size = folder, size
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        """of all frontends"""
        self._frontend = {"port": port, "ServiceArgs": {"workers": size.frontends}}
        self._frontends: list[ServerRun] = []
        self._fleets: list[ServerRun] = []

    async def start(self, stack: AsyncExitStack) -> float:
        """Return the seconds until all workers were registered, and knew each other. Raises Unavailable where it does
        not start in time."""
        size, enter = self.size, stack.enter_async_context
        credentials = create(self.folder / "credentials") if size.servers > 1 else None
        self._etcd = await enter(cluster(EtcdMember, self.folder, credentials, size.servers))
        self._nats = await enter(cluster(NatsMember, self.folder, credentials, size.servers))
        tls = self._etcd[0]._tls or True
        self._http = await enter(httpx.AsyncClient(trust_env=False, timeout=10.0, verify=tls))
        file = self._file()
        for number in range(size.frontends):
            run = self._spawn(stack, "pdserve", "frontend", "-f", file, "--index", str(number))
            self._frontends.append(run)
        began = time.monotonic()
        for number in range(FLEETS):
            parts = (len(range(number, whole, FLEETS)) for whole in (size.decode, size.prefill))
            numbers = (*parts, size.decode, size.prefill, int(size.decode * size.prefill <= PAIRS))
            self._fleets.append(self._spawn(stack, _FLEET, file, *map(str, numbers)))
        await asyncio.gather(*(run.until(partial(_ready, run), say) for run in self._fleets))
        took = time.monotonic() - began
        async for _ in until_frontends_ready(self.url, size.frontends):
            pass
        return took

    def _file(self) -> str:
        sections = simulated(
            _SPEED,
            frontend=self._frontend,
            graph={"etcd": addresses(self._etcd), "nats": addresses(self._nats)},
            common={"block-size": 16},
        )
        if credentials := self._etcd[0].credentials:
            sections["Security"] = {"credentials": str(credentials.folder)}
        return str(write(sections, self.folder / "graph.yaml"))

    def _spawn(self, stack: AsyncExitStack, module: str, *arguments: str) -> ServerRun:
        log = self.folder / f"{module}-{len(self._frontends) + len(self._fleets)}.log"
        command = [sys.executable, "-m", module, *arguments]
        run = ServerRun(command, log, {"PDSERVE_STATE_DIR": str(self.folder)})
        run.start()
        stack.push_async_callback(_stop, run)
        return run

    async def read(self) -> Reading:
        counts = {name: sum(map(cpu_seconds, pids)) for name, pids in self._pids().items()}
        scheme = "https" if self._etcd[0].credentials else "http"
        etcd = [series((await self._http.get(f"{scheme}://{e.url}/metrics")).text) for e in self._etcd]
        nats = [(await self._http.get(member.page("varz"))).json() for member in self._nats]
        counts["etcd puts"] = etcd[0]["etcd_mvcc_put_total"]  # each member has all of them
        counts["etcd events"] = sum(page["etcd_debugging_mvcc_events_total"] for page in etcd)
        counts["nats messages"] = sum(page["in_msgs"] + page["out_msgs"] for page in nats)
        return Reading(time.monotonic(), counts)

    def memory(self) -> dict[str, float]:
        """MiB resident, of each kind together."""
        return {
            name: sum(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20
            for name, pids in self._pids().items()
        }

    def _pids(self) -> dict[str, Sequence[int]]:
        return {
            "frontend": [each.pid for run in self._frontends for each in family(run.process.pid)],
            "workers": [run.process.pid for run in self._fleets],
            "etcd": [member.child.pid for member in self._etcd if member.child],
            "nats": [member.child.pid for member in self._nats if member.child],
        }


def _ready(run: ServerRun) -> bool:
    return "ready" in run.text.splitlines()


async def _stop(run: ServerRun) -> None:
    run.process.kill()
    await exit_of(run.process)
