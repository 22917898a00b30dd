"""`pdserve chaos`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli.options import Commands, command, show
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve.chaos.run import Options
    from pdserve.chaos.score import Row
    from pdserve.supervisor.state import Graph

_TEXT = """\
Break a graph on purpose, under load, one fault after the other: {prefill, decode, nats, etcd, frontend} x
{kill, hang, cut}. Starts the graph of FILE in a folder of its own, with ports, NATS and etcd of its own and at
least two of each process, and stops it at the end; or takes the one that runs on --state-dir. Every answer is
compared, token for token, with that of the undisturbed graph. Exit code 1 where a request was dropped, hung
or answered wrongly, where KV blocks stayed held, or where the graph did not recover.
"""
_EXAMPLES = """\
  pdserve chaos -f configs/local.yaml --dtype float32       every fault, on real engines (bf16 batches differ)
  pdserve chaos -f configs/local.yaml --only decode,etcd-kill --seconds 30
  pdserve chaos --state-dir ~/.pdserve --only prefill-hang    a graph that runs here; it will feel it
  pdserve chaos --list
"""


def add(commands: Commands) -> None:
    parser = command(commands, "chaos", "break a graph under load, and count what was lost", _TEXT, _EXAMPLES)
    graph = parser.add_mutually_exclusive_group()
    graph.add_argument("-f", "--file", type=Path, metavar="FILE", help="start the graph of this file")
    graph.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="a running graph's, instead of starting one"
    )
    parser.add_argument("--url", metavar="URL", help="with --state-dir: ask here, not where the graph says")
    parser.add_argument("--list", action="store_true", help="the names of the faults, and nothing else")
    parser.add_argument("--only", default="", metavar="NAMES", help="decode-kill,etcd: these faults only")
    parser.add_argument(
        "--workers", type=_positive, default=2, metavar="N", help="of each kind, where the file has fewer (2)"
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, metavar="S", help="load for each fault, at least (15)"
    )
    parser.add_argument("--hold", type=float, default=12.0, metavar="S", help="a hang or a cut lasts (12)")
    parser.add_argument("--concurrency", type=_positive, default=8, metavar="N", help="clients (8)")
    parser.add_argument(
        "--patience", type=float, default=60.0, metavar="S", help="after these a request counts as hung (60)"
    )
    parser.add_argument(
        "--dtype", default="", metavar="TYPE", help="run real engines in this one: float32 compares exactly"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scorecard there too")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def run(args: argparse.Namespace) -> int:
    import asyncio
    import logging

    from pdserve.chaos.faults import FAULTS, choose
    from pdserve.chaos.run import Options
    from pdserve.chaos.score import passed

    if args.list:
        print("\n".join(fault.name for fault in FAULTS))
        return 0
    if not args.file and not args.state_dir:
        raise ConfigError(["Give the graph to break: -f FILE, or --state-dir DIR for one that runs."])
    options = Options(
        choose(args.only), args.seconds, args.hold, args.concurrency, args.patience, seed=args.seed
    )
    logging.basicConfig(level=logging.ERROR)  # that etcd is away is no news here
    rows = asyncio.run(_all(args, options))
    show(scorecard(rows))
    for row in rows:
        if row.skipped:
            print(f"{row.fault} skipped: {row.skipped}")
    if args.json:
        args.json.write_text(_as_json(rows))
    return 0 if passed(rows) else 1


async def _all(args: argparse.Namespace, options: "Options") -> "list[Row]":
    """Told to stop, it heals what it has broken and stops what it has started."""
    import asyncio
    import signal

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await _exercise(args, options)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _exercise(args: argparse.Namespace, options: "Options") -> "list[Row]":
    import shutil
    import tempfile

    from pdserve.chaos.launch import started
    from pdserve.chaos.score import passed

    if args.state_dir:
        return await _rows(_running(args), args.state_dir.expanduser(), options)
    folder = Path(tempfile.mkdtemp(prefix="pdserve-chaos-"))
    rows: list[Row] = []
    try:
        _say(f"starting the graph of {args.file}; its logs: {folder}/state/logs")
        async with started(args.file, folder, args.workers, args.dtype, _say) as graph:
            rows = await _rows(graph, folder / "state", options)
    finally:
        if not (folder / "serve.log").exists() or (rows and passed(rows)):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _say(f"kept for a look at it: {folder}")
    return rows


async def _rows(graph: "Graph", state_dir: Path, options: "Options") -> "list[Row]":
    from pdserve.chaos.run import chaos

    rows = []
    async with chaos(graph, state_dir, options, _say) as exercise:
        async for row in exercise.rows():
            rows.append(row)
            _say(_line(row))
    return rows


def _running(args: argparse.Namespace) -> "Graph":
    import msgspec

    from pdserve.supervisor import state

    graph = state.read(args.state_dir.expanduser())
    if graph is None:
        raise ConfigError([f"No graph runs on {args.state_dir}."])
    return msgspec.structs.replace(graph, url=args.url.rstrip("/")) if args.url else graph


def _say(text: str) -> None:
    import time

    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def _line(row: "Row") -> str:
    cells = zip(COLUMNS, _cells(row), strict=True)
    return "  ".join(f"{name} {value}".strip() for name, value in cells if value)


COLUMNS = (
    "fault",
    "requests",
    "failed",
    "hung",
    "wrong",
    "p99 pause",
    "recovered",
    "freed",
    "leaked",
    "apart",
    "",
)


def scorecard(rows: "list[Row]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True, justify="left" if column in ("fault", "") else "right")
    for row in rows:
        table.add_row(
            *_cells(row), style=None if row.good and not row.skipped else "yellow" if row.good else "red"
        )
    return table


def _cells(row: "Row") -> tuple[str, ...]:
    if row.skipped:
        return row.fault, *[""] * 9, "skipped"
    numbers = (row.requests, row.failed, row.hung, row.wrong)
    recovered = "never" if row.recovered is None else f"{row.recovered:.1f} s"
    ghosts = f"{row.queued} queued" if row.queued else ""
    return (
        row.fault,
        *map(str, numbers),
        f"{row.p99_pause:.2f} s",
        recovered,
        f"{row.freed:.1f} s",
        str(row.leaked),
        str(row.apart or ""),
        ghosts or ("" if row.good else "BAD"),
    )


def _as_json(rows: "list[Row]") -> str:
    import json
    from dataclasses import asdict

    found: list[dict[str, Any]] = [{**asdict(row), "good": row.good} for row in rows]
    return json.dumps({"good": all(row.good for row in rows), "rows": found}, indent=2) + "\n"
