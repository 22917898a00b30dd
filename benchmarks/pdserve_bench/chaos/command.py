"""`pdserve chaos`."""

import argparse
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve import clock
from pdserve.cli.options import Commands, command, show
from pdserve.errors import ConfigError
from pdserve_bench.chaos.scorecard import line, scorecard, verdict

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve_bench.chaos.launch import Running
    from pdserve_bench.chaos.scene import Options
    from pdserve_bench.chaos.score import Row

_TEXT = """\
Break a graph on purpose, under load, one fault after the other: {prefill, decode, nats, etcd, frontend} x
{kill, hang, cut}, NATS and etcd losing their data, all workers of a kind at once, a rolling restart (--list).
Starts the graph of FILE in a folder of its own, with ports, NATS and etcd of its own and at least two of each
process, and stops it at the end; or takes the one that runs on --state-dir. Every answer is compared, token for
token, with that of the undisturbed graph. Exit code 1 where a request was dropped, hung or answered wrongly,
where KV blocks stayed held, or where the graph did not recover; Ctrl-C shows what is known by then.
"""
_EXAMPLES = """\
  pdserve chaos -f configs/local.yaml --dtype float32       every fault, on real engines (bf16 batches differ)
  pdserve chaos -f configs/local.yaml --only decode,etcd-kill --seconds 30
  pdserve chaos --state-dir ~/.pdserve --only prefill-hang    a graph that runs here; it will feel it
  pdserve chaos --list
"""
CARD = "scorecard.json"
"""in the folder that is kept where something went wrong, beside the logs"""


def add(commands: Commands) -> None:
    parser = command(commands, "chaos", "break a graph under load, and count what was lost", _TEXT, _EXAMPLES)
    graph = parser.add_mutually_exclusive_group()
    graph.add_argument("-f", "--file", type=Path, metavar="FILE", help="start the graph of this file")
    graph.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="a running graph's, instead of starting one"
    )
    parser.add_argument("--url", metavar="URL", help="with --state-dir: ask here, not where the graph says")
    parser.add_argument("--list", action="store_true", help="the faults, and nothing else")
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="decode-kill,etcd,drain: these faults only"
    )
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
    import logging
    import shutil
    import tempfile

    from pdserve_bench.chaos.catalog import FAULTS, choose
    from pdserve_bench.chaos.scene import Options
    from pdserve_bench.chaos.score import passed

    if args.list:
        print("\n".join(f"{fault.name:18} {fault.told}" for fault in FAULTS))
        return 0
    if not args.file and not args.state_dir:
        raise ConfigError(["Give the graph to break: -f FILE, or --state-dir DIR for one that runs."])
    options = Options(
        choose(args.only, not args.state_dir),
        args.seconds,
        args.hold,
        args.concurrency,
        args.patience,
        seed=args.seed,
    )
    logging.basicConfig(level=logging.ERROR)  # that etcd is away is no news here
    folder = Path(tempfile.mkdtemp(prefix="pdserve-chaos-"))
    rows: list[Row] = []
    complete = good = False
    try:
        _fill(rows, args, options, folder)
        complete, good = True, passed(rows)
    finally:  # what is known is shown, however it ends
        if rows:
            _report(rows, complete, args.json or folder / CARD)
        if good or not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _say(f"kept for a look at it: {folder}")
    return 0 if good else 1


def _report(rows: "list[Row]", complete: bool, file: Path) -> None:
    from pdserve_bench.chaos.score import as_json

    show(scorecard(rows))
    print(verdict(rows, complete))
    file.write_text(as_json(rows, complete))


def _fill(rows: "list[Row]", args: argparse.Namespace, options: "Options", folder: Path) -> None:
    """Told to stop, it heals what it has broken and stops what it has started. Raises KeyboardInterrupt then."""
    import asyncio

    from pdserve.process.lifecycle import STOPPERS

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            _say("told to stop: healing what is broken, stopping what was started")
            task.cancel()

        for number in STOPPERS:
            asyncio.get_running_loop().add_signal_handler(number, stop)
        async with _graph(args, folder, {fault.name for fault in options.faults}) as running:
            await _exercise(rows, running, options)

    try:
        asyncio.run(work())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@asynccontextmanager
async def _graph(args: argparse.Namespace, folder: Path, faults: set[str]) -> "AsyncIterator[Running]":
    from pdserve_bench.chaos.launch import started

    if args.state_dir:
        yield _running(args)
        return
    _say(f"starting the graph of {args.file}; its logs: {folder}/state/logs")
    own = {"own_model": "mixed-weights" in faults, "own_disk": "disk-full" in faults}
    async with started(args.file, folder, args.workers, args.dtype, _say, **own) as running:
        yield running


async def _exercise(rows: "list[Row]", running: "Running", options: "Options") -> None:
    from pdserve_bench.chaos.run import chaos

    async with chaos(running, options, _say) as exercise:
        async for row in exercise.rows():
            rows.append(row)
            _say(line(row))


def _running(args: argparse.Namespace) -> "Running":
    import msgspec

    from pdserve.supervisor import state
    from pdserve_bench.chaos.launch import Running

    state_dir = args.state_dir.expanduser()
    graph = state.read(state_dir)
    if graph is None:
        raise ConfigError([f"No graph runs on {args.state_dir}."])
    if args.url:
        graph = msgspec.structs.replace(graph, url=args.url.rstrip("/"))
    return Running(graph, state_dir)


def _say(text: str) -> None:
    import time

    print(f"{time.strftime('%H:%M:%S', time.localtime(clock.unix()))}  {text}", file=sys.stderr, flush=True)
