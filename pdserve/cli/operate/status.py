"""`pdserve status`: shows the state of a running graph, as tables or JSON, once or each second."""

import asyncio
import json
import logging
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Container, Iterable, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.cli.find import GraphAddress, GraphView, find_graph, running_here, view_of
from pdserve.cli.options import CredentialsFolder, Etcd, GraphFile, Namespace
from pdserve.contract.records import Instance
from pdserve.contract.reports import Outage, OutageTracker, ProcessReport
from pdserve.observe.graph_state import (
    BACKLOG_AT,
    GraphState,
    backlog,
    decode_workers,
    graph_state,
    promise_kept,
    settings_changed,
)
from pdserve.observe.problems import (
    DRAINING,
    READY,
    STARTING,
    Node,
    Problem,
    count,
    duration,
    nodes,
    problems,
)
from pdserve.observe.process_pages import read_watched
from pdserve.observe.tables import show, table
from pdserve.supervisor.state import GraphRecord
from pdserve.util import clock

REFRESH_INTERVAL = 1.0
"""Minimum of seconds between the starts of two reads of all processes."""
_NUMBERS = ("running", "waiting", "KV used", "KV tokens")
_LEVELS = {"bad": ("✗", "bold red"), "warn": ("!", "yellow"), "info": ("·", "cyan")}


def status(
    file: GraphFile = None,
    etcd: Etcd = None,
    namespace: Namespace = None,
    credentials: CredentialsFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, as one JSON object")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="refresh each second; in a pipe as JSON, one object per line")
    ] = False,
) -> int:
    """Show a running graph: problems, processes, models, the prefill queue and live settings. `?` means that a
    process does not answer. If etcd does not answer, the processes are those that `serve` on this machine last saw.
    Exit code 1 if nothing runs, 3 if there is a problem above level `info` (--json shows the levels). With --watch,
    refresh each second until Ctrl-C.

    examples:
      pdserve status                         the graph that runs on this machine
      pdserve status --watch                 refresh each second
      pdserve status -f graph.yaml --json | jq '.instances[].load'
      pdserve status --etcd 10.0.0.5:2379    a graph elsewhere
    """
    return asyncio.run(_status(find_graph(file, etcd, namespace, credentials), as_json, watch))


async def _status(graph: GraphAddress, as_json: bool, watch: bool) -> int:
    async with view_of(graph) as view:
        if watch:
            await _watch(view, graph, as_json or not sys.stdout.isatty())
        state = await anext(_states(view, graph))
        if as_json:
            print(json.dumps(as_dict(state, graph), indent=2))
        else:
            show(render(state, graph), pipe_width=140)
        if not state.instances:
            print(f"pdserve: nothing runs in namespace {graph.namespace} of {graph.etcd}.", file=sys.stderr)
            return 1
    return 3 if any(each["level"] != "info" for each in as_dict(state, graph)["problems"]) else 0


async def _watch(view: GraphView, graph: GraphAddress, as_json: bool) -> None:
    """Show each state until Ctrl-C or SIGTERM; both restore the terminal."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    logging.getLogger().addHandler(logging.NullHandler())  # hide warnings: the problems say the same
    with nullcontext() if as_json else Live(screen=True, auto_refresh=False) as screen:
        async for state in _states(view, graph):
            if screen is None:
                print(json.dumps(as_dict(state, graph)), flush=True)
            else:
                screen.update(render(state, graph), refresh=True)


async def _states(view: GraphView, graph: GraphAddress) -> AsyncIterator[GraphState]:
    own = OutageTracker()
    own.add("etcd", graph.etcd, view.connected)
    while True:
        began = time.monotonic()
        registered = view.snapshot()
        watched = await read_watched(registered.instances)
        outages = [msgspec.structs.replace(each, why=view.refusal()) for each in own.outages()]
        watched["this command"] = ProcessReport(outages=outages)
        if serve := running_here(graph):
            watched["the supervisor"] = ProcessReport(outages=_servers_down(serve))
        yield graph_state(*registered, watched)
        await asyncio.sleep(began + REFRESH_INTERVAL - time.monotonic())


def _servers_down(serve: GraphRecord) -> list[Outage]:
    """Return the graph's own servers that its supervisor is restarting."""
    servers = {"nats": ("NATS", serve.nats.rpartition("://")[2]), "etcd": ("etcd", serve.etcd)}
    return [Outage(*servers[name], 0.0, how) for name, how in serve.down.items() if how]


