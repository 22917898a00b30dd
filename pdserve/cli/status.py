"""`pdserve status`: the state of a running graph, for people and for machines, once or as it changes."""

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve import clock
from pdserve.cli.find import GraphAddress, GraphView, find_graph, view_of
from pdserve.cli.live import live, states
from pdserve.cli.options import CredentialsFolder, Etcd, GraphFile, Namespace
from pdserve.cli.top import problem_line, state_style
from pdserve.observe.graph_state import GraphState, decode_workers, settings_changed
from pdserve.observe.problems import Node, count, duration, nodes, problems
from pdserve.observe.tables import show, table
from pdserve.records import Instance

_NUMBERS = ("running", "waiting", "KV used", "KV tokens")
_PASSING = {"age", "seconds", "start", "round_trip", "moments"}
"""fields that differ at each look though nothing has changed; what a frontend serves is in its receipts, too"""


def status(
    file: GraphFile = None,
    etcd: Etcd = None,
    namespace: Namespace = None,
    credentials: CredentialsFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, as one JSON object")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="a live screen; in a pipe, and with --json, each change")
    ] = False,
) -> int:
    """Show the processes of a running graph: those that are registered in etcd, with their load and KV usage as they
    tell them (`?` where one does not answer), and those that should be there; what is wrong, the models, the prefill
    queue and the live settings. While etcd does not answer, the processes are those that `serve` on this machine saw
    there last. Exit code 1 where nothing runs.

    With --watch, a screen that is renewed each second: what is wrong, latencies and rates of the last minutes, all
    processes, the links between them, and the requests that did not go the way that was meant for them (pdserve trace
    shows any request's way). q or Ctrl-C ends it.

    examples:
      pdserve status                         the graph that runs on this machine
      pdserve status --watch                 as it changes, live
      pdserve status -f configs/disagg.yaml --json | jq '.instances[].load'
      pdserve status --etcd 10.0.0.5:2379    a graph elsewhere
    """
    return asyncio.run(_status(find_graph(file, etcd, namespace, credentials), as_json, watch))


async def _status(graph: GraphAddress, as_json: bool, watch: bool) -> int:
    """Return the exit code. Raises NoGraph."""
    async with view_of(graph) as view:
        if watch and sys.stdout.isatty() and not as_json:
            await live(view, graph)
            return 0
        if watch:
            await _print_changes(view, graph, as_json)
        state = await anext(states(view, graph.etcd))
        if as_json:
            print(json.dumps(as_dict(state, graph), indent=2))
        else:
            show(render(state, graph), pipe_width=140)
        if not state.instances:
            print(f"pdserve: nothing runs in namespace {graph.namespace} of {graph.etcd}.", file=sys.stderr)
            return 1
    return 0


async def _print_changes(view: GraphView, graph: GraphAddress, as_json: bool) -> None:
    """Until cancelled; with JSON, one line for each change."""
    printed: Any = None
    async for state in states(view, graph.etcd):
        if lasting(now := as_dict(state, graph)) == printed:
            continue
        printed = lasting(now)
        if as_json:
            print(json.dumps(now), flush=True)
        else:
            at = time.strftime("%H:%M:%S", time.localtime(clock.unix()))
            show(Group(at, render(state, graph), ""), 140)


def lasting(told: Any) -> Any:
    """`told` without the fields of `_PASSING`. Pure."""
    if isinstance(told, dict):
        return {key: lasting(value) for key, value in told.items() if key not in _PASSING}
    return [lasting(value) for value in told] if isinstance(told, list) else told


def as_dict(state: GraphState, graph: GraphAddress) -> dict[str, Any]:
    """Plain data: the registry's records, and each process's load and links (None and [] where it did not answer)."""
    told = msgspec.to_builtins(state)
    cards = told.pop("cards")
    return {
        "etcd": graph.etcd,
        "namespace": graph.namespace,
        "url": graph.url,
        **told,
        "instances": [
            {**each["instance"], "load": each["load"], "links": each["links"]} for each in told["instances"]
        ],
        "models": {
            name: [{"instance": owner, **card} for owner, card in written] for name, written in cards.items()
        },
    }


def render(state: GraphState, graph: GraphAddress) -> RenderableType:
    found = nodes(state, clock.unix())
    summary = Table.grid(padding=(0, 2))
    for name, workers in decode_workers(state).items():
        parts = [
            name,
            count(workers, "decode worker"),
            *(card.model for _, card in state.cards.get(name, [])[:1]),
        ]
        summary.add_row("model", ", ".join(parts))
    for node in found:
        if node.restarts and node.up:
            times = count(node.restarts, "time")
            summary.add_row("restarts", Text(f"{node.name}: {times}, last end: {node.why}"))
    summary.add_row("queue", f"{state.queue_depth} prefill requests waiting")
    for line in settings_changed(state):
        summary.add_row("set", line)
    if graph.url:
        summary.add_row("URL", f"{graph.url}/v1")
    summary.add_row("etcd", f"{graph.etcd}, namespace {graph.namespace}")
    return Group(_processes(found), *map(problem_line, problems(state, found)), summary)


def _processes(found: Sequence[Node]) -> Table:
    shown = table("process", "state", "model", "where", "GPUs", *_NUMBERS, "address", numbers=_NUMBERS)
    mixed = _mixed(node.instance for node in found if node.instance)
    for node in found:
        shown.add_row(*_row(node, mixed))
    return shown


def _mixed(instances: Iterable[Instance]) -> set[str]:
    """The fingerprints of models whose workers have loaded different files."""
    loaded: defaultdict[str, set[str]] = defaultdict(set)
    for instance in instances:
        if instance.model:
            loaded[instance.model].add(instance.fingerprint)
    return {fingerprint for prints in loaded.values() if len(prints) > 1 for fingerprint in prints}


def _row(node: Node, mixed: Container[str]) -> tuple[str | Text, ...]:
    since = f" {duration(node.seconds)}" if node.seconds is not None else ""
    state = Text(node.state + since, state_style(node))
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
    where = f"{instance.host or '?'}:{instance.pid}"
    counts = (str(load.running), str(load.waiting)) if load else ("?", "?")
    return name, state, instance.model, where, gpus, *counts, kv_used, kv_tokens, instance.address
