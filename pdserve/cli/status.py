"""`pdserve status`: the state of a running graph, for people and for machines, once or as it changes."""

import asyncio
import json
import socket
import sys
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Annotated, Any

import msgspec
import psutil
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve import clock
from pdserve.cli.find import GraphAddress, NoGraph, find_graph
from pdserve.cli.options import CredentialsFolder, Etcd, GraphFile, Namespace
from pdserve.errors import RegistryUnavailable
from pdserve.messages import Load
from pdserve.observe.pages import read_loads
from pdserve.observe.tables import show, table
from pdserve.records import Instance
from pdserve.registry import connect
from pdserve.registry.view import RegistryView

_ORDER = {"frontend": 0, "decode": 1, "both": 2, "prefill": 3}
_NUMBERS = ("running", "waiting", "KV used", "KV tokens")
_AGAIN = 1.0
"""seconds between two looks with --watch"""


def status(
    file: GraphFile = None,
    etcd: Etcd = None,
    namespace: Namespace = None,
    credentials: CredentialsFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, as one JSON object")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="go on showing changes until Ctrl-C")] = False,
) -> int:
    """Show the processes of a running graph: one row for each living lease in etcd, with its address, its load and KV
    usage as the process itself tells them (`?` where it does not answer), the models, the prefill queue and the live
    settings. Exit code 1 where nothing runs.

    examples:
      pdserve status                         the graph that runs on this machine
      pdserve status --watch                 as it changes
      pdserve status -f configs/disagg.yaml --json | jq '.instances[].load'
      pdserve status --etcd 10.0.0.5:2379    a graph elsewhere
    """
    return asyncio.run(_status(find_graph(file, etcd, namespace, credentials), as_json, watch))


async def _status(graph: GraphAddress, as_json: bool, watch: bool) -> int:
    """Return the exit code. Raises NoGraph where etcd does not answer."""
    async with AsyncExitStack() as stack:
        try:
            registry = await stack.enter_async_context(
                connect(graph.etcd, graph.namespace, graph.credentials)
            )
            view = await stack.enter_async_context(RegistryView(registry))
        except RegistryUnavailable as error:
            raise NoGraph(f"{error}: no graph runs there.") from None
        if watch:
            await _watch(view, graph, as_json)
        loads = await read_loads(view.instances())
        if as_json:
            print(json.dumps(as_dict(view, loads, graph), indent=2))
        else:
            show(render(view, loads, graph), pipe_width=140)
        if not view.instances():
            print(f"pdserve: nothing runs in namespace {graph.namespace} of {graph.etcd}.", file=sys.stderr)
            return 1
    return 0


async def _watch(view: RegistryView, graph: GraphAddress, as_json: bool) -> None:
    """Until cancelled; with JSON, one line for each change."""
    with ExitStack() as stack:
        live = Live(console=Console(highlight=False), auto_refresh=False, screen=True)
        if not as_json:
            stack.enter_context(live)
        told: dict[str, Any] = {}
        while True:
            loads = await read_loads(view.instances())
            if not as_json:
                live.update(render(view, loads, graph), refresh=True)
            elif (now := as_dict(view, loads, graph)) != told:
                told = now
                print(json.dumps(told), flush=True)
            await asyncio.sleep(_AGAIN)


def as_dict(view: RegistryView, loads: Mapping[str, Load], graph: GraphAddress) -> dict[str, Any]:
    """Plain data: everything that the registry has, and of each process its load, None where it did not answer."""
    return {
        "etcd": graph.etcd,
        "namespace": graph.namespace,
        "url": graph.url,
        "queue_depth": queue_depth(loads),
        "instances": [
            {**msgspec.to_builtins(instance), "load": msgspec.to_builtins(loads.get(instance.id))}
            for instance in in_order(view)
        ],
        "models": {
            name: [{"instance": owner, **msgspec.to_builtins(card)} for owner, card in cards]
            for name, cards in view.cards().items()
        },
        "slots": [msgspec.to_builtins(slot) for slot in view.slots()],
        "settings": view.settings(),
    }


