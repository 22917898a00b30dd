"""The state of a graph, for people and for machines."""

import socket
from collections import defaultdict
from collections.abc import Container, Sequence
from typing import Any

import msgspec
import psutil
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve import clock
from pdserve.cli.status.find import Found
from pdserve.messages import Instance
from pdserve.registry.view import View

_ORDER = {"frontend": 0, "decode": 1, "prefill": 2}


def as_dict(view: View, graph: Found) -> dict[str, Any]:
    """Plain data: everything that the registry has."""
    return {
        "etcd": graph.etcd,
        "namespace": graph.namespace,
        "url": graph.url,
        "queue_depth": queue_depth(view.instances()),
        "instances": [msgspec.to_builtins(each) for each in in_order(view)],
        "models": {
            name: [{"instance": owner, **msgspec.to_builtins(card)} for owner, card in cards]
            for name, cards in view.cards().items()
        },
        "slots": [msgspec.to_builtins(each) for each in view.slots()],
        "settings": view.settings(),
    }


def render(view: View, graph: Found) -> RenderableType:
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
    summary.add_row("queue", f"{queue_depth(instances)} prefill requests waiting")
    for name, value in sorted(view.settings().items()):
        summary.add_row("setting", f"{name} = {value}")
    if graph.url:
        summary.add_row("URL", f"{graph.url}/v1")
    summary.add_row("etcd", f"{graph.etcd}, namespace {graph.namespace}")
    return Group(_instances(instances), summary)


def in_order(view: View) -> list[Instance]:
    return sorted(view.instances(), key=lambda each: (_ORDER[each.role.value], each.id))


def queue_depth(instances: Sequence[Instance]) -> int:
    """Every worker sees the same queue, at slightly different times."""
    return max((each.load.queue_depth for each in instances), default=0)


def _instances(instances: Sequence[Instance]) -> Table:
    table = Table("instance", "model", "where", "GPUs", "up", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("running", "waiting", "KV used", "KV tokens"):
        table.add_column(heading, justify="right")
    table.add_column("address")
    mixed = _mixed(instances)
    for each in instances:
        table.add_row(*_row(each, mixed))
    return table


def _mixed(instances: Sequence[Instance]) -> set[str]:
    """The fingerprints of models whose workers have loaded different things."""
    loaded: defaultdict[str, set[str]] = defaultdict(set)
    for each in instances:
        if each.model:
            loaded[each.model].add(each.fingerprint)
    return {fingerprint for prints in loaded.values() if len(prints) > 1 for fingerprint in prints}


def _row(each: Instance, mixed: Container[str]) -> tuple[str | Text, ...]:
    name = Text(each.id)
    if each.draining:
        name.append(" draining", "yellow")
    if each.fingerprint in mixed:
        name.append(f"\n{each.fingerprint}", "yellow")
    if each.clock_skew is not None and abs(each.clock_skew) > clock.LARGE_SKEW:
        name.append(f"\nclock {each.clock_skew:+.1f} s", "yellow")
    where = f"{each.host or '?'}:{each.pid}"
    if not each.kv_blocks:
        for worker in each.load.unreachable:
            name.append(f"\ncannot reach {worker}", "red")
        load = each.load
        return (
            name,
            each.model,
            where,
            "",
            _up(each),
            str(load.running),
            str(load.waiting),
            "",
            "",
            each.address,
        )
    return (
        name,
        each.model,
        where,
        ",".join(map(str, each.gpus)) or "CPU",
        _up(each),
        str(each.load.running),
        str(each.load.waiting),
        f"{each.load.kv_usage:.0%}",
        f"{each.kv_tokens:,}",
        each.address,
    )


def _up(each: Instance) -> str:
    """How long its process runs, where it is one of this machine."""
    here = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    if each.host not in here | {"localhost", socket.gethostname()}:
        return ""
    try:
        seconds = clock.unix() - psutil.Process(each.pid).create_time()
    except psutil.Error:
        return ""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
