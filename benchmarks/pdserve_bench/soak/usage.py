"""Resource use of each process of a graph, and the growth that counts as a leak."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import httpx
import psutil

from pdserve.contract.records import Instance
from pdserve.queue.jetstream.client import short_connection
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.graphs.watch import held, read_loads, series

MARGINS = {"blocks": 0, "sockets": 2, "files": 2, "tasks": 2, "threads": 4, "MiB": 24, "kept": 0}
"""Tolerated growth. Thread pools (asyncio, gRPC) fill on demand. Allocators keep freed memory, but a leak of 10 KB per
request exceeds the MiB after thousands of requests. A metrics scrape or an etcd call may use a socket."""
ENGINE_MIB = 96
"""Tolerated MiB of a role's child process, because vLLM's engine core on a CPU grows for about 4,000 requests (small
blocks, probably oneDNN's state for new shapes)."""


@dataclass(frozen=True)
class Usage:
    """Resources of one process; None if not applicable."""

    blocks: int | None = None
    """KV blocks held by requests."""
    sockets: int | None = None
    files: int | None = None
    """Open files that are not sockets."""
    tasks: int | None = None
    threads: int | None = None
    MiB: int | None = None
    kept: int | None = None
    """Data stored by a server: NATS messages and consumers, etcd keys."""


UsageSnapshot = Mapping[str, Usage]


async def measure_usage(
    supervisor: int, instances: list[Instance], stored: Mapping[str, int]
) -> UsageSnapshot:
    """Measure all processes of the graph. `stored` is the data in each server."""
    found: dict[str, Usage] = {"serve": _of(psutil.Process(supervisor))}
    roles = {instance.pid: instance for instance in instances}
    blocks = held(instances, await read_loads(instances))
    async with httpx.AsyncClient(trust_env=False) as http:
        for child in psutil.Process(supervisor).children():
            if role := roles.get(child.pid):
                name = role.id.rpartition("-")[0]
                found[name] = _of(child, blocks=blocks.get(role.id, 0), tasks=await _tasks(http, role))
                found |= {f"{name} {kind}": usage for kind, usage in _below(child)}
            elif (server := child.name().partition("-")[0]) in stored:
                found[server] = _of(child, kept=stored[server])
    return found


def _below(role: psutil.Process) -> Iterator[tuple[str, Usage]]:
    """Yield the processes below a role's, such as vLLM's engine core."""
    for number, child in enumerate(role.children(recursive=True)):
        with suppress(psutil.Error, OSError):  # it has ended meanwhile
            yield f"child {number}", _of(child)


def _of(process: psutil.Process, **more: int | None) -> Usage:
    links = []
    for number in os.listdir(f"/proc/{process.pid}/fd"):
        with suppress(OSError):  # closed meanwhile
            links.append(os.readlink(f"/proc/{process.pid}/fd/{number}"))
    sockets = sum(link.startswith("socket:") for link in links)
    return Usage(
        sockets=sockets,
        files=len(links) - sockets,
        threads=process.num_threads(),
        MiB=process.memory_info().rss >> 20,
        **more,
    )


async def _tasks(http: httpx.AsyncClient, instance: Instance) -> int:
    page = (await http.get(instance.metrics)).text
    return round(series(page)["pdserve_tasks"])


async def nats_keeps(graph: GraphRecord) -> int:
    """Count messages and consumers of all streams."""
    credentials = graph.load_credentials()
    tls = credentials.client_context() if credentials else None
    async with short_connection(graph.nats, tls) as client:
        streams = await client.jetstream().streams_info()
        return sum(stream.state.messages + stream.state.consumer_count for stream in streams)


def leaks(before: UsageSnapshot, after: UsageSnapshot, allowed: Mapping[str, int] = MARGINS) -> list[str]:
    """Return a sentence for each growth beyond its margin and for each missing process."""
    found = [f"{name} is gone" for name in before.keys() - after.keys()]
    found += [f"{name} is new" for name in after.keys() - before.keys()]
    for name in sorted(before.keys() & after.keys()):
        margins = {**allowed, "MiB": max(ENGINE_MIB, allowed["MiB"])} if " child " in name else allowed
        for what, margin in margins.items():
            was, now = getattr(before[name], what), getattr(after[name], what)
            if what == "blocks" and was:
                was = 0  # what the warm-up leaked counts too
            if was is not None and now is not None and now - was > margin:
                found.append(f"{name}: {what} {was} -> {now}")
    return found
