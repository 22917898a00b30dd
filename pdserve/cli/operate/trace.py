"""`pdserve trace`: where a request went, why, and what took how long."""

import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.cli.find import GraphAddress, find_graph, view_of
from pdserve.cli.options import CredentialsFolder, Etcd, GraphFile, Namespace
from pdserve.config.files.yaml_tree import did_you_mean
from pdserve.contract.records import Role
from pdserve.contract.reports import MAX_RECEIPTS, MAX_REPORTED_RECEIPTS, RECEIPT_LIFETIME, Receipt
from pdserve.observe.graph_state import slot_name
from pdserve.observe.problems import duration
from pdserve.observe.process_pages import read_receipts
from pdserve.observe.tables import show, table
from pdserve.util.program import pdserve_command

_LEAST = 6
"""characters of an id that find a request"""


def trace(
    request_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="of the request, or at least its first 6 characters")
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
    answer's body does as well. Without ID: the last requests, of all frontends, the newest last. Exit code 1 where it
    is not found.

    The hops, in their order (a request has those that it went through):
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
        receipts = await read_receipts(frontends, 1, request_id=wanted) if wanted else []
        last = [] if receipts else await read_receipts(frontends, MAX_REPORTED_RECEIPTS)
    receipts = receipts or (matching(last, wanted) if wanted else last)
    if wanted and not receipts:
        print(f"pdserve: {not_found(wanted, last)}", file=sys.stderr)
        return 1
    one = receipts[0] if wanted and len(receipts) == 1 else None
    if as_json:
        print(json.dumps(msgspec.to_builtins(one or receipts), indent=2))
    elif one:
        show(way(one), pipe_width=140)
    elif receipts:
        show(requests(receipts), pipe_width=140)
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


def not_found(wanted: str, last: Iterable[Receipt]) -> str:
    """Say why there may be no such receipt. Pure."""
    if len(wanted) < _LEAST:
        return f"{wanted} is too short: give at least {_LEAST} characters; `{pdserve_command('trace')}` lists the last."
    minutes = f"{RECEIPT_LIFETIME / 60:.0f} minutes"
    kept = f"of the last {MAX_RECEIPTS:,} requests that generate, for {minutes} and as long as it runs"
    hint = did_you_mean(
        wanted, [receipt.request_id for receipt in last], f"`{pdserve_command('trace')}` lists the last."
    )
    return f"no frontend has a receipt of {wanted}. Each keeps those {kept}: {hint}"


def requests(receipts: Sequence[Receipt]) -> Table:
    """A line for each of these, the newest first; the newest last. Pure."""
    numbers = ("came", "took", "TTFT", "prompt", "cached", "tokens")
    several = len({receipt.model for receipt in receipts}) > 1
    made = table("request", "status", *numbers, *["model"] * several, "key", "prefill", "at", numbers=numbers)
    made.box, made.padding = None, (0, 2, 0, 0)
    for receipt in reversed(receipts):
        bad = receipt.status >= 500 or receipt.status == 429
        made.add_row(
            receipt.request_id,
            Text("running", "cyan") if receipt.running else Text(str(receipt.status), "red" if bad else ""),
            f"{duration(receipt.age)} ago",
            duration(receipt.seconds),
            duration(receipt.ttft) if receipt.ttft is not None else "",
            *map(str, (receipt.prompt_tokens, receipt.cached_tokens, receipt.output_tokens)),
            *[receipt.model] * several,
            receipt.key,
            receipt.prefill_summary,
            " → ".join(map(slot_name, _places(receipt))),
        )
    return made


def _places(receipt: Receipt) -> Iterable[str]:
    """The workers that had it, in order."""
    places = [hop.instance for hop in receipt.hops if hop.name in ("prefill", "decode") and hop.instance]
    return dict.fromkeys([*places, *receipt.instances])


def way(receipt: Receipt) -> RenderableType:
    """The fields of the receipt that say something, and its hops. Pure."""
    facts = Table.grid(padding=(0, 2))
    for name, value in msgspec.structs.asdict(receipt).items():
        if value and name != "hops":
            facts.add_row(name.replace("_", " "), _shown(value))
    hops = table("hop", "at", "took", "where", "why", numbers=("at", "took"))
    for hop in receipt.hops:
        took = duration(hop.seconds) if hop.seconds else ""
        hops.add_row(hop.name, duration(hop.start), took, hop.instance or receipt.frontend, hop.why)
    return Group(facts, hops) if receipt.hops else facts


def _shown(value: object) -> str:
    if isinstance(value, float):
        return duration(value)
    return ", ".join(value) if isinstance(value, list) else str(value)