def as_dict(state: GraphState, graph: GraphAddress) -> dict[str, Any]:
    """Return plain data: the registry's records, problems, and each process's load and links (None and [] if the
    process does not answer)."""
    fields = msgspec.to_builtins(state)
    cards = fields.pop("cards")
    return {
        "etcd": graph.etcd,
        "namespace": graph.namespace,
        "url": graph.url,
        **fields,
        "problems": msgspec.to_builtins(problems(state, nodes(state, clock.unix()))),
        "instances": [
            {**each["instance"], "load": each["load"], "links": each["links"]} for each in fields["instances"]
        ],
        "models": {
            name: [{"instance": owner, **card} for owner, card in written] for name, written in cards.items()
        },
    }


def render(state: GraphState, graph: GraphAddress) -> RenderableType:
    processes = nodes(state, clock.unix())
    summary = Table.grid(padding=(0, 2))
    for name, workers in decode_workers(state).items():
        parts = [
            name,
            count(workers, "decode worker"),
            *(card.model for _, card in state.cards.get(name, [])[:1]),
        ]
        summary.add_row("model", ", ".join(parts))
    for node in processes:
        if node.restarts and node.up:
            times = count(node.restarts, "time")
            summary.add_row("restarts", Text(f"{node.name}: {times}, last end: {node.why}"))
    summary.add_row("queue", f"{state.queue_depth} prefill requests waiting")
    summary.add_row("backlog", "; ".join(f"{role.value} {backlog(state, role):.1f} s" for role in BACKLOG_AT))
    if promise := promise_kept(state.moments):
        summary.add_row("promise", promise)
    for line in settings_changed(state):
        summary.add_row("set", line)
    if graph.url:
        summary.add_row("URL", f"{graph.url}/v1")
    summary.add_row("etcd", f"{graph.etcd}, namespace {graph.namespace}")
    return Group(*map(_problem, problems(state, processes)), _processes(processes), summary)


def _problem(problem: Problem) -> Text:
    sign, style = _LEVELS[problem.level]
    since = f" ({duration(problem.seconds)})" if problem.seconds is not None else ""
    return Text("; ".join(filter(None, (f"{sign} {problem.text}{since}", problem.advice))), style)


def _processes(processes: Sequence[Node]) -> Table:
    shown = table("process", "state", "model", "where", "GPUs", *_NUMBERS, "address", numbers=_NUMBERS)
    mixed = _mixed(node.instance for node in processes if node.instance)
    for node in processes:
        shown.add_row(*_row(node, mixed))
    return shown


def _mixed(instances: Iterable[Instance]) -> set[str]:
    """Return the fingerprints of models whose workers have loaded different files."""
    loaded: defaultdict[str, set[str]] = defaultdict(set)
    for instance in instances:
        if instance.model:
            loaded[instance.model].add(instance.fingerprint)
    return {fingerprint for prints in loaded.values() if len(prints) > 1 for fingerprint in prints}


def _row(node: Node, mixed: Container[str]) -> tuple[str | Text, ...]:
    since = f" {duration(node.seconds)}" if node.seconds is not None else ""
    style = "" if node.state == READY else "yellow" if node.state in (DRAINING, STARTING) else "bold red"
    state = Text(node.state + since, style)
    instance, load = node.instance, node.load
    if instance is None:
        return node.name, state, "", node.host
    name = Text(instance.id)
    if instance.fingerprint in mixed:
        name.append(f"\n{instance.fingerprint}", "yellow")
    gpus = kv_used = kv_tokens = ""
    if instance.kv_blocks:
        gpus = ",".join(map(str, instance.gpus)) or "CPU"
        kv_used, kv_tokens = f"{load.kv_usage:.0%}" if load else "?", f"{instance.kv_tokens:,}"
        if instance.host_tokens:
            kv_tokens += f"\n+{instance.host_tokens:,} in RAM"
        if instance.disk_tokens:
            kv_tokens += f"\n+{instance.disk_tokens:,} on disk"
    where = f"{instance.host or '?'}:{instance.pid}"
    counts = (str(load.running), str(load.waiting)) if load else ("?", "?")
    return name, state, instance.model, where, gpus, *counts, kv_used, kv_tokens, instance.address
