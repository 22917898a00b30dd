"""`pdserve doctor`."""

import argparse

from pdserve.cli.options import Commands, command

_TEXT = """\
Check whether this machine is fit: Python and vLLM versions, GPUs, memory and limits, ports, NATS with
JetStream, etcd, and KV transfer, whose speed between two processes is measured. Each line is ok, warn or
fail, and says what to do. Exit code 1 where something failed.
"""
_EXAMPLES = """\
  pdserve doctor                            the defaults, with servers of its own
  pdserve doctor -f configs/disagg.yaml     the ports and servers of that graph
"""


def add(commands: Commands) -> None:
    parser = command(commands, "doctor", "is this machine fit for it?", _TEXT, _EXAMPLES)
    from pathlib import Path

    parser.add_argument("-f", "--file", type=Path, metavar="FILE", help="check what this graph needs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from pdserve.cli.doctor.report import report

    return asyncio.run(report(args.file))
