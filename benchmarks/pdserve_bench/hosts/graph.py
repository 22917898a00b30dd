"""A graph on simulated hosts: NATS and etcd on one, each frontend and worker on its own (`pdserve decode -f FILE`),
with the graph's certificates."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from msgspec.structs import replace

from pdserve.config.env_overrides import VARIABLES
from pdserve.config.load import load
from pdserve.contract.records import Role
from pdserve.security.credentials import create
from pdserve.supervisor.servers.embedded import EmbeddedEtcd, EmbeddedNats
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import Unavailable
from pdserve_bench.graphs.launch import (
    CUTTABLE,
    PDSERVE,
    START_WITHIN,
    RunningGraph,
    derive,
    with_thresholds,
)
from pdserve_bench.graphs.simulated import write
from pdserve_bench.graphs.watch import GraphWatch
from pdserve_bench.hosts.network import Host, HostProcess, Network, network

SERVERS = "servers"
ROLES = (Role.FRONTEND, Role.DECODE, Role.PREFILL)
PORT, KV_PORT, NATS_PORT, ETCD_PORT = 8000, 5600, 4222, 2379
"""The default ports, which are free on every host."""
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
"""Limits for a host, which sees all of the machine's memory and cores."""
WRONG_CLOCKS = {"frontend-1": 3600.0, "decode-1": -40.0, "prefill-1": 5.0}
"""Seconds by which the clock of each role's second host is wrong. Only the last is shorter than etcd and KV leases."""
STOP_WITHIN = 60.0


@dataclass
class Place:
    name: str
    host: Host
    process: HostProcess
    role: Role | None = None

    @property
    def log(self) -> Path:
        return self.host.folder / "log"


@dataclass
class HostsGraph(RunningGraph):
    net: Network
    file: Path
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return True

    @property
    def urls(self) -> list[str]:
        return [f"http://{place.host.address}:{PORT}" for place in self.of(Role.FRONTEND)]

    def of(self, role: Role) -> list[Place]:
        return [place for place in self.places.values() if place.role is role]

    def start_servers(self, host: Host) -> None:
        credentials = self.graph.load_credentials()
        servers = (
            EmbeddedNats(host.folder, NATS_PORT, credentials=credentials),
            EmbeddedEtcd(host.folder, ETCD_PORT, credentials=credentials),
        )
        for server in servers:
            server.host = host.address
            server.data_dir.mkdir(parents=True, exist_ok=True)
            process = host.start(server.command(), host.folder / f"{server.name}.log", CUTTABLE)
            self.places[server.name] = Place(server.name, host, process)

    def start(self, name: str) -> None:
        """Start the process of `decode-0` and the like on a new host of that name."""
        role, host = name.partition("-")[0], self.net.host(name, WRONG_CLOCKS.get(name, 0.0))
        process = host.start(
            [*PDSERVE, role, "-f", str(self.file)], host.folder / "log", self._variables(host)
        )
        self.places[name] = Place(name, host, process, Role(role))

    def restart(self, name: str) -> None:
        """Restart a host. The servers' host keeps its address; any other gets a new one."""
        if name.partition("-")[0] in ROLES:
            self.start(name)
        else:
            self.start_servers(self.net.restart(SERVERS))

    def _variables(self, host: Host) -> dict[str, str]:
        return {
            **dict.fromkeys(VARIABLES, ""),
            **CUTTABLE,
            **SMALL,
            "PDSERVE_HOST": host.address,
            "PDSERVE_FRONTEND_HOST": host.address,
            "PDSERVE_NATS": self.graph.nats,
            "PDSERVE_ETCD": self.graph.etcd,
            "PDSERVE_STATE_DIR": str(host.folder / "state"),
            "PDSERVE_CREDENTIALS": self.graph.credentials,
        }

    async def until_ready(self) -> None:
        """Raises Unavailable with the ends of logs if a process does not start."""
        places = [place for place in self.places.values() if place.role]
        deadline = time.monotonic() + START_WITHIN
        async with GraphWatch() as watch:
            await watch.move(self.graph)
            while waiting := [place for place in places if not await _serves(place, watch)]:
                if (ended := self.ended()) or time.monotonic() > deadline:
                    raise Unavailable(
                        "the graph does not start:\n" + "\n".join(map(_end_of, ended or waiting))
                    )
                await asyncio.sleep(0.2)

    def ended(self) -> list[Place]:
        """Return places whose process has ended by itself."""
        return [place for place in self.places.values() if place.process.poll() is not None]

    async def stop(self) -> None:
        """Stop as systemd does, frontends first. Raises Unavailable after an error or if processes are left."""
        wrong = []
        for role in ROLES:
            places = self.of(role)
            for place in places:
                place.process.signal(signal.SIGTERM)
            for place in places:
                code = await place.process.ended(STOP_WITHIN)
                wrong += [f"{place.name} ended with {code} on SIGTERM"] * (code != 0)
                if left := place.host.processes():
                    wrong.append(f"{place.name} left {', '.join(left)}")
        if wrong:
            raise Unavailable("; ".join(wrong))


async def _serves(place: Place, watch: GraphWatch) -> bool:
    """Whether a frontend lists a model, or a worker is registered."""
    if place.role is Role.FRONTEND:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            with suppress(httpx.HTTPError, ValueError):
                models = (await client.get(f"http://{place.host.address}:{PORT}/v1/models")).json()
                return bool(models.get("data"))
        return False
    return place.host.address in {found.host for found in await watch.instances()}


def _end_of(place: Place) -> str:
    return f"{place.name} ended with {place.process.poll()}:\n{place.log.read_text(errors='replace')[-2000:]}"


@asynccontextmanager
async def graph_on_hosts(
    file: Path, folder: Path, say: Callable[[str], None], workers: int = 2, dtype: str = ""
) -> AsyncIterator[HostsGraph]:
    """Start `workers` hosts of each role and one for the servers. Raises Unavailable and ConfigError."""
    sections = with_thresholds(derive(file, 1, PORT, KV_PORT, dtype))
    sections["Security"] = {"allow": ["no-keys", "plain-http"]}
    credentials = create(folder / "credentials")
    with network(folder) as net:
        host = net.host(SERVERS)
        ours = write(sections, folder / "graph.yaml")
        record = GraphRecord(
            pid=os.getpid(),
            config=str(ours),
            model=load(ours, {}).served_model_name,
            namespace="bench",
            etcd=f"{host.address}:{ETCD_PORT}",
            nats=f"nats://{host.address}:{NATS_PORT}",
            credentials=str(credentials.folder),
        )
        graph = HostsGraph(record, folder, net, ours)
        graph.start_servers(host)
        for number in range(workers):
            for role in ROLES:
                graph.start(f"{role.value}-{number}")
        graph.graph = replace(record, url=graph.urls[0])
        say(f"{len(net.hosts)} hosts, their logs: {folder}/*/log")
        await graph.until_ready()
        yield graph
        await graph.stop()
