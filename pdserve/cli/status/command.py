"""`pdserve status`."""

import argparse

from pdserve.cli.options import Commands, add_graph, command

_TEXT = """\
Show the processes of a running graph, as etcd knows them: one row for each living lease, with its load, KV
usage and address, the models, the prefill queue and the live settings. Exit code 1 where nothing runs.
"""
_EXAMPLES = """\
  pdserve status                         the graph that runs on this machine
  pdserve status --watch                 as it changes
  pdserve status -f configs/disagg.yaml --json | jq '.instances[].load'
  pdserve status --etcd 10.0.0.5:2379    a graph elsewhere
"""


def add(commands: Commands) -> None:
    parser = command(commands, "status", "who is there, and what they are doing", _TEXT, _EXAMPLES)
    add_graph(parser)
    parser.add_argument("--json", action="store_true", help="everything, as one JSON object")
    parser.add_argument("--watch", action="store_true", help="go on showing changes until Ctrl-C")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from pdserve.cli.status.find import find
    from pdserve.cli.status.show import show

    return asyncio.run(show(find(args.file, args.etcd, args.namespace), args.json, args.watch))
