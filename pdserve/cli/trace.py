"""`pdserve trace`: where a request went, why, and what took how long."""

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pdserve.cli.find import GraphAddress, find_graph, view_of
from pdserve.cli.options import CredentialsFolder, Etcd, GraphFile, Namespace
from pdserve.command import command
from pdserve.config.tree import or_nearest
from pdserve.messages import Hop
from pdserve.observe.graph_state import slot_name
from pdserve.observe.pages import read_receipts, read_watched
from pdserve.observe.problems import duration
from pdserve.observe.tables import show
from pdserve.records import Instance, Role
from pdserve.watch import KEPT_FOR, MOST_KEPT, Receipt, newest

_COLORS = {
    "admission": "yellow",
    "queue": "magenta",
    "engine-queue": "magenta",
    "prefill": "blue",
    "transfer": "cyan",
    "fallback": "red",
    "migration": "red",
}
_LEAST = 6
"""characters of an id that find a request"""
_SHORT = 8
"""characters of an id in a narrow terminal"""


def trace(
    request_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="of the request; its first characters are enough")
    ] = None,
    file: GraphFile = None,
    etcd: Etcd = None,
    namespace: Namespace = None,
    credentials: CredentialsFolder = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="the receipt as a JSON object, or a list of them")
    ] = False,
) -> int:
    """Show where a request went: a line for each part of its way with the time that it took, the process in which it
    was, and the reason where something was decided or failed. ID is the `x-request-id` of its answer; the `id` in the
    answer's body does as well. Without ID: the last requests, of all frontends. Exit code 1 where it is not found.

    The parts, in their order (a request has those that it went through):
      admission     held by the frontend, until it is its client's turn and a worker has room
      queue         in the prefill queue
      turn          held by the decode worker, while its engine computes the prompts before it
      engine-queue  the engine has the prompt, and no room for it yet
      prefill       its prompt is computed
      transfer      the decode worker waits for room and for the KV that the prefill worker computed
      first-step    from the KV in its place to the first token
      decode        from the first token to the last
      fallback      remote prefill came to nothing: the decode worker computes the prompt
      migration     its decode worker lost it: another one goes on

    examples:
      pdserve trace                                    the last requests
      pdserve trace ecba9d010be2479097e4823fc043fbec   one of them
      pdserve trace ecba9d01 --json | jq '.hops'
      curl -si localhost:8000/v1/completions -d … | grep -i x-request-id
    """
    return asyncio.run(_trace(find_graph(file, etcd, namespace, credentials), request_id or "", as_json))


async def _trace(graph: GraphAddress, wanted: str, as_json: bool) -> int:
    async with view_of(graph) as view:
        frontends = view.instances(Role.FRONTEND)
        found = await read_receipts(frontends, 1, request_id=wanted) if wanted else []
        answers = {} if found else await read_watched(frontends)
    last = newest(MOST_KEPT, *(frontend.receipts for frontend in answers.values()))
    matches = found or (matching(last, wanted) if wanted else last)
    if wanted and not matches:
        print(f"pdserve: {not_found(wanted, frontends, answers, last)}", file=sys.stderr)
        return 1
    one = matches[0] if wanted and len(matches) == 1 else None
    if as_json:
        print(json.dumps(msgspec.to_builtins(one or matches), indent=2))
    elif one:
        show(timeline(one), pipe_width=100)
    elif matches:
        narrow = sys.stdout.isatty() and Console().width < 120
        show(requests(matches, _SHORT if narrow else None), pipe_width=140)
    else:
        print("No request has come yet.")
    return 0 if one or not wanted else 1


def matching(receipts: Iterable[Receipt], wanted: str) -> list[Receipt]:
    """Receipts whose id begins with `wanted`, or is a part of it, as in `chatcmpl-ID`. Pure."""
    return [
        receipt
        for receipt in receipts
        if min(len(wanted), len(receipt.request_id)) >= _LEAST
        and (receipt.request_id.startswith(wanted) or receipt.request_id in wanted)
    ]


def not_found(
    wanted: str, asked: Sequence[Instance], answered: Iterable[str], last: Sequence[Receipt]
) -> str:
    """Say why there may be no such receipt. Pure."""
    if not asked:
        return "no frontend runs, and receipts end with the frontend that keeps them."
    silent = [instance.id for instance in asked if instance.id not in set(answered)]
    names = ", ".join(instance.id for instance in asked)
    parts = [
        f"no frontend has a receipt of {wanted}. Asked: {names}"
        + f"; silent: {', '.join(silent)}" * bool(silent)
        + ".",
        f"A frontend keeps the last {MOST_KEPT:,}, of requests that generate, for {KEPT_FOR / 60:.0f} minutes and as "
        "long as it runs:",
        or_nearest(wanted, [receipt.request_id for receipt in last], f"`{command('trace')}` lists the last."),
    ]
    return " ".join(parts)


