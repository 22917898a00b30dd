"""`pdserve trace`: shows where a request went, why, and how long each part took."""

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

_MIN_ID = 6
"""Minimum length of an id or its beginning."""


def trace(
    request_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="the request's id, or its first 6 characters or more")
    ] = None,
    file: GraphFile = None,
    etcd: Etcd = None,
    namespace: Namespace = None,
    credentials: CredentialsFolder = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="the receipt as a JSON object, or a list of them")
    ] = False,
) -> int:
    """Show where a request went: each hop with its time, its process, and the reason of a decision or a failure. ID is
    the response's `x-request-id` header, or the `id` in its body. Without ID, list the last requests of all frontends,
    the newest last (--json: first). Exit code 1 if ID finds none or several.

    The hops, in order (a request has only those that it went through):
      admission     waits in the frontend for its client's turn and for a worker with capacity
      queue         waits in the prefill queue
      turn          waits in the decode worker, whose engine computes earlier prompts
      engine-queue  waits in the engine for KV blocks or a slot
      prefill       the engine computes its prompt
      transfer      the decode worker waits for KV blocks and reads the prefill worker's KV
      first-step    the decode engine's first step with that KV
      decode        from the first token to the last
      fallback      remote prefill failed: the decode worker computes the prompt
      migration     its decode worker was lost: another one continues

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
        show(receipt_page(one), pipe_width=140)
    elif receipts:
        show(receipt_table(receipts), pipe_width=140)
    else:
        print("No requests yet.")
    return 0 if one or not wanted else 1


def matching(receipts: Iterable[Receipt], wanted: str) -> list[Receipt]:
    """Return receipts whose id begins with `wanted`, or is part of `wanted`, as in `chatcmpl-ID`. Pure."""
    return [
        receipt
        for receipt in receipts
        if min(len(wanted), len(receipt.request_id)) >= _MIN_ID
        and (receipt.request_id.startswith(wanted) or receipt.request_id in wanted)
    ]


def not_found(wanted: str, last: Iterable[Receipt]) -> str:
    """Say why there may be no such receipt. Pure."""
    way = f"`{pdserve_command('trace')}` lists the last requests."
    if len(wanted) < _MIN_ID:
        return f"{wanted} is too short: give at least {_MIN_ID} characters; {way}"
    minutes = f"{RECEIPT_LIFETIME / 60:.0f} minutes"
    hint = did_you_mean(wanted, [receipt.request_id for receipt in last], way)
    kept = f"each keeps the last {MAX_RECEIPTS:,} for {minutes}, until it restarts"
    return f"no frontend has a receipt of {wanted} ({kept}): {hint}"


def receipt_table(receipts: Sequence[Receipt]) -> Table:
    """Return a table with a row for each receipt, the newest last. Pure."""
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
    """Return the workers that had the request, in order."""
    places = [hop.instance for hop in receipt.hops if hop.name in ("prefill", "decode") and hop.instance]
    return dict.fromkeys([*places, *receipt.instances])


def receipt_page(receipt: Receipt) -> RenderableType:
    """Return the receipt's fields that are set, and its hops. Pure."""
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
