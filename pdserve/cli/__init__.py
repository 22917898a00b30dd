"""The command line. Each command is a module with `add(commands)`, which describes it, and `run(args)`, which
imports what it needs and returns the exit code: 0 for done, 1 for failed, 2 for a wrong configuration or
command line."""

import argparse
import os
import sys
from collections.abc import Sequence

from pdserve_bench.chaos import command as chaos

from pdserve import __version__
from pdserve.cli import plan, role, serve, settings
from pdserve.cli.doctor import command as doctor
from pdserve.cli.status import command as status
from pdserve.errors import ConfigError, PdserveError

COMMANDS = (serve, role, plan, status, settings, doctor, chaos)

_DESCRIPTION = """\
LLM serving on vLLM with prefill and decode separated: one YAML file describes the graph, one command runs it.

  pdserve plan -f configs/local.yaml     what would run where, and whether it fits; loads nothing
  pdserve serve -f configs/local.yaml    the whole graph on this machine, until Ctrl-C
  pdserve status                         who is there, and what they are doing
  pdserve doctor                         is this machine fit for it?
  pdserve chaos -f configs/local.yaml    what happens when anything of it dies
"""

_EPILOG = """\
environment:
  PDSERVE_STATE_DIR                where embedded servers keep data and logs (default: ~/.pdserve)
  PDSERVE_NATS, PDSERVE_ETCD       servers to use, over what the file says

exit codes: 0 done, 1 failed, 2 wrong configuration or command line.
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except ConfigError as error:
        for problem in error.problems:
            print(f"pdserve: {problem}", file=sys.stderr)
        return 2
    except PdserveError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `pdserve plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdserve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pdserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