def requests(receipts: Iterable[Receipt], characters: int | None = None) -> Table:
    """A line for each, in their order, with so many characters of its id. Pure."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("request", "status"):
        made.add_column(name, no_wrap=True)
    for name in ("came", "took", "TTFT", "prompt", "cached", "tokens"):
        made.add_column(name, justify="right", no_wrap=True)
    for name in ("key", "prefill", "at"):
        made.add_column(name, overflow="fold")
    for receipt in receipts:
        bad = receipt.status >= 500 or receipt.status == 429
        made.add_row(
            receipt.request_id[:characters],
            Text("running", "cyan") if receipt.running else Text(str(receipt.status), "red" if bad else ""),
            f"{duration(receipt.age)} ago",
            duration(receipt.seconds),
            duration(receipt.ttft) if receipt.ttft is not None else "",
            *map(str, (receipt.prompt_tokens, receipt.cached_tokens, receipt.output_tokens)),
            receipt.key,
            receipt.way,
            " → ".join(map(slot_name, _places(receipt))),
        )
    return made


def _places(receipt: Receipt) -> Iterable[str]:
    """The workers that had it, in order."""
    places = [hop.instance for hop in receipt.hops if hop.name in ("prefill", "decode") and hop.instance]
    return dict.fromkeys([*places, *receipt.instances])


def timeline(receipt: Receipt) -> RenderableType:
    """Pure."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    for name, fact in _facts(receipt):
        facts.add_row(name, fact)
    return Group(facts, Text(), _hops(receipt)) if receipt.hops else facts


def _facts(receipt: Receipt) -> Iterator[tuple[str, Text]]:
    yield "request", Text(receipt.request_id)
    by = f", by {receipt.key}" if receipt.key else ""
    yield "", Text(f"{receipt.path} of {receipt.model or 'no model'}{by}, at {receipt.frontend}")
    first = f", the first after {duration(receipt.ttft)}" if receipt.ttft is not None else ""
    tokens = f"{receipt.output_tokens} tokens{first}"
    if receipt.running:
        yield "running", Text(f"for {duration(receipt.seconds)} so far: {tokens}", "cyan")
    else:
        style = "bold red" if receipt.status >= 400 else ""
        ago = duration(max(0.0, receipt.age - receipt.seconds))
        yield "answer", Text(f"{receipt.status} in {duration(receipt.seconds)}, {ago} ago: {tokens}", style)
    if receipt.error:
        yield "error", Text(receipt.error, "red")
    if receipt.prompt_tokens:
        yield "prompt", Text(f"{receipt.prompt_tokens} tokens, {receipt.cached_tokens} of them cached")
    if receipt.prefill:
        yield "prefill", Text(receipt.way)
    if receipt.instances:
        yield "decode", Text(", then ".join(receipt.instances))
    if receipt.retries:
        yield "retries", Text(f"{receipt.retries}: it went on at another decode worker", "red")
    if receipt.trace_id:
        yield "trace", Text(receipt.trace_id)


def _hops(receipt: Receipt) -> Table:
    whole = max([receipt.seconds, *(hop.start + hop.seconds for hop in receipt.hops)]) or 1.0
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True, header_style="")
    made.add_column("", no_wrap=True)
    made.add_column(_Axis(whole), ratio=1)
    made.add_column("", justify="right", no_wrap=True)
    made.add_column("", no_wrap=True, overflow="ellipsis")
    for hop in receipt.hops:
        style = _COLORS.get(hop.name, "green")
        took = duration(hop.seconds) if hop.seconds else f"at {duration(hop.start)}"
        made.add_row(Text(hop.name, style), _Bar(hop, whole, style), took, hop.instance or receipt.frontend)
        if hop.why:
            made.add_row("", Text(hop.why, "dim", overflow="fold"))
    return made


@dataclass(frozen=True)
class _Bar:
    """A hop on the time axis of its request, which is as wide as there is room."""

    hop: Hop
    whole: float
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        first = min(width - 1, int(self.hop.start / self.whole * width))
        last = max(first + 1, min(width, int((self.hop.start + self.hop.seconds) / self.whole * width)))
        mark = "█" * (last - first) if self.hop.seconds / self.whole * width >= 0.5 else "▏"
        yield Text(" " * first + (mark if self.hop.seconds else "◆"), self.style)


@dataclass(frozen=True)
class _Axis:
    whole: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        end = duration(self.whole)
        yield Text("0".ljust(options.max_width - len(end)) + end, "dim")
