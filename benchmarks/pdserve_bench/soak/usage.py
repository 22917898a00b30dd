"""Resource use of each process of a graph, and the growth that counts as a leak."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import httpx
import psutil

from pdserve.contract.records import Instance
from pdserve.queue.jetstream.client import short_connection
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.graphs.watch import held, read_loads, series

MARGINS = {"blocks": 0, "sockets": 2, "files": 2, "tasks": 2, "threads": 4, "MiB": 24, "kept": 0, "disk": 8}
"""Tolerated growth: thread pools fill on demand, allocators keep freed memory, and a metrics scrape or etcd call that
is running has a socket."""
WAL_MIB = 128
"""Tolerated growth of etcd's data in MiB: its write-ahead log has files of 64 MiB, and the next one is allocated in
advance."""
ENGINE_MIB = 96
"""Tolerated growth of a role's child process in MiB: vLLM's engine core on a CPU grows during its first 4,000 requests
or so."""


@dataclass(frozen=True)
class Usage:
    """Resources of one process or folder; None if not applicable."""

    blocks: int | None = None
    """KV blocks held by requests."""
    sockets: int | None = None
    files: int | None = None
    """Open files that are not sockets."""
    tasks: int | None = None
    threads: int | None = None
    MiB: int | None = None
    kept: int | None = None
    """What NATS, etcd or a folder keeps: the number of messages and consumers, of keys, or of files."""
    disk: int | None = None
    """MiB of files in the process's folder."""


UsageSnapshot = Mapping[str, Usage]


@dataclass(frozen=True)
class Part:
    """Process of the graph: a role, `serve`, NATS or etcd."""

    process: psutil.Process
    instance: Instance | None = None
    """The role's registration."""
    folder: Path | None = None
    parent: psutil.Process | None = None
    """The role's parent process, which systemd or a pod started; None under `serve`."""


def parts_of_serve(
    supervisor: int, instances: Iterable[Instance], servers: Mapping[str, Path | None]
) -> dict[str, Part]:
    """Return the processes of a graph under `serve` by name, as `decode-0`. `servers`: embedded ones to include, and
    their folders."""
    found = {"serve": Part(psutil.Process(supervisor))}
    roles = {instance.pid: instance for instance in instances}
    for child in psutil.Process(supervisor).children():
        with suppress(psutil.Error):  # the process has ended meanwhile
            if role := roles.get(child.pid):
                found[role.id.rpartition("-")[0]] = Part(child, role)
            elif (server := child.name().partition("-")[0]) in servers:
                found[server] = Part(child, folder=servers[server])
    return found


def part_alone(started: int, instances: Iterable[Instance], folder: Path | None = None) -> Part | None:
    """Return the registered role whose parent is `started`, if any. Pids in `instances` are of the role's own pid
    namespace."""
    by_pid = {instance.pid: instance for instance in instances}
    with suppress(psutil.Error, OSError):  # the process has ended meanwhile
        parent = psutil.Process(started)
        for child in parent.children():
            if instance := by_pid.get(_innermost_pid(child.pid)):
                return Part(child, instance, folder, parent)
    return None


def _innermost_pid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pids,) = (line for line in lines if line.startswith("NSpid:"))
    return int(pids.split()[-1])


async def measure_usage(
    parts: Mapping[str, Part], stored: Mapping[str, int], folders: Mapping[str, Path] | None = None
) -> UsageSnapshot:
    """Measure the processes and `folders`. `stored`: what each server keeps (`Usage.kept`)."""
    found: dict[str, Usage] = {}
    instances = [part.instance for part in parts.values() if part.instance]
    blocks = held(instances, await read_loads(instances))
    async with httpx.AsyncClient(trust_env=False) as http:
        for name, part in parts.items():
            more = {"kept": stored.get(name), "disk": _files_of(part.folder)[1] if part.folder else None}
            if role := part.instance:
                more |= {"blocks": blocks.get(role.id, 0), "tasks": await _tasks(http, role)}
                found |= {f"{name} {kind}": usage for kind, usage in _below(part.process)}
            found[name] = _of(part.process, **more)
            if part.parent:
                found[f"{name} parent"] = _of(part.parent)
    for name, folder in (folders or {}).items():
        count, size = _files_of(folder)
        found[name] = Usage(kept=count, disk=size)
    return found


def _files_of(folder: Path) -> tuple[int, int]:
    """Return the number of all files below the folder, and their MiB."""
    sizes = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            sizes.append(path.lstat().st_blocks * 512)
    return len(sizes), sum(sizes) >> 20


def _below(role: psutil.Process) -> Iterator[tuple[str, Usage]]:
    """Yield the processes below a role's, such as vLLM's engine core."""
    for number, child in enumerate(role.children(recursive=True)):
        with suppress(psutil.Error, OSError):  # the process has ended meanwhile
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
    credentials = graph.load_credentials()
    tls = credentials.client_context() if credentials else None
    async with short_connection(graph.nats, tls) as client:
        streams = await client.jetstream().streams_info()
        return sum(stream.state.messages + stream.state.consumer_count for stream in streams)


def early_and_late(samples: Sequence[UsageSnapshot]) -> tuple[UsageSnapshot, UsageSnapshot]:
    """Drop the first quarter of the samples (the warm-up), and return the median usage in the first and the last third
    of the rest. A third has those processes that more than half of its samples have."""
    warm = samples[len(samples) // 4 :]
    count = max(1, len(warm) // 3)
    return _median(warm[:count]), _median(warm[-count:])


def _median(samples: Sequence[UsageSnapshot]) -> UsageSnapshot:
    found = {}
    for name in {name for sample in samples for name in sample}:
        usages = [sample[name] for sample in samples if name in sample]
        if 2 * len(usages) > len(samples):
            columns = {what: [getattr(usage, what) for usage in usages] for what in MARGINS}
            known = {what: [each for each in values if each is not None] for what, values in columns.items()}
            found[name] = Usage(**{what: median_low(each) for what, each in known.items() if each})
    return found


def leaks(before: UsageSnapshot, after: UsageSnapshot, allowed: Mapping[str, int] = MARGINS) -> list[str]:
    """Return a sentence for each growth beyond its margin and for each missing or new process."""
    found = [f"{name} is gone" for name in before.keys() - after.keys()]
    found += [f"{name} is new" for name in after.keys() - before.keys()]
    for name in sorted(before.keys() & after.keys()):
        margins = {**allowed, "MiB": max(ENGINE_MIB, allowed["MiB"])} if " child " in name else dict(allowed)
        if name == "etcd":
            margins["disk"] = WAL_MIB
        for what, margin in margins.items():
            was, now = getattr(before[name], what), getattr(after[name], what)
            if what == "blocks" and was:
                was = 0  # what the warm-up leaked counts too
            if was is not None and now is not None and now - was > margin:
                found.append(f"{name}: {what} {was} -> {now}")
    return found