def render(view: RegistryView, loads: Mapping[str, Load], graph: GraphAddress) -> RenderableType:
    instances = in_order(view)
    summary = Table.grid(padding=(0, 2))
    for name, cards in view.cards().items():
        summary.add_row(
            "model", f"{name}, {len(cards)} decode worker{'s' * (len(cards) != 1)}, {cards[0][1].model}"
        )
    for slot in view.slots():
        if not slot.ready:
            said = f": {slot.cause}" if slot.cause else ""
            summary.add_row(Text("degraded", "red"), Text(f"{slot.name} on {slot.host}: {slot}{said}"))
        elif slot.restarts:
            again = f"{slot.restarts} time{'s' * (slot.restarts != 1)}"
            summary.add_row("restarts", Text(f"{slot.name} on {slot.host}: {again}, last end: {slot.end}"))
    summary.add_row("queue", f"{queue_depth(loads)} prefill requests waiting")
    for name, value in sorted(view.settings().items()):
        summary.add_row("setting", f"{name} = {value}")
    if graph.url:
        summary.add_row("URL", f"{graph.url}/v1")
    summary.add_row("etcd", f"{graph.etcd}, namespace {graph.namespace}")
    return Group(_instances(instances, loads), summary)


def in_order(view: RegistryView) -> list[Instance]:
    return sorted(view.instances(), key=lambda instance: (_ORDER[instance.role.value], instance.id))


def queue_depth(loads: Mapping[str, Load]) -> int:
    """All workers see the same queue, at slightly different times."""
    return max((load.queue_depth for load in loads.values()), default=0)


def _instances(instances: Sequence[Instance], loads: Mapping[str, Load]) -> Table:
    shown = table("instance", "model", "where", "GPUs", "up", *_NUMBERS, "address", numbers=_NUMBERS)
    mixed = _mixed(instances)
    for instance in instances:
        shown.add_row(*_row(instance, loads.get(instance.id), mixed))
    return shown


def _mixed(instances: Sequence[Instance]) -> set[str]:
    """The fingerprints of models whose workers have loaded different files."""
    loaded: defaultdict[str, set[str]] = defaultdict(set)
    for instance in instances:
        if instance.model:
            loaded[instance.model].add(instance.fingerprint)
    return {fingerprint for prints in loaded.values() if len(prints) > 1 for fingerprint in prints}


def _row(instance: Instance, load: Load | None, mixed: Container[str]) -> tuple[str | Text, ...]:
    name = Text(instance.id)
    if instance.draining:
        name.append(" draining", "yellow")
    if instance.fingerprint in mixed:
        name.append(f"\n{instance.fingerprint}", "yellow")
    if instance.clock_skew is not None and abs(instance.clock_skew) > clock.LARGE_SKEW:
        name.append(f"\nclock {instance.clock_skew:+.1f} s", "yellow")
    gpus = kv_used = kv_tokens = ""
    if instance.kv_blocks:
        gpus = ",".join(map(str, instance.gpus)) or "CPU"
        kv_used, kv_tokens = f"{load.kv_usage:.0%}" if load else "?", f"{instance.kv_tokens:,}"
    for worker in load.unreachable if load else []:
        name.append(f"\ncannot reach {worker}", "red")
    where = f"{instance.host or '?'}:{instance.pid}"
    counts = (str(load.running), str(load.waiting)) if load else ("?", "?")
    return name, instance.model, where, gpus, _up(instance), *counts, kv_used, kv_tokens, instance.address


def _up(instance: Instance) -> str:
    """How long its process has been running, where that is on this machine."""
    here = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    if instance.host not in here | {"localhost", socket.gethostname()}:
        return ""
    try:
        seconds = clock.unix() - psutil.Process(instance.pid).create_time()
    except psutil.Error:
        return ""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
