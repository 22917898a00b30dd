"""Options that several commands share."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pdserve.plan.plan import Plan

Commands = Any
"""what argparse's add_subparsers returns; its type has no public name"""


def command(commands: Commands, name: str, help: str, text: str, examples: str) -> argparse.ArgumentParser:
    """A command whose --help has a text and examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=text,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--file", type=Path, required=True, metavar="FILE", help="the graph, as configs/local.yaml"
    )


def add_logging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=os.environ.get("PDSERVE_LOG_FORMAT", "text"),
        help="json: one object per line, for machines (default: text)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="vLLM's own INFO lines as well")


def add_graph(parser: argparse.ArgumentParser) -> None:
    """Which running graph is meant."""
    parser.add_argument(
        "-f",
        "--file",
        type=Path,
        metavar="FILE",
        help="the graph's file (default: the graph that runs on the default state directory)",
    )
    parser.add_argument("--etcd", metavar="HOST:PORT", help="the graph's etcd, instead of a file")
    parser.add_argument("--namespace", metavar="NAME", help="with --etcd (default: pdserve)")


def load_plan(args: argparse.Namespace) -> "Plan":
    from pdserve.config.load import load
    from pdserve.plan.machine import Machine
    from pdserve.plan.plan import make_plan

    return make_plan(load(args.file), Machine.detect())


def show(what: "RenderableType") -> None:
    """On stdout; in a pipe, wide enough for tables."""
    from rich.console import Console

    Console(highlight=False, width=None if sys.stdout.isatty() else 110).print(what)
