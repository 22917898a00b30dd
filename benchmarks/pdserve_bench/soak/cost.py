"""Measure what a request costs as the graph grows: CPU seconds, wake-ups and NATS messages of each kind of process for
1,000 requests, beyond what the idle graph uses."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from pdserve.observe.tables import show, table
from pdserve.util.errors import ConfigError, Unavailable
from pdserve_bench.client import Outcome
from pdserve_bench.endpoint import Endpoint, learn_prompts
from pdserve_bench.graphs.clusters import EtcdMember, NatsMember, cluster
from pdserve_bench.graphs.launch import StartedGraph, family, started
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.graphs.watch import GraphWatch, series, total
from pdserve_bench.measure.foreign_cpu import ForeignLoad
from pdserve_bench.measure.runs import LoadRun, PoissonRequests
from pdserve_bench.measure.samples import percentile
from pdserve_bench.options import numbers

PROMPT_TOKENS, ANSWER_TOKENS = 300, 16
"""Short responses, so that a worker's sequences rarely share a step: more would in small graphs, and save messages."""
SETTLE = 6.0
"""Seconds from the end of the warm-up to the measurement of the idle graph."""
IDLE = 20.0
KINDS = ("frontend", "decode", "prefill", "nats", "etcd", "serve")


@dataclass
class Use:
    """Counters of all processes of one kind."""

    processes: int = 0
    cpu: float = 0.0
    """seconds"""
    wake_ups: float = 0.0
    """voluntary context switches"""
    messages: float = 0.0
    """NATS messages, sent and received; of etcd, gRPC messages"""
    memory: float = 0.0
    """bytes; shared pages count in part (PSS)"""

    def less(self, before: "Use", times: float = 1.0) -> "Use":
        """Return the counters minus `times` x `before`; processes and memory stay."""
        return Use(
            self.processes,
            self.cpu - times * before.cpu,
            self.wake_ups - times * before.wake_ups,
            self.messages - times * before.messages,
            self.memory,
        )


Snapshot = Mapping[str, Use]


@dataclass
class GraphCost:
    workers: int
    idle: Snapshot
    """in one second"""
    requests: Snapshot
    """for 1,000 requests, beyond idle"""
    ttft: tuple[float, float] = (0.0, 0.0)
    """p50 and p99 in seconds"""
    foreign: float | None = None
    """CPU share of other programs"""


@dataclass
class _Meter:
    graph: StartedGraph
    nats: NatsMember
    etcd: EtcdMember
    http: httpx.AsyncClient
    pids: dict[int, str] = field(default_factory=dict)
    """kind of process by pid"""
    ports: dict[int, str] = field(default_factory=dict)
    """kind of process by the local port of its TCP connections"""

    async def learn(self) -> None:
        async with GraphWatch() as watch:
            await watch.move(self.graph.graph)
            self.pids = {instance.pid: instance.role.value for instance in await watch.instances()}
        for server in (self.nats, self.etcd):
            assert server.child is not None
            self.pids |= {each.pid: server.name.partition("-")[0] for each in family(server.child.pid)}
        for each in self.graph.family():
            self.pids.setdefault(each.pid, "serve")
        for pid, kind in self.pids.items():
            with suppress(psutil.Error):
                links = psutil.Process(pid).net_connections("tcp")
                self.ports |= {link.laddr.port: kind for link in links if link.laddr}

    async def read(self) -> Snapshot:
        found: dict[str, Use] = defaultdict(Use)
        for pid, kind in self.pids.items():
            use = found[kind]
            with suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                times = process.cpu_times()
                use.processes += 1
                use.cpu += times.user + times.system
                use.wake_ups += _wake_ups(pid)
                use.memory += process.memory_full_info().pss
        page = (await self.http.get(self.nats.page("connz?limit=4096"))).json()
        for link in page["connections"]:
            messages = link["in_msgs"] + link["out_msgs"]
            found["nats"].messages += messages
            found[self.ports.get(link["port"], "serve")].messages += messages
        grpc = series((await self.http.get(f"http://{self.etcd.url}/metrics")).text)
        found["etcd"].messages = sum(
            total(grpc, f"grpc_server_msg_{way}_total") for way in ("sent", "received")
        )
        return found


def _wake_ups(pid: int) -> int:
    lines = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in lines)


def sizes_of(text: str) -> list[int]:
    """Parse `2,16,64`. Raises ConfigError."""
    sizes = sorted(set(numbers(text, int)))
    if not sizes or sizes[0] < 2 or any(size % 2 for size in sizes):
        raise ConfigError(
            [f"--workers {text}: give even numbers, as in 2,16,64 (half of the workers decode)."]
        )
    return sizes


async def measure_costs(
    sizes: Sequence[int], requests: int, rate: float, folder: Path, say: Callable[[str], None]
) -> list[GraphCost]:
    """Start a graph of each size, half decode and half prefill workers, and measure it. Raises Unavailable."""
    found = []
    for size in sizes:
        (place := folder / str(size)).mkdir()
        found.append(await _measure(size, requests, rate, place, say))
    return found


async def _measure(
    size: int, requests: int, rate: float, folder: Path, say: Callable[[str], None]
) -> GraphCost:
    half = {"ServiceArgs": {"workers": size // 2}}
    speed = {"step-seconds": 0.005, "prefill-rate": 20000}
    file = write(simulated(speed, decode=half, prefill=half), folder / "graph.yaml")
    (folder / "run").mkdir()
    async with AsyncExitStack() as stack:
        (nats,) = await stack.enter_async_context(cluster(NatsMember, folder, size=1))
        (etcd,) = await stack.enter_async_context(cluster(EtcdMember, folder, size=1))
        began = time.monotonic()
        servers = {"nats": nats.url, "etcd": etcd.url}
        graph = await stack.enter_async_context(started(file, folder / "run", say, servers=servers))
        say(f"{size} workers: ready after {time.monotonic() - began:.0f} s")
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30.0))
        endpoint = Endpoint(graph.graph.url, graph.graph.model)
        users = PoissonRequests(await learn_prompts(endpoint, 1), PROMPT_TOKENS, ANSWER_TOKENS)
        await users.at(rate, 3 * size / rate, 2).run(endpoint, LoadRun())  # warm-up
        await asyncio.sleep(SETTLE)
        meter = _Meter(graph, nats, etcd, http)
        await meter.learn()
        first, at = await meter.read(), time.monotonic()
        await asyncio.sleep(IDLE)
        second, now = await meter.read(), time.monotonic()
        idle = {kind: second[kind].less(first[kind]) for kind in KINDS}
        per_second = {kind: Use().less(use, -1 / (now - at)) for kind, use in idle.items()}
        run, others, at = LoadRun(), ForeignLoad(), time.monotonic()
        await users.at(rate, requests / rate, 3).run(endpoint, run)
        third, seconds = await meter.read(), time.monotonic() - at
        if wrong := run.of(Outcome.FAILED):
            raise Unavailable(f"{len(wrong)} of {len(run.exchanges)} requests failed: {wrong[0].error}")
        if local := sum(exchange.prefill != "remote" for exchange in run.exchanges):
            say(f"{size} workers: {local} of {len(run.exchanges)} prompts were prefilled locally")
        scale = -1000 / len(run.exchanges)
        costs = {
            kind: Use().less(third[kind].less(second[kind]).less(per_second[kind], seconds), scale)
            for kind in KINDS
        }
        for kind in KINDS:
            per_second[kind].processes, per_second[kind].memory = second[kind].processes, third[kind].memory
        ttfts = [exchange.ttft for exchange in run.exchanges if exchange.ttft is not None]
        ttft = percentile(ttfts, 0.5), percentile(ttfts, 0.99)
        return GraphCost(size, per_second, costs, ttft, others.share())


def show_costs(costs: Sequence[GraphCost]) -> None:
    columns = ("CPU s", "wake-ups", "messages", "processes", "MiB each", "idle CPU %", "idle wake-ups/s")
    shown = table("workers", "process", *columns, numbers=columns)
    for row in rows(costs):
        shown.add_row(*map(str, row.values()))
    show(shown)
    print("CPU, wake-ups, messages: for 1,000 requests, beyond idle. MiB and idle figures: of one process.")
    for cost in costs:
        p50, p99 = (1000 * each for each in cost.ttft)
        print(
            f"{cost.workers} workers: TTFT p50 {p50:.0f} ms, p99 {p99:.0f} ms; "
            f"other programs used {100 * (cost.foreign or 0):.0f} % of the CPU"
        )


def rows(costs: Sequence[GraphCost]) -> Iterator[dict[str, Any]]:
    for cost in costs:
        for kind in KINDS:
            idle, use = cost.idle[kind], cost.requests[kind]
            count = max(1, idle.processes)
            yield {
                "workers": cost.workers,
                "process": kind,
                "CPU s": round(use.cpu, 2),
                "wake-ups": round(use.wake_ups),
                "messages": round(use.messages),
                "processes": idle.processes,
                "MiB each": round(idle.memory / count / (1 << 20)),
                "idle CPU %": round(100 * idle.cpu / count, 2),
                "idle wake-ups/s": round(idle.wake_ups / count, 1),
            }
